"""Layers that model families are built from."""
