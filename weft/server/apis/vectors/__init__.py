"""Embeddings, scores of documents, and classes: requests that have no answer in tokens."""
