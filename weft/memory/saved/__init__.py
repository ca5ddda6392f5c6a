"""Prompts in files, while an engine runs: what is written, what is read, and what is computed again to verify it."""
