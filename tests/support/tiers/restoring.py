"""Files that hold long paths of several tenants."""

from __future__ import annotations

from random import Random

from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from weft.base.tenants import tenant_digest
from weft.memory.captures import Origin
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import DiskLayout, UnitHeader

SPEC = MemorySpec((AttentionMemory(1, 4, "float32"),), cell=4)
TENANTS = [tenant_digest(name) for name in (b"one", b"two")]


def filled(lengths: list[int]) -> tuple[DiskFile, list[list[bytes]]]:
    """Return a file with paths of these lengths, of two tenants in turn, and their keys. Its units have no order."""
    sizes = unit_bytes(SPEC)
    layout = DiskLayout.of(IDENTITY, sizes, 2 * 4352 * (sum(lengths) + 64))
    file = DiskFile(FlakyBlocks(layout.size_bytes), layout)
    places = list(range(sum(lengths)))
    Random("places").shuffle(places)
    paths = [
        [bytes([number]) * 28 + depth.to_bytes(4, "little") for depth in range(n)]
        for number, n in enumerate(lengths, 1)
    ]
    payload, units = memoryview(bytes(sizes[Kind.PAGE])), []
    for number, keys in enumerate(paths):
        for depth, key in enumerate(keys):
            above = keys[depth - 1] if depth else None
            tenant, position = TENANTS[number % 2], (depth + 1) * SPEC.cell
            header = UnitHeader(Kind.PAGE, places.pop(), position, key, above, tenant, Origin.PROMPT_END, 0, 0)
            units.append((header, payload))
    file.write(units)
    file.reread()
    return file, paths
