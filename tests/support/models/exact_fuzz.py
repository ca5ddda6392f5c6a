"""Compare the traffic of the slow test in `tests/engine/test_exact.py` in several processes, and continue later.

    python -m tests.support.models.exact_fuzz PROCESSES SECONDS [--results FILE] [--tokens N] [--dtype float32]
        [--families NAME ...]

Every process takes the next seed of the family that has served the fewest tokens, until each has N tokens (a million)
or the time is over; no seed begins after that. Each seed adds a line to the file, which the next run reads. The last
lines printed are the sums. A seed that fails is printed with its error and counted; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def compare(family: str, dtype: str, seed: int) -> Found:
    """Return what was served of one seed, with the error if a digest differs."""
    import torch

    from tests.support.models.exact_traffic import Served, check_long_traffic

    served, error = Served(), None
    try:
        served = check_long_traffic(family, getattr(torch, dtype), seed)
    except Exception:
        error = traceback.format_exc()
    return {"family": family, "dtype": dtype, "seed": seed, **served._asdict(), "error": error}


class Results:
    """Lines of a file, one for each seed that was compared in this data type."""

    def __init__(self, file: Path, dtype: str) -> None:
        self.file, self.dtype = file, dtype
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def add(self, found: Found) -> None:
        self.lines.append(found)
        with self.file.open("a") as file:
            print(json.dumps(found), file=file)
        if found["error"]:
            print(f"{found['family']}, seed {found['seed']}:\n{found['error']}", file=sys.stderr)

    def of(self, family: str) -> list[Found]:
        return [line for line in self.lines if (line["family"], line["dtype"]) == (family, self.dtype)]

    def total(self, family: str, what: str) -> int:
        return sum(line.get(what, 0) for line in self.of(family))

    def failed(self, family: str) -> int:
        return sum(line["error"] is not None for line in self.of(family))

    def next_seed(self, family: str) -> int:
        return max((line["seed"] + 1 for line in self.of(family)), default=0)


def run(results: Results, families: list[str], processes: int, wanted: int, until: float) -> None:
    seeds = {family: results.next_seed(family) for family in families}
    begun: dict[str, int] = defaultdict(int)
    running: set[Future[Found]] = set()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        while True:
            # Seeds that are being served count as 100,000 tokens.
            served = {family: results.total(family, "tokens") + 100_000 * begun[family] for family in families}
            family = min(families, key=served.__getitem__)
            if len(running) < processes and served[family] < wanted and time.time() < until:
                running.add(pool.submit(compare, family, results.dtype, seeds[family]))
                seeds[family] += 1
                begun[family] += 1
                continue
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for found in (each.result() for each in done):
                begun[found["family"]] -= 1
                results.add(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--results", type=Path, default=Path("exact-fuzz.jsonl"))
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--families", nargs="*")
    options = parser.parse_args()
    # A process has one thread, and the processes share the C++ kernels, compiled once.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    from tests.support.models.engines import FAMILIES
    from weft.kernels.native import library

    library.available()
    families = options.families or list(FAMILIES)
    results = Results(options.results, options.dtype)
    run(results, families, options.processes, options.tokens, time.time() + options.seconds)
    for family in families:
        tokens, digests = results.total(family, "tokens"), results.total(family, "digests")
        seeds, failed = len(results.of(family)), results.failed(family)
        cached, preempted = results.total(family, "cached"), results.total(family, "preemptions")
        met = f"{tokens:,} tokens, {digests:,} digests, {cached:,} cached, {preempted:,} preemptions"
        print(f"{family} in {options.dtype}: {met}, {seeds} seeds, {failed} failed")
    return int(any(map(results.failed, families)))


if __name__ == "__main__":
    sys.exit(main())
