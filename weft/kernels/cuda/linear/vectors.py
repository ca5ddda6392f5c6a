"""Matrix-vector products, for kernels that read every weight once: all loads of a program are in flight together.

A program takes some rows of a matrix. Threads lie along the columns, so they need not exchange the vector, and their
results are summed across threads once, at the end. The vector may be a norm that is not computed yet
(`stream.LazyNorm`): then every program computes it, while its weights load.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launch.launching import Arguments, named
from weft.kernels.cuda.norm import LazyNorm

# Maximum number of 16-byte loads in flight per thread: more need too many registers.
LOADS = 20


@dataclass(frozen=True, slots=True)
class Vectors:
    """Block sizes of matrix-vector products: `rows` rows of a matrix at once, and all their columns."""

    rows: int
    warps: int

    @property
    def columns(self) -> int:
        """Return the columns of a piece: 8 per thread."""
        return self.warps * 256

    def pieces(self, size: int) -> int:
        """Return the number of pieces of a row."""
        return -(-size // self.columns)

    def at_once(self, element_size: int) -> int:
        """Return the number of pieces of these rows that fit in LOADS loads of 16 bytes.

        >>> Vectors(2, 4).at_once(2), Vectors(1, 4).at_once(4)
        (10, 10)
        """
        return max(1, LOADS * 2 // (self.rows * element_size))


def operands(x: Tensor | LazyNorm) -> tuple[Tensor, Arguments]:
    """Return x as a tensor, and its group of arguments; those after the first are for `normed`."""
    if not isinstance(x, LazyNorm):
        return x, named(x=x, scale=None, eps=0.0, change=None, factor=0.0, stream=None, norm=None)
    assert x.x.stride(1) == 1
    value, factor = (None, 0.0) if x.change is None else (x.change.value, x.change.factor)
    assert value is None or value.stride(1) == 1
    stream, norm = x.leave()
    return x.x, named(
        x=x.x, scale=x.weight, eps=x.eps, change=value, factor=factor, stream=stream, norm=norm
    )  # fmt: skip


@triton.jit
def hold():
    """Separate the loads of weights from those of the vector, so that all of the former are in flight at once.

    Otherwise the compiler moves each load down to where it is needed, to save registers.
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
    """Load a tile. `ONCE`: no other program reads these weights, so caches may evict them first."""
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    real = real_row[:, None] & (column < SIZE)[None, :]
    place = matrix + (row[:, None] * SIZE + column[None, :])
    return tl.load(place, mask=real, other=0.0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def pieces(vector, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Load all of a vector at once, in pieces of COLUMNS columns."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (piece(vector, number, SIZE, COLUMNS),)
    return found


@triton.jit
def tiles(matrix, row, real_row, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr = True):
    """Load rows of a matrix at once, in pieces of COLUMNS columns."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (tile(matrix, row, real_row, number, SIZE, COLUMNS, ONCE),)
    return found


@triton.jit
def normed(x, scales, eps, change, factor, total, norm, is_first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the norm of x plus its change, if any, in such pieces; `scales` are those of its weights.

    Round where a separate norm would. The first program stores sum and norm for later readers.
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
    """Add products column by column; the sum across columns is left to the end."""
    for i in tl.static_range((SIZE + total.shape[1] - 1) // total.shape[1]):
        total += tiles[i].to(tl.float32) * (values[i].to(tl.float32) * factor)[None, :]
    return total
