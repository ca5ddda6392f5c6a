"""Loading of checkpoints: find the files, check every name and shape, then stream tensor by tensor.

Only safetensors are read; nothing is ever unpickled.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from weft.base.errors import InvalidOption, ModelError
from weft.base.gguf.header import is_gguf
from weft.base.returned_memory import return_free_memory
from weft.kernels.choosing import choose
from weft.kernels.formats.quantising import AS_STORED, Quantising
from weft.kernels.formats.recipe import LEFT_OUT, SPELLINGS, STATED, Recipe, claimed, is_wide, recipe_of
from weft.kernels.formats.scheme import Scheme
from weft.kernels.formats.stored import DENSE, Format
from weft.kernels.interface import Operations
from weft.models.bounds import INDEX_BYTES
from weft.models.config import checkpoint_config, read_config, shown, text_part
from weft.models.dummy import fill_dummy
from weft.models.finding import find_checkpoint
from weft.models.gguf.tensors import tensors as gguf_tensors
from weft.models.heads import HeadKind, add_head, without_vocabulary
from weft.models.identity import weights_digest
from weft.models.inventory import weight_facts
from weft.models.model import CausalModel, MatrixLayer, Source, only_declaring, pin, sources
from weft.models.mtp import COUNTS, MtpHead, head_of
from weft.models.reading_ahead import FilePiece, ReadAhead, places_in, reading_ahead
from weft.models.registry import family_of, head_kind
from weft.models.sharding import ALONE, RankCut, Shard, building_for
from weft.models.storing import Declared, Reading, assemble, declared_matrices, materialise, on, storage_of, stored_of

log = logging.getLogger("weft")

SHOWN = 10
# Our own names of the two matrices that a checkpoint may tie.
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Number of times a model must fit into free memory for a second copy of its weights: caches need room as well.
COPIES = 4
# Dtypes of plain numbers, as safetensors names them, and the bytes of a number.
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32")
BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}
# Small models are loaded before a progress bar appears.
BAR_SECONDS = 1.0
# Names of a decoder's tensors where it was saved without a head.
BARE = re.compile(r"(embed_tokens|embeddings|layers|norm|norm_f|final_layernorm|embedding_norm)\.")


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
    quantising: Quantising = AS_STORED,
    activations: str = "wide",
) -> tuple[CausalModel, dict[str, Any]]:
    """Load the model of a folder or hub id; return it with the configuration of its text part.

    With ample `spare_bytes` weights may be kept twice, for few rows and for many. `when_built` is called with the
    model before its weights are there. Only `operations` can compute with the loaded model; the default are those
    chosen for the device, for `exact` answers or not. `identify`: digest the weights. `quantising`: which matrices of
    plain numbers are quantised while they are read. `activations`: see `choose`.

    With `weights="dummy"` only the configuration is read (a folder with config.json, the file itself, or the name of
    a packaged one), and the weights are random, the same for the same seed. Of a model that is cut over ranks, only
    the part of `shard` is built and read; random weights are then the same on every rank.
    """
    folder = find_checkpoint(path, with_weights=weights != "dummy")
    config = text_part(checkpoint_config(folder))
    model = build(config, dtype, device, shard=shard, declare=True)
    when_built(model, str(device), dtype)
    if weights == "dummy":
        format_of = formats_of_dummy(model, folder, config, quantising)
        check_size(model, device, least_random_bytes(model, format_of is not None))
        fill_dummy(model, seed, format_of, device)
    elif weights == "checkpoint":
        fill_from(model, folder, config, progress, device, quantising)
    else:
        raise ModelError(f"weights must be 'checkpoint' or 'dummy', got {weights!r}")
    model.held = weight_facts(model, config)
    if identify:
        model.weights_digest = weights_digest(model)
    operations = (
        operations or choose(str(device), dtype, model.memories, exact=exact, activations=activations).operations
    )
    prepare(model, operations, spare_bytes)
    # Matrices as they were stored have left holes between those that are kept.
    return_free_memory()
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
    quantising: Quantising = AS_STORED,
) -> MtpHead:
    """Load the MTP head of the checkpoint that `base` was loaded from, to the same device."""
    folder = find_checkpoint(path, with_weights=weights != "dummy")
    config = text_part(checkpoint_config(folder))
    head = build(config, dtype, device, family=head_of(config), declare=True)
    assert isinstance(head, MtpHead)
    if weights == "dummy":
        fill_dummy(head, seed, formats_of_dummy(head, folder, config, quantising), device)
    elif not catalogue(checkpoint_files(folder), head):
        raise ModelError(f"draft: {folder} has no MTP head: no tensor is named mtp.*; pass --draft suffix or off")
    else:
        fill_from(head, folder, config, False, device, quantising)
    prepare(head, operations, 0)
    pin(head)
    # Not a part of the head: its weights are counted and prepared with the model.
    object.__setattr__(head, "base", base)
    return head


def has_head(folder: Path, weights: str) -> bool:
    """Return whether a checkpoint has an MTP head that Weft can compute, with all its tensors.

    Random weights have one if config.json says so.
    """
    config = text_part(checkpoint_config(folder))
    try:
        head = build(config, torch.float32, "meta", family=head_of(config))
        if weights == "dummy":
            return any(config.get(name) for name in COUNTS)
        match(head, folder, config)
    except ModelError:
        return False
    return True


def prepare(model: CausalModel, operations: Operations, spare_bytes: int) -> None:
    """Convert all matmul weights to the fastest formats of these operations, twice if there is ample memory."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    twice = COPIES * size <= spare_bytes
    for module in model.modules():
        if isinstance(module, MatrixLayer):
            module.prepare(operations, twice)


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
    declare: bool = False,
) -> CausalModel:
    """Return a rank's part of the model of a configuration, its parameters not filled yet.

    `declare`: its matrices take no memory until it is known how they are stored.
    """
    head = HeadKind.VOCABULARY if family is not None else head_kind(config)
    family = family or family_of(config)
    try:
        with defaults(dtype, device), building_for(shard), only_declaring(declare):
            model = family(config if head is HeadKind.VOCABULARY else without_vocabulary(config), dtype)
            add_head(model, head, config)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # sizes that are valid one by one and impossible together
        raise ModelError(f"config.json does not describe a {family.__name__}: {first_line(error)}") from error
    if config.get("use_bidirectional_attention") is True or config.get("is_causal") is False:
        raise ModelError(
            "config.json: attention must be causal, but use_bidirectional_attention is true or is_causal is false; "
            "models that look ahead are not supported"
        )
    model.dtype = dtype
    if not declare:
        check_size(model, device, sum(each.numel() * each.element_size() for each in model.parameters()))
    return model.eval()


def least_random_bytes(model: CausalModel, is_quantised: bool) -> int:
    """Return what random weights take at least: quantised, 4 bits a number."""
    if is_quantised:
        return sum(each.numel() for each in model.parameters()) // 2
    return sum(each.numel() * each.element_size() for each in model.parameters())


def check_size(model: CausalModel, device: torch.device | str, size: int) -> None:
    """Raise if the machine has less memory than the weights take. On a CPU, unfilled weights take no memory yet."""
    if torch.device(device).type != "cpu":
        return
    size *= model.shard.ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        taken, there = (f"{n / 2**30:.1f} GiB" for n in (size, memory))
        raise ModelError(f"the weights of this config.json take {taken}, but the machine has {there} of memory")


def first_line(error: BaseException) -> str:
    """Return the type and first line of an error, for a message of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@dataclass(frozen=True, slots=True)
class Entry:
    """File, name, shape and dtype of a tensor in a checkpoint."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, or GGUF
    # Of a file of another kind: what reads the tensor, and its bytes.
    read: Callable[[], Tensor] | None = None
    bytes: int | None = None


def checkpoint_files(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return [folder]
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


def catalogue(files: list[Path], model: CausalModel) -> dict[str, Entry]:
    """Return every tensor that is not ignored, under the model's own name for it."""
    found: dict[str, Entry] = {}
    for file in files:
        if is_gguf(file):
            found |= {own: each for own, each in gguf_entries(file) if not is_ignored(model, own)}
            continue
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    own = own_name(model, name)
                    if is_ignored(model, own):
                        continue
                    if own in found:
                        raise ModelError(f"{name} and {found[own].name} are both stored for {own}")
                    part = reader.get_slice(name)
                    found[own] = Entry(file, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    return found


def is_ignored(model: CausalModel, own: str) -> bool:
    return any(re.search(pattern, own) for pattern in model.ignored)


def gguf_entries(file: Path) -> Iterator[tuple[str, Entry]]:
    """Return every tensor of the model that a GGUF file has, under the model's own name for it."""
    names: set[str] = set()
    for each in gguf_tensors(file):
        if each.name in names:
            raise ModelError(f"{file}: {each.stored.name} and another tensor are both stored for {each.name}")
        names.add(each.name)
        yield each.name, Entry(each.stored.file, each.stored.name, each.shape, each.type, each.read, each.bytes)


def match(
    model: CausalModel, folder: Path, config: Mapping[str, Any], quantising: Quantising = AS_STORED
) -> tuple[list[Reading], dict[str, Entry]]:
    """Return what to fill a model from, and all that is stored for it; every name, shape and format is checked."""
    recipe = recipe_in(folder, config)
    stored = catalogue(checkpoint_files(folder), model)
    if model.tied and HEAD in stored:
        settle_head(model, stored)
    wanted = list(sources(model))
    found = [reading for source in wanted if (reading := reading_of(source, stored, recipe)) is not None]
    known = {name for reading in found for name in reading.names}
    for name in [name for name in stored if name not in known and recipe.rules and LEFT_OUT.search(name)]:
        del stored[name]
    check(folder, config, wanted, found, stored)
    if is_applied(quantising, {reading.spelling.kind for reading in found if reading.spelling is not None}):
        matrices = declared_matrices(model)
        found = [to_quantise(each, quantising, model.tied) if is_in(each, matrices) else each for each in found]
    return found, stored


def is_applied(quantising: Quantising, kinds: Set[str]) -> bool:
    """Return whether plain numbers are quantised, given what is quantised already."""
    if quantising.kind == "off" or not kinds:
        return quantising.kind != "off"
    if kinds != {quantising.kind}:
        raise InvalidOption(
            "quantize", f"is {quantising.kind}, but the weights are stored as {', '.join(sorted(kinds))}; leave it out"
        )
    log.info("quantize: off: the weights are stored as %s already", quantising.kind)
    return False


def is_in(reading: Reading, matrices: Container[int]) -> bool:
    return storage_of(reading.source.target) in matrices


def to_quantise(reading: Reading, quantising: Quantising, tied: bool) -> Reading:
    """Return how to read a matrix of plain numbers in the format that it is to have."""
    *_, outputs, inputs = reading.source.stored_shape
    if reading.source.transposed:
        outputs, inputs = inputs, outputs
    return replace(reading, wanted=quantising.format_of(reading.source.name, outputs, inputs, tied))


def is_quantised(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether matrices of a checkpoint are probably quantised, before any is read."""
    return is_gguf(folder) or bool(stated_in(config)) or beside(folder).exists()


def stated_in(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def beside(folder: Path) -> Path:
    return (folder if folder.is_dir() else folder.parent) / "hf_quant_config.json"


def recipe_in(folder: Path, config: Mapping[str, Any]) -> Recipe:
    """Return which matrices of a checkpoint are quantised, by its configuration or the file beside it."""
    if is_gguf(folder):
        return Recipe()
    stated, other = stated_in(config), beside(folder)
    return recipe_of(stated, read_config(other) if not stated and other.exists() else None)


def formats_of_dummy(
    model: CausalModel, folder: Path, config: Mapping[str, Any], quantising: Quantising
) -> Callable[[str, int, int], Format] | None:
    """Return what random weights are stored as by their names, sizes and the configuration; None: as plain numbers."""
    recipe = recipe_for_dummy(model, folder, config)
    statements = [rule.statement for rule in recipe.rules if rule.statement is not None]
    kinds = {scheme.kind for statement in statements if (scheme := claimed(statement)) is not None}
    if is_applied(quantising, kinds):
        return partial(quantising.format_of, tied=model.tied)
    return recipe.format_of if recipe.rules else None


def recipe_for_dummy(model: CausalModel, folder: Path, config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a configuration without a checkpoint, whose lists name the model's own modules."""

    def renamed(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: renamed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [renamed(each) for each in value]
        return own_name(model, f"{value}.").removesuffix(".") if isinstance(value, str) and "." in value else value

    return recipe_in(
        folder, {name: renamed(config.get(name)) for name in ("quantization_config", "compression_config")}
    )


def own_name(model: CausalModel, name: str) -> str:
    """Return the model's own name for a tensor of a checkpoint."""
    name = f"model.{name}" if BARE.match(name) else name
    for pattern, replacement in model.renames:
        name = re.sub(pattern, replacement, name)
    return name


def reading_of(source: Source, stored: Mapping[str, Entry], recipe: Recipe) -> Reading | None:
    """Return how to read a source; None if the checkpoint does not have it. Recipe and tensors must agree."""
    for spelling in SPELLINGS:
        names = spelling.names_of(source.name)
        if not all(name in stored and stored[name].dtype in kinds for name, kinds in zip(names, spelling.dtypes)):
            continue
        if not spelling.is_stated:
            return Reading(source, names, spelling, Scheme(spelling.kind))
        module = stored[names[0]].name.removesuffix(spelling.names[0]).removesuffix(".weight")
        scheme = recipe.scheme_of(module)
        if scheme is None or scheme.kind != spelling.kind:
            stated = "as 16 bits" if scheme is None else f"as {scheme.kind}"
            raise ModelError(f"{module} is stored as {spelling.kind}, but quantization_config states it {stated}")
        return Reading(source, names, spelling, scheme)
    names = (source.name, *source.companions)
    if not all(name in stored for name in names):
        return None
    entry = stored[source.name]
    if entry.dtype not in PLAIN:
        raise ModelError(
            f"{entry.name} has dtype {entry.dtype} without the tensors of a known format beside it; use weights in "
            f"{', '.join(STATED)} or 16 bits"
        )
    module = entry.name.removesuffix(".weight")
    if source.target.ndim > 1 and recipe.rules and not is_wide(module) and not entry.name.endswith("bias"):
        scheme = recipe.scheme_of(module)
        if scheme is not None:
            raise ModelError(f"{module} is stored as {entry.dtype}, but quantization_config states it as {scheme.kind}")
    return Reading(source, names)


def fill_from(
    model: CausalModel,
    folder: Path,
    config: Mapping[str, Any],
    progress: bool,
    device: torch.device | str,
    quantising: Quantising = AS_STORED,
) -> None:
    """Fill all parameters; every name and shape is checked before the first byte is copied."""
    found, stored = match(model, folder, config, quantising)
    total = sum(size_of(reading, stored) for reading in found)
    check_size(model, device, total)
    declared = declared_matrices(model)
    by_file: dict[Path, list[Reading]] = defaultdict(list)
    by_matrix: dict[int, list[Reading]] = defaultdict(list)
    for reading in found:
        by_file[stored[reading.names[0]].file].append(reading)
        by_matrix[storage_of(reading.source.target)].append(reading)
    # Memory of matrices as plain numbers; None: one is assembled from all its tensors at once.
    memory: dict[int, Tensor | None] = {}
    # `None`: no bar unless standard error is a terminal.
    disable = None if progress else True
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=disable, delay=BAR_SECONDS)
    ordered = [reading for group in by_file.values() for reading in group]
    with bar, reading_ahead(order_of(ordered, by_matrix, stored)) as ahead:
        files = Files(stored, ahead)
        for reading in ordered:
            key = storage_of(reading.source.target)
            if key not in declared:
                fill(reading, files)
            elif key not in memory:
                memory[key] = begin(declared[key], by_matrix[key], files, device)
            real = memory.get(key)
            if real is not None:
                fill(replace(reading, source=on(reading.source, real)), files)
            bar.update(size_of(reading, stored))


def order_of(
    ordered: Sequence[Reading], by_matrix: Mapping[int, Sequence[Reading]], stored: Mapping[str, Entry]
) -> Iterator[tuple[str, FilePiece]]:
    """Return all tensors of safetensors about as `fill_from` needs them: with the first of a matrix, all of it."""
    places: dict[Path, dict[str, FilePiece]] = {}
    for key in dict.fromkeys(storage_of(reading.source.target) for reading in ordered):
        for entry, name in ((stored[name], name) for reading in by_matrix[key] for name in reading.names):
            if entry.read is None:
                if entry.file not in places:
                    places[entry.file] = places_in(entry.file)
                yield name, places[entry.file][entry.name]


def begin(matrix: Declared, readings: Sequence[Reading], files: Files, device: torch.device | str) -> Tensor | None:
    """Give a matrix its memory: for plain numbers, which is returned, or what its tensors need, which is filled."""
    if any(each.is_quantised for each in readings):
        matrix.owner.store(matrix.name, assemble(matrix, readings, files.whole, device))
        return None
    real = materialise(matrix, device)
    if sum(each.source.target.numel() for each in readings) < real.numel():
        # Places of a vocabulary that this rank does not use.
        real.zero_()
    return real


def fill(reading: Reading, files: Files) -> None:
    """Fill a source's target, which holds plain numbers."""
    source = reading.source
    if reading.spelling is None:
        copy(source, [files.part(name, source) for name in reading.names])
    else:
        # A layer that computes with plain numbers only.
        values = stored_of(reading, files.whole, source.target.dtype).decode()
        source.target.copy_(values.reshape(source.target.shape))


class Files:
    """Open files of a checkpoint."""

    def __init__(self, stored: Mapping[str, Entry], ahead: ReadAhead | None = None) -> None:
        self.stored = stored
        self.ahead = ahead or ReadAhead(())
        self.readers: dict[Path, Any] = {}

    def reader_of(self, name: str) -> Any:
        self.ahead.reached(name)
        file = self.stored[name].file
        if file not in self.readers:
            self.readers[file] = safe_open(file, framework="pt")
        return self.readers[file]

    def whole(self, name: str) -> Tensor:
        read = self.stored[name].read
        if read is not None:
            return read()
        tensor: Tensor = self.reader_of(name).get_tensor(self.stored[name].name)
        return tensor

    def part(self, name: str, source: Source) -> Tensor:
        """Return this rank's part of a tensor, and read nothing else of it."""
        if source.cut is None or source.cut.is_whole or source.concatenated:
            return self.whole(name)
        if self.stored[name].read is not None:
            return read_part(self.whole(name), source.cut, source.dim)
        return read_part(self.reader_of(name).get_slice(self.stored[name].name), source.cut, source.dim)


def size_of(reading: Reading, stored: Mapping[str, Entry]) -> int:
    """Return the bytes that a source takes in memory."""
    target = reading.source.target
    if reading.wanted is not DENSE:
        return target.numel()
    if reading.spelling is None or not target.numel():
        return target.numel() * target.element_size()
    share = target.numel() / max(1, math.prod(reading.source.stored_shape))
    return int(share * sum(bytes_of(stored[name]) for name in reading.names))


def bytes_of(entry: Entry) -> int:
    return math.prod(entry.shape) * BYTES.get(entry.dtype, 4) if entry.bytes is None else entry.bytes


def read_part(stored: Any, cut: RankCut, dim: int) -> Tensor:
    """Read a rank's part of a stored tensor, and nothing else of it."""
    before = (slice(None),) * dim
    parts = [stored[(*before, slice(start, end))] for start, end in cut.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def settle_head(model: CausalModel, stored: dict[str, Entry]) -> None:
    """Handle a head that is stored although the configuration ties it: drop it if it is equal, use it if it differs.

    Transformers does the same: if the weights differ, both are used despite the configuration.
    """
    head, embedding = stored[HEAD], stored.get(EMBEDDING)
    alike = embedding is not None and head.dtype == embedding.dtype and head.dtype in PLAIN
    if embedding is not None and alike and torch.equal(read_tensor(head), read_tensor(embedding)):
        del stored[HEAD]
        return
    log.warning("%s is stored and differs from the embedding: using it despite tie_word_embeddings", head.name)
    model.untie()


def read_tensor(entry: Entry) -> Tensor:
    try:
        with safe_open(entry.file, framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(entry.name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {entry.file}: {error}") from error


def copy(source: Source, tensors: list[Tensor]) -> None:
    """Fill a source's target from plain numbers."""
    values = tensors[0] if source.transform is None else source.transform(*tensors)
    if source.transposed:
        values = values.transpose(-1, -2)
    if source.order is not None:
        values = source.order(values.movedim(source.output_dim, 0)).movedim(0, source.output_dim)
    if source.factor is not None:
        factors = torch.tensor(source.factor, dtype=torch.float32)
        values = values.float() * factors.view(-1, *[1] * (values.ndim - 1))
    if source.concatenated and source.cut is not None:
        values = torch.cat([values[start:end] for start, end in source.cut.ranges])
    if values.numel() == source.target.numel():
        values = values.reshape(source.target.shape)
    source.target.copy_(values)


def check(
    folder: Path, config: Mapping[str, Any], wanted: list[Source], found: list[Reading], stored: Mapping[str, Entry]
) -> None:
    """Raise an error that names what is missing, extra or misshapen."""
    known = {name for source in wanted for name in (source.name, *source.companions)}
    known |= {name for reading in found for name in reading.names}
    problems = {
        "missing": missing(wanted, [reading.source for reading in found], stored),
        "unexpected": sorted(set(stored) - known),
        "misshapen": [complaint for reading in found for complaint in misshapen(reading, stored)],
    }
    told = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if told:
        architecture = ", ".join(config.get("architectures") or ["?"])
        raise ModelError(f"{folder} does not match {architecture}. Tensors " + "; ".join(told))


def misshapen(reading: Reading, stored: Mapping[str, Entry]) -> list[str]:
    """Return what is wrong with the shapes of a source's tensors."""
    source, wanted = reading.source, reading.source.stored_shape
    if reading.spelling is None:
        return [
            f"{name} has shape {list(shape)}, expected {list(wanted)}"
            for name, shape in shapes(source, stored)
            if shape != wanted
        ]
    assert reading.scheme is not None
    if source.transposed:
        # Only plain numbers are stored by input.
        wanted = (*wanted[:-2], wanted[-1], wanted[-2])
    found = reading.spelling.sizes([stored[name].shape for name in reading.names], reading.scheme)
    if isinstance(found, str):
        return [f"{reading.names[0]}: {found}"]
    return [] if found == wanted else [f"{reading.names[0]} has shape {list(found)}, expected {list(wanted)}"]


def shapes(source: Source, stored: Mapping[str, Entry]) -> list[tuple[str, tuple[int, ...]]]:
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
        filled[storage_of(source.target)].append((*_interval(source.target), source.target.numel()))
    unfilled: dict[int, list[tuple[int, int, bool, str]]] = defaultdict(list)
    names = {source.name for source in filling}
    for source in wanted:
        if source.name in names:
            continue
        low, high = _interval(source.target)
        others = filled[storage_of(source.target)]
        inside = sum(count for a, b, count in others if low <= a and b <= high)
        covered = any(a <= low and high <= b for a, b, _ in others)
        if not covered and inside < source.target.numel():
            absent = next(name for name in (source.name, *source.companions) if name not in stored)
            unfilled[storage_of(source.target)].append((low, high, inside > 0, absent))
    return [name for group in unfilled.values() for name in _outermost(group)]


def _outermost(group: list[tuple[int, int, bool, str]]) -> list[str]:
    """Return which of the missing alternatives to name: the whole if none of its pieces exists, else the pieces."""

    def told(entry: tuple[int, int, bool, str]) -> bool:
        low, high, begun, _ = entry
        inside = any(low <= a and b <= high and (a, b) != (low, high) for a, b, _, _ in group)
        whole = any(a <= low and high <= b and (a, b) != (low, high) and not w for a, b, w, _ in group)
        return not (begun and inside) and not whole

    return [entry[3] for entry in group if told(entry)]


def _interval(target: Tensor) -> tuple[int, int]:
    """Return the elements of its storage that a view spans."""
    low = int(target.storage_offset())
    return low, low + sum((size - 1) * stride for size, stride in zip(target.shape, target.stride())) + 1


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    # Names come from files: those with characters that do not print are quoted.
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:SHOWN]) + more
