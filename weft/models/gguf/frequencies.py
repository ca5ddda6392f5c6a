"""Stretched rotations, which a GGUF file states as a factor for each frequency."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import ModelError
from weft.base.gguf.header import StoredTensor

# How Llama 3 stretches its rotation; files have only the factors that follow from it.
STRETCHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
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


def factors(largest: float, theta: float, count: int) -> NDArray[np.float64]:
    """Return the factors of Llama 3.

    >>> factors(8.0, 10000.0, 4).round(3).tolist()
    [1.0, 1.0, 1.0, 4.681]
    >>> factors(8.0, 500000.0, 4).round(3).tolist()
    [1.0, 1.0, 2.695, 8.0]
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(count) / count)
    turns = STRETCHED["original_max_position_embeddings"] / wavelengths
    low, high = STRETCHED["low_freq_factor"], STRETCHED["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / largest + smooth))


def stretched(tensor: StoredTensor, theta: float) -> float:
    """Return the largest factor; raise unless all factors follow from it."""
    found = np.array(numbers_of(tensor))
    largest = float(found.max())
    expected = factors(largest, theta, len(found)) if largest >= 1 else np.zeros(len(found))
    if not np.isfinite(found).all() or not np.allclose(found, expected, rtol=CLOSE):
        raise ModelError(f"{tensor.file}: {tensor.name} must be the factors of Llama 3, with {STRETCHED}")
    return round(largest, 3)
