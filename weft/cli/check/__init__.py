"""`weft doctor --check`: compares what a model computes here by every way in which Weft computes it."""
