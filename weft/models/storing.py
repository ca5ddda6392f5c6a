"""Storage of a model's matrices: created from what a checkpoint has, in the format of each tensor.

A layer declares a matrix with its sizes. Its sources say which tensors of the checkpoint hold which of its rows. Here
the tensors are read, cut, reordered and put together by the rules of their formats, on codes and scales alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.kernels.formats.scheme import Scheme, Spelling
from weft.kernels.formats.stored import DENSE, Format, Stored, as_dense
from weft.models.model import MatrixLayer, Source
from weft.models.sharding import RankCut

# Number of a matrix that is not one expert's.
WHOLE = -1
log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class Reading:
    """A source and the tensors of the checkpoint that it is read from, by the model's own names for them."""

    source: Source
    names: tuple[str, ...]
    # How the tensors are one matrix; None: plain numbers.
    spelling: Spelling | None = None
    scheme: Scheme | None = None
    # What plain numbers are stored as.
    wanted: Format = DENSE

    @property
    def is_quantised(self) -> bool:
        """Return whether the result is not one tensor of plain numbers."""
        return self.spelling is not None or self.wanted is not DENSE


@dataclass(frozen=True, slots=True)
class Declared:
    """A matrix of a layer that has no memory yet."""

    owner: MatrixLayer
    name: str
    parameter: nn.Parameter


def declared_matrices(model: nn.Module) -> dict[int, Declared]:
    """Return all matrices without memory, by the number of their storage."""
    found = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                assert isinstance(module, MatrixLayer), (type(module), name)
                found[storage_of(parameter)] = Declared(module, name, parameter)
    return found


def storage_of(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor is in. Without values, it has no address."""
    return int(tensor.untyped_storage()._cdata)


def materialise(matrix: Declared, device: torch.device | str) -> Tensor:
    """Give a matrix memory for plain numbers."""
    real = torch.empty(matrix.parameter.shape, dtype=matrix.parameter.dtype, device=device)
    matrix.owner.store(matrix.name, (Stored.of(real),))
    return real


def on(source: Source, real: Tensor) -> Source:
    """Return a source whose target is in a matrix that has got memory."""
    target = source.target
    return replace(source, target=real.as_strided(target.shape, target.stride(), target.storage_offset()))


def assemble(
    matrix: Declared,
    readings: Sequence[Reading],
    read: Callable[[str], Tensor],
    device: torch.device | str,
) -> tuple[Stored, ...]:
    """Return a matrix, some of whose tensors are not plain numbers, as it will be stored.

    The device gets what it keeps and nothing else. The host has the tensors of one matrix at a time, or of one expert.
    """
    *experts, outputs, inputs = matrix.parameter.shape
    dtype = matrix.parameter.dtype
    groups: dict[int, list[Reading]] = {}
    for reading in readings:
        target = reading.source.target
        if target.numel():
            number = int(target.storage_offset()) // (outputs * inputs)
            groups.setdefault(WHOLE if target.ndim > 2 or not experts else number, []).append(reading)
    mapped: set[int] = set()

    def noted(name: str) -> Tensor:
        tensor = read(name)
        mapped.add(storage_of(tensor))
        return tensor

    def parts_of(key: int) -> tuple[Stored, ...]:
        pieces = []
        for reading in groups[key]:
            place = int(reading.source.target.storage_offset()) % (outputs * inputs)
            pieces.append(Placed(*divmod(place, inputs), stored_of(reading, noted, dtype, device)))
        return put_together(pieces, outputs, inputs, dtype)

    if not experts:
        return tuple(owned(part, mapped, device) for part in parts_of(WHOLE))
    if WHOLE in groups:
        return (owned(one_part(parts_of(WHOLE), dtype), mapped, device),)
    return (of_experts(sorted(groups), lambda key: one_part(parts_of(key), dtype), dtype, device),)


def owned(stored: Stored, mapped: Container[int], device: torch.device | str) -> Stored:
    """Return a matrix on a device, in memory of its own: not in a file's, and not in a part of a larger tensor's."""

    def moved(tensor: Tensor) -> Tensor:
        is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return tensor.to(device, copy=is_part or storage_of(tensor) in mapped).contiguous()

    return replace(stored, tensors=tuple(map(moved, stored.tensors)))


def encoded(
    matrix: Declared, real: Tensor, wanted: Sequence[Source], format_of: Callable[[str, int, int], Format]
) -> tuple[Stored, ...]:
    """Return a matrix of plain numbers as a checkpoint would store it: each of its sources in a format of its own."""
    *experts, outputs, inputs = matrix.parameter.shape
    pieces = []
    for source in fewest_sources(matrix, wanted):
        place = divmod(int(source.target.storage_offset()) % (outputs * inputs), inputs)
        own = on(source, real).target
        format = format_of(source.name.removesuffix(".weight"), own.shape[-2], own.shape[-1])
        pieces.append(Placed(*place, format.encode(own)))
    parts = put_together(pieces, outputs, inputs, matrix.parameter.dtype)
    return (one_part(parts, matrix.parameter.dtype),) if experts else parts


def fewest_sources(matrix: Declared, wanted: Sequence[Source]) -> Iterator[Source]:
    """Return sources that fill a matrix: of names for the same numbers, those that hold most of them."""
    covered = 0
    for source in sorted(wanted, key=lambda source: -source.target.numel()):
        if covered >= matrix.parameter.numel() or not source.target.numel():
            return
        covered += source.target.numel()
        yield source


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a matrix, from this row and this column on."""

    row: int
    column: int
    stored: Stored


def put_together(pieces: list[Placed], outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Stored, ...]:
    """Return the pieces of a matrix as parts of adjacent outputs, as few as their formats allow."""
    if any(piece.stored.inputs < inputs for piece in pieces):
        stored = [piece.stored for piece in sorted(pieces, key=lambda piece: piece.column)]
        abreast = stored[0].format.abreast(stored) if len({type(each.format) for each in stored}) == 1 else None
        return (abreast if abreast is not None else wide_abreast(stored, dtype),)
    parts: list[Stored] = []
    row = 0
    for piece in sorted(pieces, key=lambda piece: piece.row):
        assert piece.row == row, "rows of a matrix are read twice or not at all"
        row += piece.stored.outputs
        last = parts[-1] if parts else None
        joined = (
            last.format.stacked([last, piece.stored]) if last is not None and are_alike(last, piece.stored) else None
        )
        parts[-1:] = [joined] if joined is not None else [*parts[-1:], piece.stored]
    if row < outputs:
        # Places of a vocabulary that this rank does not use.
        parts.append(Stored.of(parts[0].tensors[0].new_zeros(outputs - row, inputs, dtype=dtype)))
    return tuple(parts)


def are_alike(one: Stored, other: Stored) -> bool:
    """Return whether two parts may be one."""
    return type(one.format) is type(other.format) and [t.dtype for t in one.tensors] == [t.dtype for t in other.tensors]


def one_part(parts: tuple[Stored, ...], dtype: torch.dtype) -> Stored:
    """Return a matrix in one format."""
    return (
        parts[0] if len(parts) == 1 else Stored.of(torch.cat([widened(part, dtype).tensors[0] for part in parts], -2))
    )


def of_experts(
    numbers: Sequence[int], one: Callable[[int], Stored], dtype: torch.dtype, device: torch.device | str
) -> Stored:
    """Return the matrices of all experts as one, each of which is read when there is a place for it."""
    first = one(numbers[0])
    tensors = tuple(torch.empty(len(numbers), *each.shape, dtype=each.dtype, device=device) for each in first.tensors)
    for place, number in enumerate(numbers):
        own = one(number)
        if own.format != first.format:
            del tensors
            matrices = torch.empty(len(numbers), first.outputs, first.inputs, dtype=dtype, device=device)
            for matrix, number in zip(matrices, numbers, strict=True):
                matrix.copy_(widened(one(number), dtype).tensors[0])
            return Stored.of(matrices)
        for tensor, given in zip(tensors, own.tensors, strict=True):
            tensor[place].copy_(given)
    return Stored(first.format, tensors, first.outputs, first.inputs)


def wide_abreast(stored: Sequence[Stored], dtype: torch.dtype) -> Stored:
    return Stored.of(torch.cat([widened(each, dtype).tensors[0] for each in stored], -1))


def widened(stored: Stored, dtype: torch.dtype) -> Stored:
    """Return a matrix as plain numbers, where its format does not allow what a layer needs."""
    if stored.format is DENSE:
        return Stored.of(stored.tensors[0].to(dtype))
    log.warning(
        "a matrix of %s is kept in 16 bits: this model cuts or scales it where its format does not allow",
        stored.format.name,
    )
    return as_dense(stored, dtype)


def on_host(stored: Stored) -> Stored:
    return replace(stored, tensors=tuple(each.to("cpu") for each in stored.tensors))


def stored_of(
    reading: Reading, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Stored:
    """Read a source as its format stores it, on the host: this rank's part, reordered and scaled.

    Plain numbers are quantised on `device`, before anything else, so that no cut or order changes a number.
    """
    source, tensors = reading.source, [read(name) for name in reading.names]
    dim = source.dim
    if reading.spelling is None:
        assert source.transform is None, f"{source.name} is computed from plain numbers"
        matrix = tensors[0]
        if source.transposed:
            matrix = matrix.transpose(-1, -2)
        # From the numbers of the checkpoint: a conversion to the model's dtype would round them twice.
        plain = reading.wanted is DENSE
        stored = Stored.of(matrix.to(dtype)) if plain else on_host(reading.wanted.encode(matrix.to(device)))
    else:
        assert reading.scheme is not None
        stored = reading.spelling.read(tensors, reading.scheme)
    if source.transposed and dim > 0:
        dim = 3 - dim
    if source.cut is not None and not source.cut.is_whole:
        stored = cut(stored, source.cut, dim, source.target.ndim, dtype)
    if source.order is not None:
        index = source.order(torch.arange(stored.outputs))
        stored = stored.format.reordered(stored, index) or Stored.of(widened(stored, dtype).tensors[0][..., index, :])
    if source.factor is not None:
        factor = torch.tensor(source.factor) if isinstance(source.factor, list) else source.factor
        scaled = stored.format.scaled(stored, factor)
        stored = scaled if scaled is not None else DENSE.scaled(widened(stored, dtype), factor)
    return stored


def cut(stored: Stored, part: RankCut, dim: int, dims: int, dtype: torch.dtype) -> Stored:
    """Return a rank's part of a matrix, or of all experts."""
    if dims == 3 and dim == 0:
        [(start, end)] = part.ranges
        return Stored(stored.format, tuple(each[start:end] for each in stored.tensors), stored.outputs, stored.inputs)
    by_row = dim == dims - 2

    def pieces(of: Stored) -> list[Stored | None]:
        take = of.format.cut_rows if by_row else of.format.cut_columns
        return [take(of, start, end) for start, end in part.ranges]

    found = [each for each in pieces(stored) if each is not None]
    joined = None
    if len(found) == len(part.ranges):
        joined = (
            found[0]
            if len(found) == 1
            else found[0].format.stacked(found)
            if by_row
            else found[0].format.abreast(found)
        )
    if joined is None:
        plain = [each.tensors[0] for each in pieces(widened(stored, dtype)) if each is not None]
        joined = Stored.of(torch.cat(plain, -2 if by_row else -1))
    return joined
