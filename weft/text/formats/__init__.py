"""Formats of tool calls: one file per kind, each a reader of text that arrives in pieces."""
