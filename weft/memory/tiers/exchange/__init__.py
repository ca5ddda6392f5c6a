"""Prefixes that leave for other engines, and those that arrive from them."""
