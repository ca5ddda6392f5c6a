"""Writes units to a disk file until it is killed: `python -m tests.support.tiers.disk_writer PATH SEED`.

Prints a line for each batch. Units are overwritten by others all the time, of their own and of other kinds, and some
are erased. A few batches are under way at a time, in the threads of a server.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from random import Random

from tests.support.tiers.disk_blocks import LAYOUT, content
from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.tenants import tenant_digest
from weft.memory.arena import Arena
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import open_file
from weft.memory.tiers.disk.tier import DiskCopies, ThreadedCopies

AT_ONCE = 3


def main() -> None:
    random = Random(int(sys.argv[2]))
    file = open_file(Path(sys.argv[1]), LAYOUT)
    # What the process before it was about to erase when it was killed.
    file.erase(file.doomed)
    arena = Arena(LAYOUT.padded, LAYOUT.slabs * LAYOUT.slab_bytes, remember_freed=True)
    live: list[tuple[Kind, int]] = []
    for kind in LAYOUT.unit_bytes:
        units = [each.unit for each in file.found if each.kind is kind]
        live += [(kind, unit) for unit in arena.claim_all(kind, units)]
    payloads: dict[tuple[Kind, int], memoryview] = {}
    copies = DiskCopies(file, lambda kind, unit: payloads[kind, unit])
    flights: deque[tuple[ThreadedCopies, list[tuple[Kind, int]]]] = deque()
    while True:
        batch: dict[tuple[Kind, int], bytes] = {}
        for _ in range(random.randint(1, 4)):
            kind = random.choice(list(LAYOUT.unit_bytes))
            while (unit := arena.take(kind)) is None:
                arena.release(*live.pop(random.randrange(len(live))))
            batch[kind, unit] = random.randbytes(32)
        payloads |= {(kind, unit): memoryview(content(key, kind)) for (kind, unit), key in batch.items()}
        plan = saving(batch, arena.freed, random)
        arena.freed.clear()
        flights.append((copies.copy(plan), list(batch)))
        while len(flights) == AT_ONCE:
            if copies.copied(flights[0][0], wait=True) is not None:
                live += flights.popleft()[1]
                print("wrote", flush=True)


def saving(batch: dict[tuple[Kind, int], bytes], freed: list[tuple[str, int]], random: Random) -> CopyPlan:
    units = tuple(UnitCopy(kind.value, unit, unit) for kind, unit in batch)
    tenant = tenant_digest(b"one")
    labels = tuple(UnitLabel(key, None, 64, Origin.PROMPT_END.value, tenant) for key in batch.values())
    erased = tuple(each for each in freed if random.random() < 0.2)
    return CopyPlan(0, Direction.SAVE, units, 0, labels=labels, cleared=tuple(freed), doomed=erased, erased=erased)


if __name__ == "__main__":
    main()
