"""Traces in Mooncake's format: one JSON object per line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

An id stands for a block of 512 tokens of the prompt. Traces have no answers, so every answer is unique. Lines are read
as they are needed; a file whose name ends in `.gz` is decompressed on the fly.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from weft.base.errors import OptionError
from weft.simulate.sessions import SimulatedSession
from weft.simulate.text import SimulatedRequest, Text

BLOCK = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(
    path: str | Path, cell: int, speed: float = 1.0, limit: int | None = None, skip: int = 0
) -> Iterator[SimulatedSession]:
    """Yield the requests of a trace in order, each as a session of one turn: `limit` of them after the first `skip`.

    Time starts with the first request after the skipped ones.
    """
    first = None
    for number, found in islice(enumerate(_lines(Path(path))), skip, None if limit is None else skip + limit):
        if first is None:
            first = found["timestamp"] if skip else 0
        yield SimulatedSession((found["timestamp"] - first) / 1000 / speed, iter([(0.0, _ask(found, number, cell))]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _checked(line, f"{path} line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise OptionError(f"cannot read trace {path}: {getattr(error, 'strerror', None) or error}") from None


def _checked(line: str, place: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
        missing = [name for name in FIELDS if name not in found]
    except (ValueError, TypeError):
        raise OptionError(f"{place} is not a JSON object") from None
    if missing:
        raise OptionError(f"{place} has no {missing[0]}; a trace in Mooncake's format has {', '.join(FIELDS)}")
    blocks = -(-found["input_length"] // BLOCK)
    if found["input_length"] < 1 or len(found["hash_ids"]) != blocks:
        raise OptionError(f"{place}: {found['input_length']} tokens need {blocks} blocks, got {len(found['hash_ids'])}")
    return found


def _ask(found: dict[str, Any], number: int, cell: int) -> SimulatedRequest:
    length = found["input_length"]
    stretches = [(block, min(BLOCK, length - BLOCK * place)) for place, block in enumerate(found["hash_ids"])]
    text = Text(cell, stretches)
    answer = max(1, found["output_length"])
    text.append(-1 - number, answer)
    # Blocks are cut by length: their ends are not message boundaries.
    return SimulatedRequest(text.keys, length, answer, tuple(stretches))
