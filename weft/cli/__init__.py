"""The command line: one file per command, parsers and documentation derived from its options."""
