"""Benchmarks; each is a command: `python -m benchmarks.<name>`."""
