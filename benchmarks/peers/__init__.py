"""Drivers that run Weft and other engines on the same weights and the same work, each in a separate process."""
