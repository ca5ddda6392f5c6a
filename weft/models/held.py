"""What a model's weights take in memory, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """`bytes` by format, and `decode_bytes`: what one row of a decode step reads, the floor of its time.

    Of experts, that is the share of those that a token goes to; of an embedding that is not the head, nothing.
    """

    bytes: Mapping[str, int]
    decode_bytes: int

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        """
        >>> str(WeightFacts({"fp8": 9_000_000, "bfloat16": 1_200_000_000}, 0))
        '1.2 GB bfloat16, 0.009 GB fp8'
        """
        parts = sorted(self.bytes.items(), key=lambda part: -part[1])
        return ", ".join(f"{size / 1e9:.3g} GB {name}" for name, size in parts)
