"""Prompts as files over HTTP."""
