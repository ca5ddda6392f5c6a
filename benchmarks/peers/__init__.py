"""Other engines beside Weft, on the same weights and the same work; each in a process of its own."""
