"""Connections between the processes of Weft: frames, handshakes, TLS."""
