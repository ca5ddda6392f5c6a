"""Paged attention whose bits do not depend on a step's other rows: a query's position alone decides how it is computed.

Tokens of prompts are attended by `attention_prefill`, cell by cell from the first, and its programs never share a
query's cells. FlashInfer is not used: whether it is worth its plan depends on the step. Decodes have a kernel of
their own (`exact_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.cuda.activation import gated_product
from weft.kernels.cuda.attention.exact_decode import attend_decodes
from weft.kernels.cuda.attention.prefill import ALONE, attend_pieces
from weft.kernels.cuda.rotary import DECODE_TILE, rotate_and_write
from weft.kernels.interface import Batch


def attend(
    inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    """Norm, rotate and write the pages in one kernel; read them in others; gate last."""
    form = inputs.form
    heads = inputs.projected.unflatten(-1, (-1, form.head_dim))
    q = rotate_and_write(heads, form.heads, inputs.norm, form.norm_eps, inputs.rotation, batch, view, DECODE_TILE)
    by_head = None if out is None or form.gated else out.unflatten(-1, (-1, form.head_dim))
    mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device) if by_head is None else by_head
    assert mixed.stride()[1:] == (q.shape[2], 1)
    if batch.decodes:
        attend_decodes(q, mixed, batch, view, form.scale, form.softcap, inputs.sinks)
    if batch.pieces:
        attend_pieces(q, mixed, batch, view, form.scale, form.softcap, inputs.sinks, sharing=ALONE)
    if not form.gated:
        return mixed.flatten(-2)
    gate = heads[:, form.heads + 2 * form.kv_heads :].flatten(-2)
    return gated_product(gate, mixed.flatten(-2), torch.sigmoid, out)


def warm_attention(forms: Sequence[AttentionForm], dtype: torch.dtype) -> None:
    """Do nothing: there is no library to compile for."""


def prefix_members(form: AttentionForm, dtype: torch.dtype) -> int:
    """Return 1: bits must not depend on which rows share a prefix."""
    return 1
