"""Operations for processors: PyTorch, tuned for caches and few calls, and C++ for a few rows and for decodes."""
