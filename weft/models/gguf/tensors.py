"""Tensors of a model from a GGUF file, in the types of the file."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.base.errors import ModelError
from weft.base.gguf.header import StoredTensor, read_header, shown
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.models.gguf.configuration import FileKeys
from weft.models.gguf.names import Derived, derived

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# What is appended to the name of a matrix, for the order of its inputs.
ORDER = "_order"


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the model: its type and shape, and the function that reads it."""

    name: str  # the model's own
    stored: StoredTensor  # the first tensor of the file that it is read from
    type: str
    shape: tuple[int, ...]
    bytes: int
    read: Callable[[], Tensor]


class Mapped:
    """Files as memory. Nothing is read before it is used."""

    def __init__(self) -> None:
        self.files: dict[Path, mmap.mmap] = {}

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return plain numbers, or the bytes of blocks [..., outputs, bytes], without a copy."""
        content = self.files.get(stored.file)
        if content is None:
            try:
                with stored.file.open("rb") as file:
                    # Writes would go to memory of this process. None happen; but torch wants to be able to.
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot read {stored.file}: {error}") from error
            self.files[stored.file] = content
        if stored.offset + stored.bytes > len(content):
            raise ModelError(f"{stored.file} has become shorter")
        found = torch.frombuffer(content, dtype=torch.uint8, count=stored.bytes, offset=stored.offset)
        if stored.type in NUMBERS:
            dtype = NUMBERS[stored.type]
            found = found if stored.offset % dtype.itemsize == 0 else found.clone()
            return found.view(dtype).view(stored.shape)
        return found.view(*stored.shape[:-1], -1)


def tensors(path: Path) -> Iterator[FileTensor]:
    """Return all tensors of the model, and of its head that predicts further tokens, if there is one."""
    keys, mapped = FileKeys(read_header(path)), Mapped()
    for each in fitting(keys):
        parts = [keys.tensor(part.tensor) for part in each.parts]
        for stored in parts:
            if stored.type not in NUMBERS and stored.type not in BLOCK_TYPES:
                raise ModelError(
                    f"{path}: tensor {shown(stored.name)} is stored as {stored.type}, which is not supported; "
                    f"use a file in {', '.join(BLOCK_TYPES)}, BF16 or F32"
                )
        kind, is_moved = type_of(each, parts), False
        if each.inputs is not None and kind in BLOCK_TYPES:
            is_moved = not moves_blocks(each.inputs, BLOCK_TYPES[kind].numbers)
        # Without memory, the same operations say what the shape will be.
        sized = combined(
            each, [torch.empty(meta_shape(stored), dtype=dtype_of(stored), device="meta") for stored in parts], parts
        )
        shape = tuple(sized.shape)
        if kind in BLOCK_TYPES:
            shape = (*shape[:-1], shape[-1] // BLOCK_TYPES[kind].bytes * BLOCK_TYPES[kind].numbers)
        size = sized.numel() * sized.element_size()
        yield FileTensor(each.name, parts[0], kind, shape, size, partial(read, each, parts, mapped))
        if is_moved:
            assert each.inputs is not None
            order = each.inputs.argsort()
            yield FileTensor(
                each.name + ORDER, parts[0], "I64", tuple(order.shape), 8 * len(order), partial(returned, order)
            )


def fitting(keys: FileKeys) -> list[Derived]:
    """Return what the model's tensors are made of; raise if shapes are none of the architecture."""
    try:
        return list(derived(keys))
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ModelError(
            f"{keys.header.path}: its tensors have shapes that do not fit {keys.arch}: {reason}"
        ) from error


def returned(tensor: Tensor) -> Tensor:
    return tensor


def read(each: Derived, parts: list[StoredTensor], mapped: Mapped) -> Tensor:
    return combined(each, [mapped.tensor(stored) for stored in parts], parts)


def type_of(each: Derived, parts: list[StoredTensor]) -> str:
    """Return the type in which a tensor is read: the file's, or plain numbers if they are computed."""
    kinds = {stored.type for stored in parts}
    return parts[0].type if len(kinds) == 1 and each.values is None else "F32"


def meta_shape(stored: StoredTensor) -> tuple[int, ...]:
    if stored.type in NUMBERS:
        return stored.shape
    format = BLOCK_TYPES[stored.type]
    return (*stored.shape[:-1], stored.shape[-1] // format.numbers * format.bytes)


def dtype_of(stored: StoredTensor) -> torch.dtype:
    return NUMBERS.get(stored.type, torch.uint8)


def moves_blocks(inputs: Tensor, numbers: int) -> bool:
    """Return whether another order of inputs is one of whole blocks."""
    if len(inputs) % numbers:
        return False
    blocks = inputs.view(-1, numbers)
    return bool((blocks[:, :1] % numbers == 0).all() and (blocks == blocks[:, :1] + torch.arange(numbers)).all())


def combined(each: Derived, pieces: list[Tensor], parts: list[StoredTensor]) -> Tensor:
    """Return a tensor of the model from those of the file."""
    try:
        kind = type_of(each, parts)
        if kind not in BLOCK_TYPES:
            pieces = [plain(piece, stored) if stored.type != kind else piece for piece, stored in zip(pieces, parts)]
        pieces = [rows_of(piece, part.start, part.end, each.dim) for piece, part in zip(pieces, each.parts)]
        if each.values is not None:
            found = each.values(*pieces)
        else:
            found = pieces[0] if len(pieces) == 1 else torch.cat(pieces, each.dim)
        if each.order is not None:
            if len(each.order) != found.shape[each.dim]:
                raise ValueError(f"{found.shape[each.dim]} rows, expected {len(each.order)}")
            found = found if found.is_meta else found.index_select(each.dim, each.order)
        if each.inputs is not None:
            found = with_inputs(found, each.inputs, kind)
        if each.shape is not None:
            found = found.reshape(each.shape(tuple(found.shape)))
        return found.transpose(-1, -2) if each.by_input and kind not in BLOCK_TYPES else found
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        name = parts[0].name
        reason = str(error).splitlines()[0][:200]
        raise ModelError(f"{parts[0].file}: tensor {shown(name)} has a shape that does not fit: {reason}") from error


def rows_of(piece: Tensor, start: int, end: int | None, dim: int) -> Tensor:
    return piece if (start, end) == (0, None) else piece.narrow(dim, start, (end or 0) - start)


def plain(piece: Tensor, stored: StoredTensor) -> Tensor:
    if stored.type in NUMBERS:
        return piece.float()
    if piece.is_meta:
        return torch.empty(stored.shape, device="meta")
    format = BLOCK_TYPES[stored.type]
    return format.of(piece).decode()


def with_inputs(found: Tensor, inputs: Tensor, kind: str) -> Tensor:
    """Put inputs into another order, where blocks allow it."""
    format = BLOCK_TYPES.get(kind)
    count = found.shape[-1] if format is None else found.shape[-1] // format.bytes * format.numbers
    if count != len(inputs):
        raise ValueError(f"{count} inputs, expected {len(inputs)}")
    if found.is_meta or (format is not None and not moves_blocks(inputs, format.numbers)):
        return found
    if format is None:
        return found.index_select(-1, inputs)
    blocks: Tensor = found.unflatten(-1, (-1, format.bytes))
    return blocks.index_select(-2, inputs[:: format.numbers] // format.numbers).flatten(-2)
