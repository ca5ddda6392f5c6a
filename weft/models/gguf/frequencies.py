"""Llama 3's stretched rotation, which a GGUF file states as a factor for each frequency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weft.models.gguf.configuration import Keys

CLOSE = 1e-4


def stretched(keys: Keys, settings: Mapping[str, float]) -> float:
    """Return the largest factor; raise unless all factors follow from it and these settings."""
    tensor = keys.tensor("rope_freqs.weight")
    if tensor.type != "F32" or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= 1 << 12:
        raise keys.wrong("rope_freqs.weight", "float32 factors", tensor.shape)
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        found = np.frombuffer(file.read(tensor.bytes), "<f4").astype(float)
    largest, theta = float(found.max()), float(keys.get("rope.freq_base", 10000.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(len(found)) / len(found))
    turns = settings["original_max_position_embeddings"] / wavelengths
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / largest + smooth)
    if not np.isfinite(found).all() or not np.allclose(found, expected, rtol=CLOSE):
        raise keys.wrong("rope_freqs.weight", f"the factors of Llama 3, with {dict(settings)}", "others")
    return round(largest, 3)
