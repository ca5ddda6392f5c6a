"""Tiles of matrices as Triton kernels read them, whatever the format: a loader for each."""
