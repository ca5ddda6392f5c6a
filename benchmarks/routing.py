"""How fast a router decides: prompts of 1,000 token ids, eight replicas, a million cell keys in the index.

    python -m benchmarks.routing
    python -m benchmarks.routing --replicas 16 --keys 2000000 --prompt 8000

A decision hashes the prompt's cells, ranks the replicas, records the assignment, and takes it back as the router does
when the request starts and ends. Half of the prompts continue a cached prefix. One core, no GPU.
"""

from __future__ import annotations

import argparse
import tracemalloc
from random import Random
from time import perf_counter, process_time

import numpy as np
from numpy.typing import NDArray

from weft.engine.load import ReplicaLoad
from weft.fleet.router import FleetRouter
from weft.memory.journal import MOST_IN_BATCH, CacheChanges, Tier
from weft.memory.keys import Key, PrefixIdentity

CELL = 64
# One of this many cells of a cached prefix is also a resume point.
CELLS_PER_POINT = 4


def make_prompts(count: int, tokens: int) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 150_000, tokens).astype(np.int32) for _ in range(count)]


def fill(router: FleetRouter, prompts: list[NDArray[np.int32]], keys: int) -> float:
    """Give the replicas resume points, until the index has this many keys; return the seconds for each change."""
    random, identity, names = Random(2), PrefixIdentity(CELL), list(router.replicas)
    found: dict[str, list[tuple[Key, int, Tier]]] = {name: [] for name in names}
    for prompt in prompts:
        chained = identity.keys(prompt[: len(prompt) // 2])
        name = random.choice(names)
        found[name] += [(key, CELL * (depth + 1), Tier.PAGE) for depth, key in enumerate(chained)]
        found[name] += [
            (key, CELL * (depth + 1), Tier.DEVICE) for depth, key in enumerate(chained) if depth % CELLS_PER_POINT == 0
        ]
    missing = keys - sum(len({key for key, _, _ in rows}) for rows in found.values())
    for number in range(max(0, missing)):
        found[names[number % len(names)]].append((random.randbytes(32), CELL, Tier.DEVICE))
    seconds = 0.0
    for name, rows in found.items():
        for first in range(0, len(rows), MOST_IN_BATCH):
            part = rows[first : first + MOST_IN_BATCH]
            ids, positions, tiers = zip(*part, strict=True)
            batch = CacheChanges(1, first, first == 0, ids, positions, bytes(tiers), b"\1" * len(part))
            began = process_time()
            assert router.apply(name, batch)
            seconds += process_time() - began
    return seconds / sum(len(rows) for rows in found.values())


def decide(router: FleetRouter, prompt: NDArray[np.int32]) -> int:
    keys = PrefixIdentity(CELL).keys(prompt)
    best = router.choose(keys, len(prompt))[0]
    number = router.assign(best, keys, len(prompt))
    router.started(number)
    router.ended(number)
    return best.saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--decisions", type=int, default=5000)
    args = parser.parse_args()
    cached, fresh = make_prompts(1000, args.prompt), make_prompts(2000, args.prompt)[1000:]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    router = FleetRouter(CELL)
    for number in range(args.replicas):
        router.add(str(number))
        router.report(str(number), ReplicaLoad(token_seconds=1 / (1e4 + number), pair_seconds=1e-9, max_sequences=64))
    fill(router, cached, args.keys)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Tracing makes everything slower, so the rate of changes is measured on another router.
    other = FleetRouter(CELL)
    for number in range(args.replicas):
        other.add(str(number))
    change = fill(other, cached, args.keys)
    prompts = [(cached if number % 2 else fresh)[number % 1000] for number in range(args.decisions)]
    took, saved, began_all = [], 0, process_time()
    for prompt in prompts:
        began = perf_counter()
        saved += decide(router, prompt)
        took.append(perf_counter() - began)
    rate, keys = args.decisions / (process_time() - began_all), len(router.index.masks)
    took.sort()
    print(f"{keys:,d} keys of {args.replicas} replicas: {(after - before) / keys:.0f} bytes each")
    print(f"{1e6 * change:.2f} us to apply a change")
    print(
        f"{rate:,.0f} decisions per second of one core, hashing included; {saved / len(prompts):.0f} tokens saved each"
    )
    print(f"one decision: median {1e6 * took[len(took) // 2]:.0f} us, p99 {1e6 * took[int(0.99 * len(took))]:.0f} us")


if __name__ == "__main__":
    main()
