"""What a GGUF file holds, for people to read: its family, its types by share, and whether it fits into memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from weft.base.gguf.header import Header

# Types that are decoded for each call, and types that are refused.
DECODED = ("Q2_K", "Q3_K", "NVFP4")
REFUSED = ("IQ1", "IQ2", "IQ3", "TQ1", "TQ2")
# Fewest bytes that a model needs beside its weights.
LEAST_BESIDE = 700 << 20


def about(header: Header, free_bytes: int) -> dict[str, str]:
    """Return facts about a file."""
    by_type: Counter[str] = Counter()
    for each in header.tensors.values():
        by_type[each.type] += each.bytes
    total, numbers = sum(by_type.values()), sum(math.prod(each.shape) for each in header.tensors.values())
    shares = ", ".join(f"{kind} {size / max(1, total):.1%}" for kind, size in by_type.most_common())
    needed = total + LEAST_BESIDE
    fits = "fits" if needed <= free_bytes else "does not fit"
    files = len({each.file for each in header.tensors.values()})
    tokenizer = [str(header.metadata.get(f"tokenizer.ggml.{name}", "")) for name in ("model", "pre")]
    found = {
        "family": str(header.metadata.get("general.architecture", "unknown"))[:100],
        "parameters": f"{numbers / 1e6:.0f} M in {len(header.tensors)} tensors",
        "files": str(files),
        "weights": f"{total / 2**30:.2f} GiB, {8 * total / max(1, numbers):.2f} bits a parameter",
        "types": f"{shares} of the bytes",
        "tokenizer": " ".join(tokenizer) if tokenizer[0] else "none",
        "slow": slow_types(by_type, total),
        "fit": f"{fits}: {needed / 2**30:.2f} GiB for weights and program, {free_bytes / 2**30:.2f} GiB free",
    }
    return {name: value.strip()[:300] for name, value in found.items()}


def slow_types(by_type: Mapping[str, int], total: int) -> str:
    """Say which types have no kernels.

    >>> slow_types({"Q4_K": 60, "Q2_K": 40}, 100), slow_types({"Q8_0": 9, "F32": 1}, 10)
    ('Q2_K (40.0%) is decoded for each step, several times slower than the other types', 'nothing')
    """
    refused = [kind for kind in by_type if kind.startswith(REFUSED)]
    if refused:
        return f"not supported: {', '.join(refused)}"
    shares = [f"{kind} ({by_type[kind] / max(1, total):.1%})" for kind in DECODED if by_type.get(kind)]
    if not shares:
        return "nothing"
    verb = "is" if len(shares) == 1 else "are"
    return f"{', '.join(shares)} {verb} decoded for each step, several times slower than the other types"
