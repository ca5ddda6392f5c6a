"""`weft models`: lists the families and checkpoints that Weft serves, with the memory that each needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from weft import builtin
from weft.base.options import option

ABOUT = "list supported architectures and published checkpoints, with the memory to expect and the command for each"
WEIGHT_BYTES = 2
HEAD = ("model", "parameters", "weights", "per token", "per sequence", "command")
NOTES = """\
weights: of the text part, in bfloat16. per token: KV cache of a token of context. per sequence: two states, the tail
and the pages of sliding windows that a running sequence holds besides. A cached prefix costs its tokens and one state.
Any checkpoint of a listed architecture can be served by its folder or hub id: weft serve FOLDER_OR_ID
Every family is compared with its public implementation on random weights; weft doctor MODEL checks the real ones."""


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of `weft models`."""

    json: bool = option(False, "print JSON for programs, with all sizes in bytes")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model in numbers. All bytes are those of bfloat16 weights and caches."""

    name: str
    hub_id: str | None
    command: str
    parameters: int
    active_parameters: int
    weights_bytes: int
    context_bytes_per_token: int
    state_bytes: int
    bytes_per_sequence: int


def run(options: ModelsOptions) -> None:
    from weft.models.catalogue import CATALOGUE

    if options.json:
        found = [
            {
                "family": family.name,
                "layers": family.layers,
                "architectures": list(family.architectures),
                "models": [asdict(size) for size in sizes(family.checkpoints)],
            }
            for family in CATALOGUE
        ]
        print(json.dumps({"built_in": asdict(built_in()), "families": found}, indent=2))
        return
    rows = [("", HEAD), ("ships with Weft, a smoke test", cells(built_in()))]
    for family in CATALOGUE:
        title = f"{family.name} ({family.layers}): {', '.join(family.architectures)}"
        models = [cells(size) for size in sizes(family.checkpoints)] or [("any", "", "", "", "", "weft serve FOLDER")]
        rows += [(title if number == 0 else "", row) for number, row in enumerate(models)]
    print("\n".join(aligned_rows(rows)))
    print(f"\n{NOTES}")


def built_in() -> ModelSize:
    return size_of(builtin.NAME, builtin.FOLDER / "config.json", None, "weft serve")


def sizes(checkpoints: tuple[tuple[str, str | None], ...]) -> Iterator[ModelSize]:
    """Yield the sizes of packaged configurations, with the command that serves each."""
    from weft.models import configurations

    for name, hub_id in checkpoints:
        file = configurations.find(name)
        assert file is not None, f"{name} is not packaged"
        command = f"weft serve {name} --weights dummy" if hub_id is None else f"weft serve {hub_id}"
        yield size_of(name, file, hub_id, command)


def size_of(name: str, config: Path, hub_id: str | None, command: str) -> ModelSize:
    """Return a model's size, from its configuration alone."""
    from weft.memory.spec import MemorySpec
    from weft.models.shapes import shape_of

    shape = shape_of(config)
    spec = MemorySpec(shape.memories)
    # What a sequence holds while it runs alone, as in weft.memory.capacity.
    windows = (spec.window_cells + 2) * spec.window_page_bytes
    return ModelSize(
        name=name,
        hub_id=hub_id,
        command=command,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        weights_bytes=WEIGHT_BYTES * shape.parameters,
        context_bytes_per_token=spec.page_bytes // spec.cell,
        state_bytes=spec.state_bytes,
        bytes_per_sequence=2 * spec.state_bytes + spec.tail_bytes + windows,
    )


def cells(size: ModelSize) -> tuple[str, ...]:
    active = "" if size.active_parameters == size.parameters else f", {count(size.active_parameters)} active"
    return (
        size.name,
        count(size.parameters) + active,
        readable(size.weights_bytes),
        readable(size.context_bytes_per_token),
        readable(size.bytes_per_sequence),
        size.command,
    )


def aligned_rows(rows: list[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Yield the rows in columns, each title on a line of its own before its first row."""
    widths = [max(len(row[column]) for _, row in rows) for column in range(len(HEAD))]
    for title, row in rows:
        if title:
            yield f"\n{title}"
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def count(parameters: int) -> str:
    """
    >>> count(1_170_355_200), count(22_900_000)
    ('1.17 B', '23 M')
    """
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def readable(size: int) -> str:
    """
    >>> readable(2_340_710_400), readable(12_288), readable(0)
    ('2.34 GB', '12.3 kB', '0')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return str(size)
