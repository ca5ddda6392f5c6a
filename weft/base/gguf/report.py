"""What a GGUF file holds, for people to read: its family, its types by share, and whether it fits into memory."""

from __future__ import annotations

import math
from collections import Counter

from weft.base.gguf.header import Header

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
        "fit": f"{fits}: {needed / 2**30:.2f} GiB for weights and program, {free_bytes / 2**30:.2f} GiB free",
    }
    return {name: value.strip()[:300] for name, value in found.items()}
