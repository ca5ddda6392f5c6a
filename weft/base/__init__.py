"""Values that every part of Weft shares. Imports nothing of Weft and no torch."""
