"""Measure the read rate of this machine's memory. It bounds a single stream, where every token reads all weights.

    python -m benchmarks.peers.memory 2        # two threads; prints bytes per second by read method, as JSON

The methods do little but read: sums, and one row times a matrix in either layout. The machine's rate is that of the
fastest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Larger than all CPU caches, in pieces of the size of a large layer.
SIZE_BYTES = 768 << 20
PIECE_BYTES = 12 << 20
INPUTS = 768
REPEATS = 4


def read_rate(threads: int) -> dict[str, float]:
    """Return the bytes per second by read method, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.peers.memory", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def ways() -> dict[str, Callable[[Any], Any]]:
    import torch

    row = torch.randn(1, INPUTS)
    return {
        "sum": torch.sum,
        "dot": lambda piece: torch.dot(piece.flatten(), piece.flatten()),
        "one row, outputs first": lambda piece: torch.nn.functional.linear(row, piece.view(-1, INPUTS)),
        "one row, inputs first": lambda piece: torch.mm(row, piece.view(INPUTS, -1)),
    }


def measure(threads: int) -> dict[str, float]:
    """Return the rate that the fastest tenth of the pieces reached, since other work can only lower a rate."""
    import torch

    torch.set_num_threads(threads)
    pieces = torch.randn(SIZE_BYTES // PIECE_BYTES, PIECE_BYTES // 4)
    found = {}
    with torch.inference_mode():
        for name, read in ways().items():
            seconds = sorted(_seconds(read, piece) for _ in range(REPEATS) for piece in pieces)
            found[name] = PIECE_BYTES / seconds[len(seconds) // 10]
    return found


def _seconds(read: Callable[[Any], Any], piece: Any) -> float:
    began = time.perf_counter()
    read(piece)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
