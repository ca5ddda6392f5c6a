"""The disk tier and prefix files: units in files that outlive the process."""
