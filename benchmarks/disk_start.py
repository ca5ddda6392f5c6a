"""Measure how long a disk tier takes to start with a full file of 500 GiB, sparse but for its headers.

    python -m benchmarks.disk_start [--folder FOLDER] [--gib 500]

The file has the headers of prompts of 100 pages of 1 MiB each, as a server would have left them. Measured in CPU time:
opening it, indexing it, and the first lookup of a prompt; then how long the rest takes to be entered, 64 units a step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from weft.memory.identity import PART_BYTES, Identity
from weft.memory.kinds import Kind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk.file import open_file
from weft.memory.tiers.disk.format import BLOCK, ENTRY, ENTRY_MAGIC, ENTRY_TYPE, VERSION, DiskLayout, checksum
from weft.memory.tiers.disk.restoring import Restoring
from weft.memory.tiers.disk.tier import disk_cache

CELLS, PAGE = 100, 1 << 20
SPEC = MemorySpec((AttentionMemory(8, 128, "bfloat16"),) * 4)


def fill(path: Path, layout: DiskLayout) -> list[list[bytes]]:
    """Write a header for every page of a sparse file; return the keys of each path."""
    count = layout.slabs * layout.slab_bytes // PAGE
    rows = np.zeros(count, ENTRY_TYPE)
    keys = np.random.default_rng(0).bytes(32 * count)
    rows["magic"], rows["version"], rows["size"] = ENTRY_MAGIC, VERSION, PAGE
    rows["unit"] = np.arange(count)
    rows["position"] = (np.arange(count) % CELLS + 1) * SPEC.cell
    rows["key"] = np.frombuffer(keys, "V32")
    parents = np.frombuffer(bytes(32) + keys[:-32], "V32").copy()
    parents[::CELLS] = bytes(32)
    rows["parent"] = parents
    raw = rows.tobytes()
    sums = [checksum(raw[first : first + ENTRY - 8]) for first in range(0, len(raw), ENTRY)]
    rows["header_checksum"] = sums
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.truncate(file.fileno(), layout.size_bytes)
        os.pwrite(file.fileno(), layout.encode(), 0)
        os.pwrite(file.fileno(), rows.tobytes(), BLOCK)
    named = [keys[32 * each : 32 * each + 32] for each in range(count)]
    return [named[first : first + CELLS] for first in range(0, count, CELLS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=int, default=500)
    arguments = parser.parse_args()
    layout = DiskLayout.of(Identity(*[bytes(PART_BYTES)] * 3, "benchmark"), {Kind.PAGE: PAGE}, arguments.gib << 30)
    with TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "tier"
        paths = fill(path, layout)
        began = time.process_time()
        file = open_file(path, layout)
        opened = time.process_time()
        cache = disk_cache(SPEC, file, "value")
        restoring = Restoring(cache, file, Tenancy(lambda: [cache.trie]))
        indexed = time.process_time()
        restoring.enter_path(paths[-1])
        found = cache.trie.deepest(paths[-1])
        looked_up = time.process_time()
        assert found is not None
        assert found.depth == len(paths[-1])
        print(
            f"{len(file.rows)} units: opened in {opened - began:.2f} s, indexed in {indexed - opened:.2f} s, ", end=""
        )
        print(f"first lookup in {(looked_up - indexed) * 1e3:.1f} ms")
        while restoring.enter_some(64):
            pass
        rest = time.process_time() - looked_up
        print(f"the rest in {rest:.1f} s, {rest / len(file.rows) * 64 * 1e3:.2f} ms for 64 units")
        assert len(cache.trie) == len(file.rows)
        file.close()


if __name__ == "__main__":
    main()
