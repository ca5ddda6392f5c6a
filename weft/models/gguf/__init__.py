"""Checkpoints in GGUF files: a configuration from the metadata, and the model's own tensors from those of the file."""
