"""How models write calls of tools: one file per kind of notation, each a reader of text that arrives in pieces."""
