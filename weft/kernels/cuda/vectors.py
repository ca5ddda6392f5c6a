"""Matrices times a vector, for kernels that read every weight once: all loads of a program are under way together.

A program takes some rows of a matrix. Threads lie along the columns, so nobody passes the vector on, and what they have
found is added up across them once, at the end. The vector may be a norm that is still to be computed (`LazyNorm`):
then every program does that for itself, while its weights are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.stream import LazyNorm

# Loads of 16 bytes that a thread has under way at once, at most: more of them take more registers than there are.
LOADS = 20


@dataclass(frozen=True, slots=True)
class Vectors:
    """Blocks of products with a vector: so many rows of a matrix at once, and all their columns."""

    rows: int
    warps: int

    @property
    def columns(self) -> int:
        """Of a piece: 8 for every thread."""
        return self.warps * 256

    def pieces(self, size: int) -> int:
        """Of a row."""
        return -(-size // self.columns)

    def at_once(self, element_size: int) -> int:
        """Pieces of these rows that fit into so many loads of 16 bytes.

        >>> Vectors(2, 4).at_once(2), Vectors(1, 4).at_once(4)
        (10, 10)
        """
        return max(1, LOADS * 2 // (self.rows * element_size))


def operands(x: Tensor | LazyNorm) -> tuple[Any, ...]:
    """As kernels take them: x and, for `normed`, its scale, eps, change and factor, and where to leave sum and norm."""
    if not isinstance(x, LazyNorm):
        return x, None, 0.0, None, 0.0, None, None
    assert x.x.stride(1) == 1
    value, factor = (None, 0.0) if x.change is None else (x.change.value, x.change.factor)
    assert value is None or value.stride(1) == 1
    return x.x, x.weight, x.eps, value, factor, *x.leave()


@triton.jit
def hold():
    """Between loads of weights and of what they are multiplied with, so that all of the former are under way at once.

    Else the compiler moves each load down to where it is needed, to save registers.
    """
    tl.debug_barrier()


@triton.jit
def piece(vector, number: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(vector + column, mask=column < SIZE, other=0.0)


@triton.jit
def tile(
    matrix, row, real_row, number: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr = True
):  # fmt: skip
    """`ONCE`: no other program reads these weights, so they may leave the caches before what is read again."""
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    real = real_row[:, None] & (column < SIZE)[None, :]
    place = matrix + (row[:, None] * SIZE + column[None, :])
    return tl.load(place, mask=real, other=0.0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def pieces(vector, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """All of a vector, in pieces of so many columns: read at once."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (piece(vector, number, SIZE, COLUMNS),)
    return found


@triton.jit
def tiles(matrix, row, real_row, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr = True):
    """Rows of a matrix, in pieces of so many columns: read at once."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (tile(matrix, row, real_row, number, SIZE, COLUMNS, ONCE),)
    return found


@triton.jit
def normed(x, scales, eps, change, factor, total, norm, is_first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The norm of x with a change, if there is one, in such pieces; `scales` are those of its weights.

    Rounded where the norm by itself is. The first program leaves sum and norm for whoever reads on.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    values, squares = (), tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        value = piece(x, number, SIZE, COLUMNS).to(tl.float32)
        if change is not None:
            value += piece(change, number, SIZE, COLUMNS).to(tl.float32) * factor
            value = value.to(dtype).to(tl.float32)
        values += (value,)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        value = (values[number] * inverse * scales[number].to(tl.float32)).to(dtype)
        column = number * COLUMNS + tl.arange(0, COLUMNS)
        real = (column < SIZE) & is_first
        tl.store(total + column, values[number].to(dtype), mask=real)
        tl.store(norm + column, value, mask=real)
        found += (value,)
    return found


@triton.jit
def add_products(total, tiles, values, factor, SIZE: tl.constexpr):
    """Columns are added up in their places; the sum across them is left to the end."""
    for i in tl.static_range((SIZE + total.shape[1] - 1) // total.shape[1]):
        total += tiles[i].to(tl.float32) * (values[i].to(tl.float32) * factor)[None, :]
    return total
