"""The server: the front process that speaks HTTP, and the engine process behind it. The front imports no torch."""
