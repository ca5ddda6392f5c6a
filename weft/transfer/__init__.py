"""Carries prefixes between engines: the messages, and plain TCP."""
