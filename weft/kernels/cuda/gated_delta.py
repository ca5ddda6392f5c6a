"""The gated delta rule on `Batch.lanes`: launches of its kernels, in shapes that were measured to be the fastest.

Rows of one token are decoded; the others are cut at the grid, solved piece by piece in parallel and walked in sequence.
Products take operands in the model's dtype; sums, decays and states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.gated_delta_cells import solve_cells
from weft.kernels.cuda.gated_delta_decode import decode_rows, weigh_tails
from weft.kernels.cuda.gated_delta_walk import walk_cells
from weft.kernels.cuda.launching import MULTIPROCESSORS, power_of_two
from weft.kernels.cuda.overlap import early
from weft.kernels.lanes import Lanes
from weft.memory.device.store import RecurrentView


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer brings. Without `rates` and `bias`, step is the log decay and strength the rate of correction."""

    q: Float[Tensor, "tokens key_heads key_dim"]
    k: Float[Tensor, "tokens key_heads key_dim"]
    v: Float[Tensor, "tokens value_heads value_dim"]
    step: Float[Tensor, "tokens value_heads"]
    strength: Float[Tensor, "tokens value_heads"]
    rates: Float[Tensor, " value_heads"] | None = None
    bias: Float[Tensor, " value_heads"] | None = None
    most: float = 1.0  # what the sigmoid of a strength is multiplied by


class Choice(NamedTuple):
    """How a kernel is cut and run."""

    values: int  # columns of a state that a program holds
    warps: int
    stages: int  # of loads that are under way
    registers: int | None = None  # at most, of a thread


class Weighing(NamedTuple):
    chunk: int  # tokens of a tail that are weighed at a time
    warps: int


DECODE = Choice(32, 1, 1)
# For few rows the shortest way through a program counts, and that it starts early. For many it is how many programs
# there are beside each other, and those that start early stand in the way of the kernel that they wait for. Sums over
# keys are added in another order then.
FEW_ROWS, WEIGH_FEW, WEIGH_MANY = 32, Weighing(64, 4), Weighing(16, 1)
SOLVE = Choice(0, 4, 1, registers=128)
# Programs beside each other on a multiprocessor; or, if there are not enough, more loads under way in each. What they
# compute is the same to the bit.
WALK, WALK_FEW = Choice(32, 4, 2), Choice(32, 4, 3)
WIDE_KEYS = 128
# Products of float32 operands need more registers and shared memory.
SOLVE_WIDE, WALK_WIDE = Choice(0, 8, 1), Choice(32, 8, 1)


def gated_delta_lanes(inputs: Inputs, lanes: Lanes, view: RecurrentView) -> Float[Tensor, "tokens value_heads dim"]:
    """Outputs of all rows; tails and asked-for states are written as the reference does."""
    check(inputs, view)
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    if lanes.decodes:
        launch_decode(inputs, lanes, view, y, DECODE)
    if lanes.rows > lanes.decodes:
        launch_extend(inputs, lanes, view, y, *extend_choices(inputs, lanes))
    return y


def check(inputs: Inputs, view: RecurrentView) -> None:
    """What the kernels take for granted."""
    q, k, v = inputs.q, inputs.k, inputs.v
    assert q.stride() == k.stride() == (k.stride(0), k.shape[2], 1)
    assert v.stride() == (v.stride(0), v.shape[2], 1)
    assert inputs.step.stride() == inputs.strength.stride() == (inputs.step.stride(0), 1)
    assert q.dtype == k.dtype == v.dtype == view.tail["k"].dtype == view.tail["u"].dtype


def padded(size: int) -> int:
    """Tiles of matrix products have sides of powers of two from 16 on."""
    return max(16, power_of_two(size))


def dimensions(inputs: Inputs, lanes: Lanes, view: RecurrentView) -> dict[str, object]:
    """Compile-time parameters that all kernels share."""
    key_heads, key_dim = inputs.k.shape[1:]
    return {
        "CELL": lanes.cell,
        "RING": view.tail["u"].shape[1],
        "KEY_HEADS": key_heads,
        "SHARED": inputs.v.shape[1] // key_heads,
        "KEY_DIM": key_dim,
        "BLOCK": padded(lanes.cell),
        "KEYS": padded(key_dim),
    }


def precision(inputs: Inputs) -> str:
    """Float32 in three products of the tensor cores: as exact as need be, and far faster than without them."""
    return "tf32x3" if inputs.v.dtype == torch.float32 else "tf32"


def launch_decode(inputs: Inputs, lanes: Lanes, view: RecurrentView, y: Tensor, choice: Choice) -> None:
    rows, (heads, value_dim), key_heads = lanes.decodes, inputs.v.shape[1:], inputs.k.shape[1]
    shared, tail, state = dimensions(inputs, lanes, view), view.tail, view.state["delta"]
    lookups = inputs.v.new_empty(rows, key_heads, 2, shared["KEYS"], dtype=torch.float32)
    weights = inputs.v.new_empty(rows, heads, 2, shared["BLOCK"], dtype=torch.float32)
    factors = inputs.v.new_empty(rows, heads, 4, dtype=torch.float32)
    weighing, overlap = WEIGH_FEW if rows <= FEW_ROWS else WEIGH_MANY, early(inputs.v, rows <= FEW_ROWS)
    weigh_tails[(key_heads, rows)](
        inputs.q, inputs.k, inputs.q.stride(0), inputs.step, inputs.strength, inputs.step.stride(0),
        inputs.rates, inputs.bias, tail["k"], tail["k"].stride(0), tail["decay"], tail["decay"].stride(0),
        lanes.start, lanes.tail, lookups, weights, factors,
        **shared, HEADS=power_of_two(heads // key_heads), CHUNK=min(weighing.chunk, shared["BLOCK"]),
        PROJECTED=inputs.rates is not None, MOST=inputs.most, num_warps=weighing.warps, **overlap,
    )  # fmt: skip
    values = min(choice.values, padded(value_dim))
    decode_rows[(-(-value_dim // values), heads, rows)](
        inputs.v, inputs.v.stride(0), lookups, weights, factors, y,
        tail["k"], tail["k"].stride(0), tail["u"], tail["u"].stride(0), tail["decay"], tail["decay"].stride(0),
        state, state.stride(0), lanes.start, lanes.slot, lanes.tail, lanes.closing,
        **shared, VALUE_DIM=value_dim, VALUES=values, PRECISION=precision(inputs),
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers, **overlap,
    )  # fmt: skip


def extend_choices(inputs: Inputs, lanes: Lanes) -> tuple[Choice, Choice]:
    if inputs.v.dtype == torch.float32:
        return SOLVE_WIDE, WALK_WIDE
    heads, value_dim = inputs.v.shape[1:]
    programs = (lanes.rows - lanes.decodes) * heads * -(-value_dim // WALK.values)
    # Three loads of wider keys do not fit into the shared memory of a multiprocessor.
    is_wide = inputs.k.shape[2] > WIDE_KEYS
    return SOLVE, WALK if is_wide or programs > MULTIPROCESSORS else WALK_FEW


def launch_extend(inputs: Inputs, lanes: Lanes, view: RecurrentView, y: Tensor, solve: Choice, walk: Choice) -> None:
    heads, value_dim = inputs.v.shape[1:]
    key_heads, key_dim = inputs.k.shape[1:]
    long_rows = lanes.rows - lanes.decodes
    shared = dimensions(inputs, lanes, view)
    block = shared["BLOCK"]
    systems = inputs.v.new_empty(lanes.pieces, heads, 2, block, block)
    scales = inputs.v.new_empty(lanes.pieces, heads, 5, block, dtype=torch.float32)
    head_keys = inputs.k.new_empty(long_rows, key_heads, block, key_dim)
    tail, state = view.tail, view.state["delta"]
    solve_cells[(heads, lanes.pieces)](
        inputs.q, inputs.k, inputs.q.stride(0), inputs.step, inputs.strength, inputs.step.stride(0),
        inputs.rates, inputs.bias, tail["k"], tail["k"].stride(0), tail["decay"], tail["decay"].stride(0),
        lanes.start, lanes.first, lanes.tail, lanes.piece_row, lanes.piece_position,
        systems, scales, head_keys, lanes.decodes,
        **shared, PROJECTED=inputs.rates is not None, MOST=inputs.most, PRECISION=precision(inputs),
        INNER=tl.float32 if inputs.v.dtype == torch.float32 else tl.float16,
        num_warps=solve.warps, num_stages=solve.stages, maxnreg=solve.registers,
    )  # fmt: skip
    # Where both are cut from one tensor that is a small number; where not, it holds all the same.
    q_offset = (inputs.q.data_ptr() - inputs.k.data_ptr()) // inputs.k.element_size()
    values = min(walk.values, padded(value_dim))
    walk_cells[(-(-value_dim // values), heads, long_rows)](
        inputs.k, q_offset, inputs.k.stride(0), inputs.v, inputs.v.stride(0), y, systems, scales, head_keys,
        tail["k"], tail["k"].stride(0), tail["u"], tail["u"].stride(0), tail["decay"], tail["decay"].stride(0),
        state, state.stride(0), lanes.start, lanes.first, lanes.slot, lanes.tail,
        lanes.first_piece, lanes.piece_slot, lanes.decodes,
        **shared, VALUE_DIM=value_dim, VALUES=values, STAGES=walk.stages, PRECISION=precision(inputs),
        num_warps=walk.warps, maxnreg=walk.registers,
    )  # fmt: skip
