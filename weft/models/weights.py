"""Loading of checkpoints: find the files, check every name and shape, then stream tensor by tensor.

Only safetensors are read; nothing is ever unpickled.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from weft.base.errors import ModelError
from weft.kernels.choosing import choose
from weft.kernels.interface import Operations
from weft.models import configurations
from weft.models.bounds import INDEX_BYTES
from weft.models.config import read_config, shown, text_part
from weft.models.dummy import fill_randomly
from weft.models.hints import refuse_gguf, similar_id, similar_name
from weft.models.identity import weights_digest
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.moe import ExpertLayer
from weft.models.model import CausalModel, Source, pin, sources
from weft.models.mtp import COUNTS, MtpHead, head_of
from weft.models.registry import family_of
from weft.models.sharding import ALONE, RankCut, Shard, building_for

log = logging.getLogger("weft")

PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja"]
SHOWN = 10
# Our own names of the two matrices that a checkpoint may tie.
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Number of times a model must fit into free memory for a second copy of its weights: caches need room as well.
COPIES = 4
# Small models are loaded before a progress bar appears.
BAR_SECONDS = 1.0


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = True,
    weights: str = "checkpoint",
    seed: int = 0,
    spare_bytes: int = 0,
    when_built: Callable[[CausalModel, str, torch.dtype], None] = lambda model, device, dtype: None,
    operations: Operations | None = None,
    exact: bool = False,
    shard: Shard = ALONE,
    identify: bool = False,
) -> tuple[CausalModel, dict[str, Any]]:
    """Load the model of a folder or hub id; return it with the configuration of its text part.

    With ample `spare_bytes` weights may be kept twice, for few rows and for many. `when_built` is called with the
    model before its weights are there. Only `operations` can compute with the loaded model; the default are those
    chosen for the device, for `exact` answers or not. `identify`: digest the weights.

    With `weights="dummy"` only the configuration is read (a folder with config.json, the file itself, or the name of
    a packaged one), and the weights are random, the same for the same seed. Of a model that is cut over ranks, only
    the part of `shard` is built and read; random weights are then the same on every rank.
    """
    folder = find_checkpoint(path, with_weights=weights != "dummy")
    config = text_part(read_config(folder if folder.is_file() else folder / "config.json"))
    model = build(config, dtype, device, shard=shard)
    when_built(model, str(device), dtype)
    if weights == "dummy":
        fill_randomly(model, seed)
    elif weights == "checkpoint":
        fill_from(model, folder, config, progress)
    else:
        raise ModelError(f"weights must be 'checkpoint' or 'dummy', got {weights!r}")
    if identify:
        model.weights_digest = weights_digest(model)
    operations = operations or choose(str(device), dtype, model.memories, exact=exact).operations
    prepare(model, operations, spare_bytes)
    pin(model)
    return model, config


def load_head(
    path: str | Path,
    base: CausalModel,
    dtype: torch.dtype,
    weights: str,
    seed: int,
    operations: Operations,
    device: torch.device | str = "cpu",
) -> MtpHead:
    """Load the MTP head of the checkpoint that `base` was loaded from, to the same device."""
    folder = find_checkpoint(path, with_weights=weights != "dummy")
    config = text_part(read_config(folder if folder.is_file() else folder / "config.json"))
    head = build(config, dtype, device, family=head_of(config))
    assert isinstance(head, MtpHead)
    if weights == "dummy":
        fill_randomly(head, seed)
    elif not catalogue(checkpoint_files(folder), head):
        raise ModelError(f"draft: {folder} has no MTP head: no tensor is named mtp.*; pass --draft suffix or off")
    else:
        fill_from(head, folder, config, progress=False)
    prepare(head, operations, 0)
    pin(head)
    # Not a part of the head: its weights are counted and prepared with the model.
    object.__setattr__(head, "base", base)
    return head


def has_head(folder: Path, weights: str) -> bool:
    """Return whether a checkpoint has an MTP head that Weft can compute, with all its tensors.

    Random weights have one if config.json says so.
    """
    config = text_part(read_config(folder if folder.is_file() else folder / "config.json"))
    try:
        head = build(config, torch.float32, "meta", family=head_of(config))
        if weights == "dummy":
            return any(config.get(name) for name in COUNTS)
        match(head, folder, config)
    except ModelError:
        return False
    return True


def prepare(model: CausalModel, operations: Operations, spare_bytes: int) -> None:
    """Convert all matmul weights to the fastest layout of these operations, twice if there is ample memory."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    twice = COPIES * size <= spare_bytes
    for module in model.modules():
        if isinstance(module, (Linear, Embedding, ExpertLayer)):
            module.prepare(operations, twice)


def find_checkpoint(path: str | Path, with_weights: bool) -> Path:
    """Return a folder, or without weights the file of a configuration; download a hub id."""
    local = Path(path).expanduser()
    refuse_gguf(local)
    if local.is_dir() or (local.is_file() and local.suffix == ".json" and not with_weights):
        return local
    packaged = configurations.find(str(path))
    if packaged is not None and not with_weights:
        return packaged
    if local.is_file() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ModelError(
            f"{path} is neither a folder with a checkpoint nor a hub id such as 'owner/name'" + similar_name(str(path))
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=PATTERNS if with_weights else ["*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a local folder, and the download from the hub failed: {error}{similar_id(str(path))}"
        ) from error


@contextmanager
def defaults(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Give parameters created inside this dtype and device unless they name their own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    family: type[CausalModel] | None = None,
    shard: Shard = ALONE,
) -> CausalModel:
    """Return a rank's part of the model of a configuration, its parameters not filled yet."""
    family = family or family_of(config)
    try:
        with defaults(dtype, device), building_for(shard):
            model = family(config, dtype)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # sizes that are valid one by one and impossible together
        raise ModelError(f"config.json does not describe a {family.__name__}: {first_line(error)}") from error
    check_size(model, device)
    return model.eval()


def check_size(model: CausalModel, device: torch.device | str) -> None:
    """Raise if the machine has less memory than the weights take. On a CPU, unfilled weights take no memory yet."""
    if torch.device(device).type != "cpu":
        return
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) * model.shard.ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        taken, there = (f"{n / 2**30:.1f} GiB" for n in (size, memory))
        raise ModelError(f"the weights of this config.json take {taken}, but the machine has {there} of memory")


def first_line(error: BaseException) -> str:
    """Return the type and first line of an error, for a message of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@dataclass(frozen=True, slots=True)
class Stored:
    """File, name and shape of a tensor in a checkpoint."""

    file: Path
    name: str
    shape: tuple[int, ...]


def checkpoint_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in indexed_names(index)]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ModelError(f"{folder} has no {_some(absent)}, which its index names")
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; pickled weights are not supported, convert them to safetensors" if pickled else ""
        raise ModelError(f"{folder} has no *.safetensors files{hint}")
    return files


def indexed_names(index: Path) -> list[str]:
    """Return the files that an index names, all below the index's own folder.

    Names are checked, not link targets: files of the hub's cache are links to another folder.
    """
    weight_map = read_config(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ModelError(f"{index}: weight_map must be an object that maps every tensor to a file name")
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not _stays_inside(name):
            raise ModelError(f"{index}: weight_map must name *.safetensors files in its own folder, got {shown(name)}")
    return sorted(set(names))


def _stays_inside(name: str) -> bool:
    """Return whether a name is a safetensors file below the folder.

    >>> [_stays_inside(name) for name in ("a.safetensors", "b/a.safetensors", "../a.safetensors", "/a.safetensors")]
    [True, True, False, False]
    """
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and not set(name) & {"\\", ":", "\0"}
    return inside and path.suffix == ".safetensors"


def catalogue(files: list[Path], model: CausalModel) -> dict[str, Stored]:
    """Return every tensor that is not ignored, under the model's own name for it."""
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    own = name
                    for pattern, replacement in model.renames:
                        own = re.sub(pattern, replacement, own)
                    if any(re.search(pattern, own) for pattern in model.ignored):
                        continue
                    if own in found:
                        raise ModelError(f"{name} and {found[own].name} are both stored for {own}")
                    found[own] = Stored(file, name, tuple(reader.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    return found


def match(model: CausalModel, folder: Path, config: Mapping[str, Any]) -> tuple[list[Source], dict[str, Stored]]:
    """Return what to fill a model from, and all that is stored for it; every name and shape is checked."""
    stated = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(stated, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, got {shown(stated)}")
    quantisation = stated.get("quant_method")
    if stated and quantisation not in model.quantisations:
        raise ModelError(
            f"{folder} is quantised ({shown(quantisation)}), which is not supported; use unquantised weights"
        )
    stored = catalogue(checkpoint_files(folder), model)
    if model.tied and HEAD in stored:
        settle_head(model, stored)
    wanted = list(sources(model))
    filling = [s for s in wanted if s.name in stored and all(c in stored for c in s.companions)]
    check(folder, config, wanted, filling, stored)
    return filling, stored


def fill_from(model: CausalModel, folder: Path, config: Mapping[str, Any], progress: bool) -> None:
    """Fill all parameters; every name and shape is checked before the first byte is copied."""
    filling, stored = match(model, folder, config)
    by_file: dict[Path, list[Source]] = defaultdict(list)
    for source in filling:
        by_file[stored[source.name].file].append(source)
    total = sum(source.target.numel() * source.target.element_size() for source in filling)
    readers: dict[Path, Any] = {}

    def read(name: str, source: Source) -> Tensor:
        entry = stored[name]
        if entry.file not in readers:
            readers[entry.file] = safe_open(entry.file, framework="pt")
        if source.cut is None or source.cut.is_whole or source.concatenated:
            tensor: Tensor = readers[entry.file].get_tensor(entry.name)
            return tensor
        return read_part(readers[entry.file].get_slice(entry.name), source.cut, source.dim)

    # `None`: no bar unless standard error is a terminal.
    disable = None if progress else True
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=disable, delay=BAR_SECONDS)
    with bar:
        for group in by_file.values():
            for source in group:
                copy(source, [read(name, source) for name in (source.name, *source.companions)])
                bar.update(source.target.numel() * source.target.element_size())


def read_part(stored: Any, cut: RankCut, dim: int) -> Tensor:
    """Read a rank's part of a stored tensor, and nothing else of it."""
    before = (slice(None),) * dim
    parts = [stored[(*before, slice(start, end))] for start, end in cut.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def settle_head(model: CausalModel, stored: dict[str, Stored]) -> None:
    """Handle a head that is stored although the configuration ties it: drop it if it is equal, use it if it differs.

    Transformers does the same: if the weights differ, both are used despite the configuration.
    """
    head, embedding = stored[HEAD], stored.get(EMBEDDING)
    if embedding is not None and torch.equal(read_tensor(head), read_tensor(embedding)):
        del stored[HEAD]
        return
    log.warning("%s is stored and differs from the embedding: using it despite tie_word_embeddings", head.name)
    model.untie()


def read_tensor(entry: Stored) -> Tensor:
    try:
        with safe_open(entry.file, framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(entry.name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {entry.file}: {error}") from error


def copy(source: Source, tensors: list[Tensor]) -> None:
    values = tensors[0] if source.transform is None else source.transform(*tensors)
    if source.concatenated and source.cut is not None:
        values = torch.cat([values[start:end] for start, end in source.cut.ranges])
    if values.numel() == source.target.numel():
        values = values.reshape(source.target.shape)
    source.target.copy_(values)


def check(
    folder: Path, config: Mapping[str, Any], wanted: list[Source], filling: list[Source], stored: Mapping[str, Stored]
) -> None:
    """Raise an error that names what is missing, extra or misshapen."""
    known = {name for source in wanted for name in (source.name, *source.companions)}
    misshapen = [
        f"{name} has shape {list(shape)}, expected {list(s.stored_shape)}"
        for s in filling
        for name, shape in shapes(s, stored)
        if shape != s.stored_shape
    ]
    problems = {
        "missing": missing(wanted, filling, stored),
        "unexpected": sorted(set(stored) - known),
        "misshapen": misshapen,
    }
    told = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if told:
        architecture = ", ".join(config.get("architectures") or ["?"])
        raise ModelError(f"{folder} does not match {architecture}. Tensors " + "; ".join(told))


def shapes(source: Source, stored: Mapping[str, Stored]) -> list[tuple[str, tuple[int, ...]]]:
    """Return what must have the shape of a source: each of its tensors, or all of them concatenated."""
    names = (source.name, *source.companions)
    if source.concatenated:
        rows, others = zip(*((stored[name].shape[:1], stored[name].shape[1:]) for name in names))
        even = len(set(others)) == 1 and all(rows)
        return [(" and ".join(names), (sum(count for [count] in rows), *others[0]) if even else stored[names[0]].shape)]
    # Companions of a tensor stored in its own shape have their own shapes.
    return [(name, stored[name].shape) for name in (names if source.shape is None else names[:1])]


def missing(wanted: list[Source], filling: list[Source], stored: Container[str]) -> list[str]:
    """Return the names of unfilled parts, given that a part of a parameter may be offered whole or in pieces.

    The check is on intervals of memory: a source is not needed if a filled one covers it, or filled ones inside add
    up to it.
    """
    filled: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for source in filling:
        filled[_storage(source)].append((*_interval(source.target), source.target.numel()))
    unfilled: dict[int, list[tuple[int, int, bool, str]]] = defaultdict(list)
    names = {source.name for source in filling}
    for source in wanted:
        if source.name in names:
            continue
        low, high = _interval(source.target)
        others = filled[_storage(source)]
        inside = sum(count for a, b, count in others if low <= a and b <= high)
        covered = any(a <= low and high <= b for a, b, _ in others)
        if not covered and inside < source.target.numel():
            absent = next(name for name in (source.name, *source.companions) if name not in stored)
            unfilled[_storage(source)].append((low, high, inside > 0, absent))
    return [name for group in unfilled.values() for name in _outermost(group)]


def _outermost(group: list[tuple[int, int, bool, str]]) -> list[str]:
    """Return which of the missing alternatives to name: the whole if none of its pieces exists, else the pieces."""

    def told(entry: tuple[int, int, bool, str]) -> bool:
        low, high, begun, _ = entry
        inside = any(low <= a and b <= high and (a, b) != (low, high) for a, b, _, _ in group)
        whole = any(a <= low and high <= b and (a, b) != (low, high) and not w for a, b, w, _ in group)
        return not (begun and inside) and not whole

    return [entry[3] for entry in group if told(entry)]


def _storage(source: Source) -> int:
    """Return a number of the memory that a target is in. Without values, it has no address."""
    return int(source.target.untyped_storage()._cdata)


def _interval(target: Tensor) -> tuple[int, int]:
    """Return the elements of its storage that a view spans."""
    low = int(target.storage_offset())
    return low, low + sum((size - 1) * stride for size, stride in zip(target.shape, target.stride())) + 1


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
