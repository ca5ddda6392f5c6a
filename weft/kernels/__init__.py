"""Operations on packed batches, and the one place that knows about hardware. `interface.py` is where to begin."""
