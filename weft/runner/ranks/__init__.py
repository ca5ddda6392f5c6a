"""Tensor parallelism: a model cut over processes that execute the same plans."""
