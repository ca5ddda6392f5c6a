"""Operations on packed batches, the only code that knows about hardware. Start with `interface.py`."""
