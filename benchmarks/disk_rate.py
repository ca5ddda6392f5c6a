"""Measure how fast the disk tier writes and reads resume points of a model, against `dd` with O_DIRECT.

    python -m benchmarks.disk_rate [MODEL ...] [--folder FOLDER] [--gib 2] [--rounds 5] [--json FILE]
    python -m benchmarks.disk_rate --modelled       no disk: a file that takes 2.3 GB/s and gives 3.5 GB/s

Needs no GPU. The tier copies resume points of 20,000 tokens between host memory and a file in `--folder`, in plans of
64 MiB like those of the engine, four of them at a time. `dd` writes and reads as many bytes, with blocks of 1, 8 and 64
MiB. All have the same history: each has a preallocated file of its own, `5 * --gib` in all, and in every round it is
written once, synced, and read twice. All write zeros. They take turns, and each round begins with another one. The rate
is compared with that of the block size of `dd` whose median is highest. Medians and every round are printed. The first
round, in which all write to new files, is not part of the medians.

`dd` reads into one buffer, again and again. The tier gets new memory in every round, as after a start. On a virtual
machine the first direct read into memory is slow, and "loop" shows that price: one thread that moves blocks of 8 MiB
from and to as much new memory, without the tier's code. With `--modelled`, the rates say how much of a disk's time the
tier's own work leaves unused, on any machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.grid import CELL
from weft.memory.identity import PART_BYTES, Identity
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.tiers.disk.block_file import BlockFile, FileBlocks
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import DiskLayout
from weft.memory.tiers.disk.tier import DiskCopies
from weft.memory.tiers.link import CHUNK_BYTES
from weft.simulate.costs import cost_model

MODELS = ("nemotron-nano-9b-v2", "lfm2-1.2b", "qwen3-next-mini")
TOKENS = 20_000
AT_ONCE = 4
BLOCKS = ("1M", "8M", "64M")
MODELLED = {Direction.SAVE: 2.3e9, Direction.LOAD: 3.5e9}
OURS, LOOP = "tier", "loop"
LOOP_BLOCK = 8 << 20
# What is done with a file in each round.
PASSES = {"written": Direction.SAVE, "read": Direction.LOAD, "read again": Direction.LOAD}
# Returns the bytes per second of one pass over its file.
Contender = Callable[[Direction], float]


class ModelledBlocks:
    """Memory that takes as long as a disk with the given rates, one request after the other."""

    failed_syncs = 0
    size_bytes = 0  # a new file

    def __init__(self, size_bytes: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, size_bytes))
        np.frombuffer(self._memory, np.uint8)[:] = 0
        self._free_at = 0.0
        self._lock = Lock()

    def _wait(self, size: int, rate: float) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + size / rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))

    def grow(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read(self, offset: int, into: memoryview) -> None:
        # The bytes arrive without the processor's help.
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(self._memory, np.uint8)[offset : offset + len(into)]
        self._wait(len(into), MODELLED[Direction.LOAD])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        np.frombuffer(self._memory, np.uint8)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self._wait(len(data), MODELLED[Direction.SAVE])

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def plans(layout: DiskLayout, points: int, cells: int, direction: Direction) -> Iterator[CopyPlan]:
    """Yield the copies of all resume points, with units of one index in both tiers."""
    units: list[UnitCopy] = []
    labels: list[UnitLabel] = []
    size = number = 0
    sizes, per_point = layout.unit_bytes, _places(layout, cells)
    for point in range(points):
        # A state follows its pages.
        for kind, first, count in per_point:
            step = layout.padded[kind]
            base = -(-point * _span(layout, cells) // step) + first
            for index in range(count):
                key = b"%d %d %d" % (point, list(layout.unit_bytes).index(kind), index)
                units.append(UnitCopy(kind.value, base + index, base + index))
                labels.append(UnitLabel(key.ljust(32, b"\0"), None, index * CELL, "prompt_end", b""))
                size += sizes[kind]
                if size >= CHUNK_BYTES:
                    number += 1
                    yield CopyPlan(number, direction, tuple(units), size, labels=tuple(labels))
                    units, labels, size = [], [], 0
    if units:
        yield CopyPlan(number + 1, direction, tuple(units), size, labels=tuple(labels))


def _places(layout: DiskLayout, cells: int) -> list[tuple[Kind, int, int]]:
    """Return for each kind of unit its first index in the part of a resume point, and how many there are."""
    found, end = [], 0
    for kind, count in ((Kind.PAGE, cells), (Kind.STATE, 1)):
        if kind in layout.unit_bytes:
            step = layout.padded[kind]
            # The part of the next point may begin one unit later.
            first = -(-end // step) + (1 if end else 0)
            found.append((kind, first, count))
            end = (first + count) * step
    return found


def _span(layout: DiskLayout, cells: int) -> int:
    kind, first, count = _places(layout, cells)[-1]
    return (first + count + 1) * layout.padded[kind]


def copy_all(copies: DiskCopies, planned: Iterator[CopyPlan]) -> float:
    """Return the bytes per second of all plans, a few of them under way at a time."""
    began, size, flights = time.perf_counter(), 0, []
    for plan in planned:
        size += plan.size_bytes
        flights.append(copies.copy(plan))
        while len(flights) >= AT_ONCE:
            if copies.copied(flights[0], wait=True) is not None:
                flights.pop(0)
    for flight in flights:
        while copies.copied(flight, wait=True) is None:
            pass
    copies.file.sync()
    return size / (time.perf_counter() - began)


def dd(path: Path, block: str, size: int, direction: Direction) -> float:
    """Return the bytes per second of `dd` with this block size."""
    count = size // (int(block[:-1]) << 20)
    names = {
        Direction.SAVE: ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc,fdatasync"],
        Direction.LOAD: [f"if={path}", "of=/dev/null", "iflag=direct"],
    }[direction]
    command = ["dd", f"bs={block}", f"count={count}", *names]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    said = re.search(r"([\d.e+-]+) s,", ran.stderr)
    if ran.returncode or said is None:
        raise OSError(ran.stderr.strip().splitlines()[-1])
    return (count * int(block[:-1]) << 20) / float(said[1])


class TierRate:
    """The disk tier with a file of its own, filled with resume points of a model."""

    def __init__(self, model: str, gib: float, open_blocks: Callable[[int], BlockFile]) -> None:
        sizes: dict[Kind, int] = dict(unit_bytes(cost_model(model).spec))
        sizes.pop(Kind.TAIL)
        self.layout = DiskLayout.of(Identity(*[bytes(PART_BYTES)] * 3, "benchmark"), sizes, int(gib * (1 << 30)))
        self.cells = TOKENS // CELL
        self.points = self.layout.slabs * self.layout.slab_bytes // _span(self.layout, self.cells)
        assert self.points, f"--gib {gib} is too small for one resume point of {model}"
        self.size = sum(plan.size_bytes for plan in self._plans(Direction.LOAD))
        self._sizes = sizes
        self._memory = memoryview(b"")
        self.copies = DiskCopies(DiskFile(open_blocks(self.layout.size_bytes), self.layout), self._unit)

    def _unit(self, kind: Kind, unit: int) -> memoryview:
        return self._memory[unit * self._sizes[kind] : (unit + 1) * self._sizes[kind]]

    def _plans(self, direction: Direction) -> Iterator[CopyPlan]:
        return plans(self.layout, self.points, self.cells, direction)

    def __call__(self, direction: Direction) -> float:
        """Return the bytes per second of copying all resume points; a round begins with a save."""
        if direction is Direction.SAVE:
            self._memory = touched(self.layout.slabs * self.layout.slab_bytes)
        return copy_all(self.copies, self._plans(direction))


def touched(size: int) -> memoryview:
    """Return memory as the engine's: pages of 2 MiB where the system has them, all of them written to once."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:] = 0
    return memoryview(memory)


def sized_file(path: Path, size: int) -> FileBlocks:
    file = FileBlocks(path)
    file.grow(size)
    return file


class Loop:
    """One thread that moves a file of its own from and to memory, block by block."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = sized_file(path, size)
        self._size = size // LOOP_BLOCK * LOOP_BLOCK
        self._memory = memoryview(b"")

    def __call__(self, direction: Direction) -> float:
        if direction is Direction.SAVE:
            self._memory = touched(self._size)
        move = self._file.write if direction is Direction.SAVE else self._file.read
        began = time.perf_counter()
        for place in range(0, len(self._memory), LOOP_BLOCK):
            move(place, self._memory[place : place + LOOP_BLOCK])
        self._file.sync()
        return len(self._memory) / (time.perf_counter() - began)

    def close(self) -> None:
        self._file.close()


def take_turns(contenders: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the rates of all contenders by pass, and by round within it. Each begins one round after the other."""
    found: dict[str, dict[str, list[float]]] = {name: {each: [] for each in contenders} for name in PASSES}
    for number in range(rounds):
        order = sorted(contenders)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name, direction in PASSES.items():
            for each in order:
                found[name][each].append(contenders[each](direction))
    return found


def show(model: str, tier: TierRate, found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{model}: {tier.points} x {tier.size / tier.points / 1e6:.0f} MB")
    for name, rates in found.items():
        ours, others = rates[OURS], {each: some for each, some in rates.items() if each not in (OURS, LOOP)}
        best = max(others, key=lambda each: median(others[each][1:] or others[each]))
        rate, plain = (median(some[1:] or some) / 1e9 for some in (ours, others[best]))
        print(f"  {name:10} {rate:.2f} GB/s, {rate / plain:.2f} of {best} with {plain:.2f} GB/s")
        for each, some in rates.items():
            print(f"    {each:8} {' '.join(f'{one / 1e9:5.2f}' for one in some)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default=None, help="also write all rates to this file")
    parser.add_argument("--modelled", action="store_true", help="a file with fixed rates instead of a disk")
    arguments = parser.parse_args()
    measure = modelled if arguments.modelled else on_disk
    results = {model: measure(model, arguments) for model in arguments.models}
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(results))


def modelled(model: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    tier = TierRate(model, arguments.gib, ModelledBlocks)
    found = take_turns({OURS: tier, "disk": MODELLED.__getitem__}, 1 + arguments.rounds)
    show(model, tier, found)
    tier.copies.close()
    return found


def on_disk(model: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    with TemporaryDirectory(dir=arguments.folder) as folder:
        tier = TierRate(model, arguments.gib, lambda size: FileBlocks(Path(folder) / OURS))
        contenders: dict[str, Contender] = {OURS: tier}
        for block in BLOCKS:
            path = Path(folder) / f"dd-{block}"
            sized_file(path, tier.layout.size_bytes).close()
            contenders[f"dd {block}"] = partial(dd, path, block, tier.size)
        contenders[LOOP] = loop = Loop(Path(folder) / LOOP, tier.size)
        found = take_turns(contenders, 1 + arguments.rounds)
        show(model, tier, found)
        tier.copies.close()
        loop.close()
    return found


if __name__ == "__main__":
    main()
