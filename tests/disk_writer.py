"""Writes units to a disk file until it is killed: `python -m tests.disk_writer PATH SEED`.

Prints a line for each batch. Units are overwritten by others all the time, of their own and of other kinds, and some
are erased.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from tests.disk_blocks import LAYOUT, content, header
from weft.memory.arena import Arena
from weft.memory.kinds import Kind
from weft.memory.tiers.disk_file import open_file


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
    while True:
        units = []
        for _ in range(random.randint(1, 4)):
            kind = random.choice(list(LAYOUT.unit_bytes))
            while (unit := arena.take(kind)) is None:
                arena.release(*live.pop(random.randrange(len(live))))
            live.append((kind, unit))
            key = random.randbytes(32)
            units.append((header(kind, unit, key), memoryview(content(key, kind))))
        cleared = [(Kind(kind), unit) for kind, unit in arena.freed]
        erased = [each for each in cleared if random.random() < 0.2]
        file.doom(erased)
        file.erase(erased)
        file.write(units, cleared)
        arena.freed.clear()
        print("wrote", flush=True)


if __name__ == "__main__":
    main()
