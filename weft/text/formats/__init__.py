"""Formats of tool calls: one file per kind, each a scanner of text that arrives in pieces."""
