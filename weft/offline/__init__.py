"""Offline generation: a model in the caller's process. Only the command line is above this package."""
