"""Measure how fast the disk tier writes and reads resume points of a model, against `dd` with O_DIRECT.

    python -m benchmarks.disk_rate [MODEL ...] [--folder FOLDER] [--gib 2] [--rounds 3]
    python -m benchmarks.disk_rate --modelled       no disk: a file that takes 2.3 GB/s and gives 3.5 GB/s

Needs no GPU. The tier copies resume points of 20,000 tokens between host memory and a file in `--folder`, in plans of
64 MiB like those of the engine, four of them at a time. `dd` writes and reads as many bytes in another file, with
blocks of 1, 8 and 64 MiB; the fastest counts. Writes end with a sync in both cases. Both alternate, and medians count;
a first round, in which both write to new files, is printed apart. With `--modelled`, the rates say how much of a disk's
time the tier's own work leaves unused, on any machine.
"""

from __future__ import annotations

import argparse
import mmap
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.grid import CELL
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.tiers.block_file import BlockFile, FileBlocks
from weft.memory.tiers.disk_file import DiskFile
from weft.memory.tiers.disk_format import DiskLayout
from weft.memory.tiers.disk_tier import DiskCopies
from weft.memory.tiers.link import CHUNK_BYTES
from weft.simulate.costs import cost_model

MODELS = ("nemotron-nano-9b-v2", "lfm2-1.2b", "qwen3-next-mini")
TOKENS = 20_000
AT_ONCE = 4
BLOCKS = ("1M", "8M", "64M")
MODELLED = {Direction.SAVE: 2.3e9, Direction.LOAD: 3.5e9}


class ModelledBlocks:
    """Memory that takes as long as a disk with the given rates, one request after the other."""

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

    def read(self, offset: int, *into: memoryview) -> None:
        for part in into:
            # The bytes arrive without the processor's help.
            np.frombuffer(part, np.uint8)[:] = np.frombuffer(self._memory, np.uint8)[offset : offset + len(part)]
            self._wait(len(part), MODELLED[Direction.LOAD])
            offset += len(part)

    def write(self, offset: int, *data: bytes | memoryview) -> None:
        for part in data:
            np.frombuffer(self._memory, np.uint8)[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
            self._wait(len(part), MODELLED[Direction.SAVE])
            offset += len(part)

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


def copy_all(copies: DiskCopies, planned: Iterator[CopyPlan]) -> tuple[float, int]:
    """Return the seconds and the bytes of all plans, a few of them under way at a time."""
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
    return time.perf_counter() - began, size


def dd(path: Path, size: int, direction: Direction) -> dict[str, float]:
    """Return the bytes per second of `dd`, by its block size."""
    found = {}
    for block in BLOCKS:
        count = size // (int(block[:-1]) << 20)
        names = {
            Direction.SAVE: ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc,fdatasync"],
            Direction.LOAD: [f"if={path}", "of=/dev/null", "iflag=direct"],
        }[direction]
        began = time.perf_counter()
        ran = subprocess.run(["dd", f"bs={block}", f"count={count}", *names], capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if ran.returncode:
            raise OSError(ran.stderr.strip().splitlines()[-1])
        said = re.search(r"([\d.]+) s,", ran.stderr)
        found[block] = (count * int(block[:-1]) << 20) / (float(said[1]) if said else seconds)
    return found


def measure(
    model: str,
    gib: float,
    rounds: int,
    open_blocks: Callable[[int], BlockFile],
    plain: Callable[[Direction, int], dict[str, float]],
) -> None:
    sizes = {kind: size for kind, size in unit_bytes(cost_model(model).spec).items() if kind is not Kind.TAIL}
    layout = DiskLayout.of(b"m" * 32, sizes, int(gib * (1 << 30)))
    cells = TOKENS // CELL
    points = layout.slabs * layout.slab_bytes // _span(layout, cells)
    assert points, f"--gib {gib} is too small for one resume point of {model}"
    area = memoryview(mmap.mmap(-1, layout.slabs * layout.slab_bytes))
    np.frombuffer(area, np.uint8)[:] = 7
    file = DiskFile(open_blocks(layout.size_bytes), layout)
    copies = DiskCopies(file, lambda kind, unit: area[unit * sizes[kind] : (unit + 1) * sizes[kind]])
    found: dict[Direction, list[tuple[float, dict[str, float]]]] = {each: [] for each in Direction}
    for _ in range(1 + rounds):
        for direction in Direction:
            seconds, size = copy_all(copies, plans(layout, points, cells, direction))
            found[direction].append((size / seconds, plain(direction, size)))
    for direction, rates in found.items():
        for name, some in (("first", rates[:1]), ("again", rates[1:])):
            rate = median(each for each, _ in some)
            best = max(median(each[block] for _, each in some) for block in some[0][1])
            print(
                f"  {model:20} {direction.value} {name} {points} x {size / points / 1e6:.0f} MB: "
                f"{rate / 1e9:.2f} GB/s, {rate / best:.2f} of {best / 1e9:.2f} GB/s",
                flush=True,
            )
    copies.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modelled", action="store_true", help="a file with fixed rates instead of a disk")
    arguments = parser.parse_args()
    for model in arguments.models:
        if arguments.modelled:
            measure(model, arguments.gib, arguments.rounds, ModelledBlocks, lambda way, _: {"all": MODELLED[way]})
        else:
            on_disk(model, arguments.gib, arguments.rounds, arguments.folder)


def on_disk(model: str, gib: float, rounds: int, parent: str | None) -> None:
    with TemporaryDirectory(dir=parent) as folder:
        path, size = Path(folder) / "tier", int(gib * (1 << 30))
        other = path.with_suffix(".dd")
        FileBlocks(other, size).close()
        measure(model, gib, rounds, lambda size: FileBlocks(path, size), lambda way, size: dd(other, size, way))


if __name__ == "__main__":
    main()
