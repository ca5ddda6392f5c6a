"""`weft models`: lists the families and checkpoints that Weft serves, with the memory that each needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weft import builtin
from weft.base.errors import ModelError
from weft.base.hub.short_names import short_name_of
from weft.base.options import QUANTISED, option
from weft.cli.options import argument

ABOUT = "list supported architectures and published checkpoints, with the memory to expect and the command for each"
HEAD = ("model", "parameters", "weights", "read", "per token", "per sequence", "hub id", "command")
NOTES = """\
weights: of the text part, in bfloat16 unless the configuration or --quantize says otherwise. read: by one token of one
sequence; divided by the memory's rate, the least time that decoding it takes. per token: KV cache of a token of
context. per sequence: two states, the tail and the pages of sliding windows that a running sequence holds besides. A
cached prefix costs its tokens and one state.
Any checkpoint of a listed architecture can be served by its folder or hub id: weft serve FOLDER_OR_ID
weft pull NAME downloads a model without serving it.
GGUF files of Llama, Mistral, Qwen3, LFM2, Qwen3-Next, Qwen3.5, Gemma 3, gpt-oss, Granite 4, Falcon-H1, Nemotron-H and
Kimi-Linear too: weft serve FILE.gguf, or owner/name:Q4_K_M of the hub; weft doctor FILE.gguf says what is inside.
Every family is compared with its public implementation on random weights; weft doctor MODEL checks the real ones."""


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of `weft models`."""

    file: str | None = argument("GGUF file to describe instead: its family, types, bytes, and whether it fits")
    quantize: str = option("off", "sizes of 16-bit checkpoints that are quantised while they load", QUANTISED)
    json: bool = option(False, "print JSON for programs, with all sizes in bytes")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model in numbers. Caches, and weights that are not quantised, are in bfloat16."""

    name: str
    hub_id: str | None
    command: str
    parameters: int
    active_parameters: int
    weights_bytes: int
    weights_by_format: dict[str, int]
    decode_bytes: int
    context_bytes_per_token: int
    state_bytes: int
    bytes_per_sequence: int


def run(options: ModelsOptions) -> None:
    from weft.models.catalogue import CATALOGUE

    if options.file is not None:
        describe(Path(options.file).expanduser(), options.json)
        return
    if options.json:
        found = [
            {
                "family": family.name,
                "layers": family.layers,
                "architectures": list(family.architectures),
                "models": [asdict(size) for size in sizes(family.checkpoints, options.quantize)],
            }
            for family in CATALOGUE
        ]
        print(json.dumps({"built_in": asdict(built_in(options.quantize)), "families": found}, indent=2))
        return
    rows = [("", HEAD), ("ships with Weft, a smoke test", cells(built_in(options.quantize)))]
    for family in CATALOGUE:
        title = f"{family.name} ({family.layers}): {', '.join(family.architectures)}"
        models = [cells(size) for size in sizes(family.checkpoints, options.quantize)] or [
            ("any", *[""] * (len(HEAD) - 2), "weft serve FOLDER")
        ]
        rows += [(title if number == 0 else "", row) for number, row in enumerate(models)]
    print("\n".join(aligned_rows(rows)))
    print(f"\n{NOTES}")


def describe(path: Path, as_json: bool) -> None:
    """Print what a GGUF file holds, from its header alone."""
    from weft.base.gguf.header import read_header
    from weft.base.gguf.places import local_file
    from weft.base.gguf.report import about
    from weft.device.devices import free_bytes

    file = local_file(path)
    if file is None:
        raise ModelError(f"{path} is neither a GGUF file nor a folder with one; weft models alone lists models")
    facts = about(read_header(file), free_bytes())
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print("\n".join(f"{name + ':':<14}{fact}" for name, fact in facts.items()))


def built_in(quantize: str) -> ModelSize:
    return size_of(builtin.NAME, builtin.FOLDER / "config.json", None, command_of("weft serve", quantize), quantize)


def command_of(command: str, quantize: str) -> str:
    return command if quantize == "off" else f"{command} --quantize {quantize}"


def sizes(checkpoints: tuple[tuple[str, str | None], ...], quantize: str) -> Iterator[ModelSize]:
    """Yield the sizes of packaged configurations, with the command that serves each."""
    from weft.models import configurations
    from weft.models.catalogue import STORED

    for name, hub_id in checkpoints:
        file = configurations.find(name)
        assert file is not None, f"{name} is not packaged"
        served = f"{name} --weights dummy" if hub_id is None else short_name_of(hub_id) or hub_id
        command = f"weft serve {served}"
        yield size_of(name, file, hub_id, command_of(command, "off" if name in STORED else quantize), quantize)


def size_of(name: str, config: Path, hub_id: str | None, command: str, quantize: str = "off") -> ModelSize:
    """Return a model's size, from its configuration alone."""
    from weft.kernels.formats.quantising import Quantising
    from weft.memory.spec import MemorySpec
    from weft.models.catalogue import STORED
    from weft.models.shapes import shape_of

    stated = STORED.get(name)
    # Quantised checkpoints stay as they are.
    shape = shape_of(config, Quantising(quantize if stated is None else "off"), stated)
    spec = MemorySpec(shape.memories)
    # What a sequence holds while it runs alone, as in weft.memory.capacity.
    windows = (spec.window_cells + 2) * spec.window_page_bytes
    return ModelSize(
        name=name,
        hub_id=hub_id,
        command=command,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        weights_bytes=shape.weights.total,
        weights_by_format=dict(shape.weights.bytes),
        decode_bytes=shape.weights.decode_bytes,
        context_bytes_per_token=spec.page_bytes // spec.cell,
        state_bytes=spec.state_bytes,
        bytes_per_sequence=2 * spec.state_bytes + spec.tail_bytes + windows,
    )


def cells(size: ModelSize) -> tuple[str, ...]:
    active = "" if size.active_parameters == size.parameters else f", {count(size.active_parameters)} active"
    return (
        size.name,
        count(size.parameters) + active,
        readable(size.weights_bytes) + formats(size.weights_by_format),
        readable(size.decode_bytes),
        readable(size.context_bytes_per_token),
        readable(size.bytes_per_sequence),
        size.hub_id or "",
        size.command,
    )


def formats(by_format: Mapping[str, int]) -> str:
    """
    >>> formats({"bfloat16": 9, "float32": 1}), formats({"fp8": 9, "bfloat16": 3})
    ('', ' fp8')
    """
    largest = max(by_format, key=lambda name: by_format[name])
    return "" if largest == "bfloat16" else f" {largest}"


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
