"""Writes a quantised copy of a checkpoint: a folder of safetensors in compressed-tensors' layouts.

Numbers are those of `--quantize` with the same kind. Everything that is not a matrix of a linear layer is copied.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.base.errors import ModelError
from weft.base.gguf.header import is_gguf
from weft.kernels.formats.quantising import Quantising
from weft.kernels.formats.stored import DENSE
from weft.kernels.formats.written import Stating, WrittenFormat
from weft.models.config import checkpoint_config, read_config, text_part
from weft.models.finding import find_checkpoint
from weft.models.weights import build, checkpoint_files, match

INDEX = "model.safetensors.index.json"
# Files beside the weights that a copy needs too.
COPIED = re.compile(r"(\.json|\.jinja|\.txt|\.model)$")
REPLACED = ("config.json", INDEX, "hf_quant_config.json")


@dataclass(frozen=True, slots=True)
class Written:
    """What a copy holds: matrices that are quantised, and those of experts in one tensor, which stay as they are."""

    folder: Path
    bytes_before: int
    bytes_after: int
    quantised: int
    fused: tuple[str, ...]


@dataclass
class Copying:
    """Formats of the matrices to quantise, and what was written so far."""

    formats: Mapping[str, WrittenFormat]
    fused: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    wide: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0


def compress(model: str | Path, target: Path, quantising: Quantising) -> Written:
    """Write a quantised copy of a folder or hub id; nothing is left where it fails."""
    assert quantising.kind != "off"
    folder = find_checkpoint(model, with_weights=True)
    if is_gguf(folder):
        raise ModelError(f"{folder} is a GGUF file; pass a folder of safetensors in 16 bits")
    copying = planned(folder, quantising)
    with new_folder(target) as place:
        for file in checkpoint_files(folder):
            write_file(file, place, copying)
        config = read_config(folder / "config.json") | {"quantization_config": configuration(copying)}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(set(copying.files.values())) > 1:
            index = {"metadata": {"total_size": copying.after}, "weight_map": copying.files}
            (place / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for file in folder.iterdir():
            if file.is_file() and COPIED.search(file.name) and file.name not in REPLACED:
                shutil.copyfile(file, place / file.name)
    return Written(target, copying.before, copying.after, len(copying.formats), copying.fused)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when all is written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists already; pass a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        place.chmod(0o755)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}") from error
    try:
        yield place
        place.replace(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def planned(folder: Path, quantising: Quantising) -> Copying:
    """Return what becomes of the tensors of a checkpoint, by their names in it."""
    config = text_part(checkpoint_config(folder))
    model = build(config, torch.float32, declare=True)
    found, stored = match(model, folder, config, quantising)
    formats: dict[str, WrittenFormat] = {}
    fused: set[str] = set()
    for reading in found:
        entry = stored[reading.names[0]]
        if reading.spelling is not None:
            raise ModelError(f"{entry.name} is quantised already; pass a checkpoint in 16 bits")
        if reading.wanted is DENSE:
            continue
        if len(entry.shape) != 2 or not entry.name.endswith(".weight"):
            fused.add(entry.name)
            continue
        wanted = quantising.format_of(reading.source.name, *entry.shape, model.tied)
        format = wanted.for_others(*entry.shape) if isinstance(wanted, WrittenFormat) else wanted
        if isinstance(format, WrittenFormat):
            formats[entry.name] = format
    if not formats:
        raise ModelError(f"{folder} has no matrices to quantise; experts in one tensor stay as they are")
    return Copying(formats, tuple(sorted(fused)))


def write_file(file: Path, place: Path, copying: Copying) -> None:
    """Write one file of a checkpoint with its matrices quantised, one after another."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                tensor, format = reader.get_tensor(name), copying.formats.get(name)
                copying.before += tensor.nbytes
                if format is not None:
                    parent = name.removesuffix("weight")
                    tensors |= {parent + own: each for own, each in format.spelled(format.encode(tensor)).items()}
                    continue
                tensors[name] = tensor
                if name in copying.fused or (tensor.ndim > 1 and name.endswith(".weight")):
                    copying.wide.append(name.removesuffix(".weight"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    save_file({name: each.contiguous() for name, each in tensors.items()}, place / file.name, {"format": "pt"})
    copying.files |= dict.fromkeys(tensors, file.name)
    copying.after += sum(each.nbytes for each in tensors.values())


def configuration(copying: Copying) -> dict[str, Any]:
    """Return what the copy's config.json states: groups of modules by their format, and those that stay wide."""
    groups: dict[str, tuple[Stating, list[str]]] = {}
    for name, format in copying.formats.items():
        stating = format.stating()
        groups.setdefault(json.dumps(asdict(stating)), (stating, []))[1].append(name.removesuffix(".weight"))
    stated = {}
    for number, (stating, names) in enumerate(groups.values()):
        targets = ["Linear"] if len(groups) == 1 else names
        stated[f"group_{number}"] = {"targets": targets, "format": stating.layout, "weights": stating.weights}
    layouts = {each["format"] for each in stated.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": stated,
        "ignore": copying.wide,
    }
