"""Offline generation: a model in the caller's process. Above everything but the command line."""
