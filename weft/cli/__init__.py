"""The command line: one file per command; parsers and documentation are derived from the options."""
