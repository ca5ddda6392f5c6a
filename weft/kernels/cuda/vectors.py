"""Matrices times a vector, for kernels that read every weight once: all loads of a program are under way together.

A program takes some rows of a matrix. Threads lie along the columns, so nobody passes the vector on, and what they have
found is added up across them once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

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
def tile(matrix, row, real_row, number: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    real = real_row[:, None] & (column < SIZE)[None, :]
    return tl.load(matrix + (row[:, None] * SIZE + column[None, :]), mask=real, other=0.0)


@triton.jit
def pieces(vector, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """All of a vector, in pieces of so many columns: read at once."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (piece(vector, number, SIZE, COLUMNS),)
    return found


@triton.jit
def tiles(matrix, row, real_row, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a matrix, in pieces of so many columns: read at once."""
    found = ()
    for number in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        found += (tile(matrix, row, real_row, number, SIZE, COLUMNS),)
    return found


@triton.jit
def add_products(total, tiles, values, factor, SIZE: tl.constexpr):
    """Columns are added up in their places; the sum across them is left to the end."""
    for i in tl.static_range((SIZE + total.shape[1] - 1) // total.shape[1]):
        total += tiles[i].to(tl.float32) * (values[i].to(tl.float32) * factor)[None, :]
    return total
