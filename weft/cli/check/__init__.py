"""`weft doctor --check`: is what a model computes here right, by every way in which Weft computes it."""
