"""Compare requests of `tests/drafting/test_fuzzed_drafts.py` in several processes, and continue where a run ended.

    python -m tests.support.models.draft_fuzz_lanes SECONDS LANES [--results FILE] [--requests 5000]
        [--families NAME ...]

Families that have fewer requests than asked for take part, those of exact mode last. A process compares rounds of 60
requests by their seeds and adds a line of counts to the file, which the next run reads. The last lines printed are the
sums. A round that fails is reported with its seed, counted, and the next one begins; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

ROUNDS = 17  # of a process
ASKED = 60  # requests of a round
ROUNDED = ("decided by rounding", "experts decided by rounding")
SHOWN = ("requests", "tokens", "accepted", "followed", "preemptions", *ROUNDED, "failed rounds")
WIDEST = "greatest difference of logits, 1e-9"


@dataclass
class Lane:
    """Seeds of one family: the next one, how many processes are busy with, and what was counted."""

    family: str
    exact: bool
    wanted: int
    next_seed: int = 0
    running: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def begin(self) -> tuple[int, int]:
        """Return the seeds of the next process: the first, and how many."""
        first, rounds = self.next_seed, min(ROUNDS, self.left)
        self.next_seed += rounds
        self.running += rounds
        return first, rounds

    def add(self, first: int, rounds: int, counts: dict[str, int]) -> None:
        self.next_seed = max(self.next_seed, first + rounds)
        widest = max(self.counts[WIDEST], counts.get(WIDEST, 0))
        self.counts.update(counts)
        self.counts[WIDEST] = widest

    @property
    def left(self) -> int:
        return max(0, -(-(self.wanted - self.counts["requests"]) // ASKED) - self.running)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {self.counts[name]:,}" for name in SHOWN)
        return f"{self.family}{' exact' if self.exact else ''}: {numbers}, {WIDEST} {self.counts[WIDEST]:,}"


def compare(family: str, exact: bool, first: int, rounds: int, until: float) -> None:
    """Print the counts of these rounds, or of those that began in time."""
    from tests.support.models.draft_fuzz import fuzz_round

    counts: Counter[str] = Counter()
    done = 0
    while done < rounds and time.time() < until:
        try:
            fuzz_round(family, first + done, exact, counts, wide=True)
        except Exception:
            print(f"{family}, seed {first + done}, exact {exact}:\n{traceback.format_exc()}", file=sys.stderr)
            counts["failed rounds"] += 1
        done += 1
    print(json.dumps({"family": family, "exact": exact, "first": first, "rounds": done, "counts": counts}))


def run(lanes: list[Lane], results: Path, until: float, lock: Lock) -> None:
    """Give rounds to processes, one after another, until the time is over or all families have enough."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    while time.time() < until:
        with lock:
            lane = next((each for each in lanes if each.left), None)
            if lane is None:
                return
            first, rounds = lane.begin()
        task = [lane.family, str(int(lane.exact)), str(first), str(rounds), str(until)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.models.draft_fuzz_lanes", "--rounds", *task],
            env=environment,
            capture_output=True,
            text=True,
        )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 else {"rounds": 0, "counts": {"failed rounds": 1}}
        with lock:
            if found["counts"].get("failed rounds"):
                print(done.stderr, file=sys.stderr)
            lane.running -= rounds
            lane.add(first, found["rounds"], found["counts"])
            if found["rounds"]:
                with results.open("a") as file:
                    print(lines[-1], file=file)


def main() -> int:
    if sys.argv[1:2] == ["--rounds"]:
        family, exact, first, rounds, until = sys.argv[2:]
        compare(family, bool(int(exact)), int(first), int(rounds), float(until))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("processes", type=int, metavar="LANES")
    parser.add_argument("--results", type=Path, default=Path("draft-fuzz.jsonl"))
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--families", nargs="*")
    options = parser.parse_args()
    until = time.time() + options.seconds
    from tests.support.models.engines import FAMILIES
    from weft.kernels.native import library

    library.available()  # compiled once, before the processes need it
    names = options.families or list(FAMILIES)
    lanes = [Lane(name, exact, options.requests) for exact in (False, True) for name in names]
    if options.results.exists():
        for line in map(json.loads, options.results.read_text().splitlines()):
            for lane in lanes:
                if (lane.family, lane.exact) == (line["family"], line["exact"]):
                    lane.add(line["first"], line["rounds"], line["counts"])
    lock = Lock()
    with ThreadPoolExecutor(options.processes) as pool:
        for future in [pool.submit(run, lanes, options.results, until, lock) for _ in range(options.processes)]:
            future.result()
    print(*(lane for lane in lanes if lane.next_seed), sep="\n")
    return int(any(lane.counts["failed rounds"] for lane in lanes))


if __name__ == "__main__":
    sys.exit(main())
