"""Prompts in files: the engine's part."""
