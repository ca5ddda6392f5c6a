"""Measure the scheduler's cost without a device: planning and settling a step, matching a prompt, garbage collection.

    python -m benchmarks.planner

Prints a table. The device is a fake that returns at once, so all measured time is Weft's own work on the host.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from weft.base.config import EngineConfig
from weft.base.garbage_collection import freeze_heap
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.engine.device import Device
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.memory.keys import PrefixIdentity
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

# A hybrid in the proportions of Qwen3.5: three recurrent layers to each attention layer.
RECURRENT = RecurrentMemory(
    (Part("conv", (3, 64), "bfloat16"), Part("delta", (4, 32, 32), "float32")),
    (Part("conv", (64,), "bfloat16"), Part("u", (4, 32), "float32")),
    conv_width=4,
)
SPEC = MemorySpec((RECURRENT, RECURRENT, RECURRENT, AttentionMemory(2, 32, "bfloat16")))


class InstantDevice(Device):
    """Device that returns token 7 for every sampled row at once."""

    def launch(self, plan: Plan) -> int:
        return len(plan.sampled)

    def land(self, flight: int) -> Landing:
        return Landing(np.full(flight, 7, np.int32), None, None)


def engine(sequences: int, memory_bytes: int = 4 << 30, max_length: int = 8192, depth: int = 1) -> Engine:
    config = EngineConfig(
        memory_bytes=memory_bytes,
        max_sequences=sequences,
        max_tokens_per_step=max(8192, sequences),
        max_length=max_length,
        depth=depth,
    )
    return Engine(SPEC, InstantDevice(), config)


def prompt(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(0, 150_000, length).astype(np.int32)


def fill_trie(target: Engine, random: np.random.Generator, nodes: int) -> None:
    """Run requests until the trie holds `nodes` cells of finished requests."""
    while len(target.ledger.cache.trie) < nodes:
        target.add(Request(prompt(random, 4096), SamplingParams(max_tokens=1)))
        while not target.idle:
            target.step()


def time_steps(sequences: int, trie_nodes: int, steps: int = 400) -> tuple[float, float, int]:
    """Return the median and 99th percentile of a decode step in microseconds, and the size of the trie."""
    random = np.random.default_rng(0)
    target = engine(sequences)
    fill_trie(target, random, trie_nodes)
    for _ in range(sequences):
        target.add(Request(prompt(random, 100 + int(random.integers(64))), SamplingParams(max_tokens=4000)))
    while len(target.planner.queue) or target.planner.prefilling:
        target.step()
    for _ in range(50):
        target.step()
    gc.collect()
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        outputs = target.step()
        taken.append((time.perf_counter() - began) * 1e6)
        assert len(outputs) == sequences
    return statistics.median(taken), sorted(taken)[int(0.99 * steps)], len(target.ledger.cache.trie)


def time_match(length: int, repeats: int = 9) -> tuple[float, float]:
    """Return the milliseconds to compute the cell keys of a cached prompt, and to compute and match them."""
    random = np.random.default_rng(1)
    target = engine(4, max_length=length + 64)
    request = Request(prompt(random, length), SamplingParams(max_tokens=1, temperature=0.0))
    target.add(request)
    while not target.idle:
        target.step()
    named, matched = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        sequence = Sequence(0, request, 1, 0, PrefixIdentity(SPEC.cell))
        named.append((time.perf_counter() - began) * 1e3)
        found = target.ledger.match(sequence.keys, sequence.reuse_limit)
        matched.append((time.perf_counter() - began) * 1e3)
        assert found.kv_matched == (length - 1) // SPEC.cell * SPEC.cell
    return statistics.median(named), statistics.median(matched)


def time_collections(nodes: int) -> tuple[float, float, float]:
    """Return the milliseconds of a full garbage collection after importing all that an engine imports.

    The three values are for a plain process, for one with a frozen heap like a server's, and then with a full cache.
    """
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import weft.start.loading  # noqa: F401

    def collect() -> float:
        began = time.perf_counter()
        gc.collect()
        return (time.perf_counter() - began) * 1e3

    gc.collect()
    before = collect()
    freeze_heap()
    kept = collect()
    target = engine(256)
    fill_trie(target, np.random.default_rng(2), nodes)
    return before, kept, collect()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'sequences':>10} {'trie cells':>11} {'step, median':>14} {'per sequence':>14} {'99th perc.':>12}")
    for sequences, nodes in [(16, 0), (64, 0), (256, 0), (256, 1_000), (256, 10_000), (256, 50_000), (512, 0)]:
        median, worst, cells = time_steps(sequences, nodes)
        print(f"{sequences:>10} {cells:>11} {median:>11.0f} µs {median / sequences:>11.2f} µs {worst:>9.0f} µs")
    print()
    print(f"{'prompt tokens':>14} {'cell keys':>12} {'keys + match':>14}")
    for length in (1_000, 10_000, 100_000):
        named, matched = time_match(length)
        print(f"{length:>14} {named:>9.2f} ms {matched:>11.2f} ms")
    print()
    before, kept, cached = time_collections(52_000)
    print(f"a full garbage collection: {before:.1f} ms, in a server {kept:.1f}, with 52,000 cells cached {cached:.1f}")


if __name__ == "__main__":
    main()
