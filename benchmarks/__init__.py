"""Measurements, each with its own command: `python -m benchmarks.<name>`."""
