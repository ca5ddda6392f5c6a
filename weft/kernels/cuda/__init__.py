"""Kernels for GPUs, in Triton. Each does what its namesake one folder up says, on `Batch.lanes`.

Imported only where such a kernel is called, so that nobody else needs Triton.
"""
