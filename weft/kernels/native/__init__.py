"""C++ kernels for decodes on a CPU, where torch's operators cost more than their arithmetic."""
