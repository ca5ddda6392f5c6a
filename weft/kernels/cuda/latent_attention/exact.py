"""Latent attention whose bits do not depend on a step's other rows.

A decode always has the same number of shares, cut by its own position; blocks of prompts have one. The matmuls by head
around it, which a library computes by a method that depends on rows, are sums over the inputs in their order.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import LatentInputs
from weft.kernels.cuda.latent_attention import attend_lines, write_latents
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed

# Shares of a decode. Not measured: a compromise between one long row and the memory for the parts of many.
SHARES = 8
# Outputs and inputs of a tile, and its rows for few tokens and for many. They change no bit.
OUTPUTS, INPUTS, FEW_ROWS, MANY_ROWS = 64, 64, 16, 64


def attend_latents(
    inputs: LatentInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    queries, latents, weights, scale = inputs.queries, inputs.latents, inputs.weights, inputs.scale
    write_latents(latents, inputs.shared, batch, view)
    key_dim = weights.keys.shape[1]
    own = multiply_by_head(queries[..., :key_dim], weights.keys.transpose(1, 2))
    absorbed = torch.cat([own, queries[..., key_dim:]], -1)
    mixed = torch.empty(*queries.shape[:2], latents.shape[1], dtype=queries.dtype, device=queries.device)
    if batch.decodes:
        attend_lines(absorbed, mixed, batch, view, scale, of_decodes=True, shares=SHARES)
    if batch.pieces:
        attend_lines(absorbed, mixed, batch, view, scale, of_decodes=False, shares=1)
    return placed(multiply_by_head(mixed, weights.values).flatten(1), out)


def multiply_by_head(
    x: Float[Tensor, "tokens heads inputs"], matrices: Float[Tensor, "heads outputs inputs"]
) -> Float[Tensor, "tokens heads outputs"]:
    """Return the matmul of every head with its own matrix. Both may be strided."""
    (tokens, heads, inputs), outputs = x.shape, matrices.shape[1]
    y = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    rows = FEW_ROWS if tokens <= FEW_ROWS else MANY_ROWS
    if tokens:
        by_head_kernel[(-(-tokens // rows), -(-outputs // OUTPUTS), heads)](
            named(
                x=x, x_token=x.stride(0), x_head=x.stride(1), x_input=x.stride(2), matrices=matrices,
                matrix_head=matrices.stride(0), matrix_output=matrices.stride(1), matrix_input=matrices.stride(2), y=y,
                tokens=tokens,
            ),
            COUNT=outputs, SIZE=inputs, ROWS=rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3, **early(x),
        )  # fmt: skip
    return y


@jit(do_not_specialize=["tokens"])
def by_head_kernel(
    x, x_token, x_head, x_input, matrices, matrix_head, matrix_output, matrix_input, y, tokens,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, tile of outputs, head)."""
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = (token < tokens)[:, None], (output < COUNT)[:, None]
    values = x + head * x_head + token.to(tl.int64)[:, None] * x_token
    weights = matrices + head * matrix_head + output[:, None] * matrix_output
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    wait(EARLY)
    for first in range(0, SIZE, INPUTS):
        column = first + tl.arange(0, INPUTS)[None, :]
        value = tl.load(values + column * x_input, mask=is_token & (column < SIZE), other=0.0)
        weight = tl.load(weights + column * matrix_input, mask=is_output & (column < SIZE), other=0.0)
        total = tl.dot(value, tl.trans(weight), total, input_precision=PRECISION)
    heads = tl.num_programs(2)
    target = y + (token.to(tl.int64)[:, None] * heads + head) * COUNT + output[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=is_token & (output < COUNT)[None, :])
