"""Operations for CPUs: PyTorch, tuned for caches and few calls, and C++ for few rows and for decodes."""
