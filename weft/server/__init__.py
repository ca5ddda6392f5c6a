"""Serving: the front process that speaks HTTP, and the engine process behind it. No torch on this side."""
