"""Stretched rotations, which a GGUF file states as a factor for each frequency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weft.base.errors import ModelError
from weft.base.gguf.header import StoredTensor

CLOSE = 1e-4
MOST_FREQUENCIES = 1 << 12


def numbers_of(tensor: StoredTensor) -> list[float]:
    """Return the factors of a tensor."""
    if tensor.type != "F32" or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= MOST_FREQUENCIES:
        raise ModelError(
            f"{tensor.file}: {tensor.name} must be float32 factors, got {tensor.type} {list(tensor.shape)}"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        numbers: list[float] = np.frombuffer(file.read(tensor.bytes), "<f4").tolist()
    return numbers


def stretched(tensor: StoredTensor, theta: float, settings: Mapping[str, float]) -> float:
    """Return the largest factor; raise unless all factors follow from it and these settings."""
    found = np.array(numbers_of(tensor))
    largest = float(found.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(found)) / len(found))
    turns = settings["original_max_position_embeddings"] / wavelengths
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / largest + smooth) if largest >= 1 else np.zeros(len(found))
    if not np.isfinite(found).all() or not np.allclose(found, expected, rtol=CLOSE):
        raise ModelError(f"{tensor.file}: {tensor.name} must be the factors of Llama 3, with {dict(settings)}")
    return round(largest, 3)
