"""GGUF files: a header with metadata and the places of tensors, what both mean, and where the files are."""
