"""`weft chat`: a conversation in the terminal."""
