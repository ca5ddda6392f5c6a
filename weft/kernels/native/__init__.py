"""Kernels in C++ for a CPU's decodes, where torch's operators cost more than what they compute."""
