"""Paged attention for decodes that begin with the same pages (`Batch.shared`): those are read once per group.

The kernels of `attention_decode` compute it in two passes. The first reads each shared prefix for a group of rows, as
if they were tokens of one row that all see the whole of it, and leaves outputs and sums in float32. The second reads
the rows' own pages, and begins the softmax of each row with what the first has left. Sinks are added by the second.

Bytes read per layer by 128 rows of LFM2-1.2B, 8 prompts of 2,048 tokens with 16 questions of 64 tokens each:

    every row on its own      128 x (32 + 2) cells of 128 KiB     570 MB
    shared prefixes           (8 x 32 + 128 x 2) cells             67 MB
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm
from weft.kernels.cuda.attention.decode import (
    MOST_LINES,
    MOST_QUERIES,
    DecodeLaunch,
    DecodeSharing,
    Prefix,
    attend_rows,
)
from weft.kernels.cuda.launch.launching import power_of_two
from weft.kernels.interface import Batch, PageList, PageSections, SharedPrefixes

# Maximum members of a group that read a shared prefix together. Larger groups are cut, and read it again.
MOST_MEMBERS = 16


def attend_shared(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sharing: DecodeSharing | None = None,
    launch: DecodeLaunch | None = None,
) -> None:
    """Attend for the leading `batch.decodes` tokens of `q` [tokens, heads, head_dim] into those of `out`."""
    shared = batch.shared
    assert shared is not None
    groups, own = passes_of(batch, shared)
    tokens, heads, head_dim = q.shape
    left = torch.empty(tokens * heads * (head_dim + 1), dtype=torch.float32, device=q.device)
    mixed, sums = left[: q.numel()].view(q.shape), left[q.numel() :]
    given = view, scale, softcap
    how = sharing, launch
    prefix = Prefix(shared.prefix, mixed, sums, shared.order)
    attend_rows(q, mixed, groups, *given, None, groups.rows, shared.members, *how, prefix)
    prefix = Prefix(shared.own, mixed, sums, None)
    attend_rows(q, out, own, *given, sinks, batch.decodes, 1, *how, prefix)


def passes_of(batch: Batch, shared: SharedPrefixes) -> tuple[Batch, Batch]:
    """Return the step whose rows are groups, and the step whose rows read their own pages."""
    found: tuple[Batch, Batch] | None = batch.derived.get("passes")
    if found is None:
        assert batch.full is not None
        own = replace(batch, full=sectioned(batch.full, shared.own), derived={})
        groups = replace(
            batch, rows=len(shared.start), decodes=0, longest=shared.members, start=shared.start, first=shared.first,
            full=sectioned(batch.full, shared.prefix), derived={},
        )  # fmt: skip
        found = batch.derived["passes"] = groups, own
    return found


def sectioned(listed: PageList, sections: PageSections) -> PageList:
    return replace(listed, first_position=sections.first_position, bounds=sections.bounds)


def prefix_members(form: AttentionForm, dtype: torch.dtype) -> int:
    """Return how many decodes read a shared prefix together: they have at most as many lines as a row with drafts.

    >>> [prefix_members(AttentionForm(heads, 8, 64, 1.0), torch.bfloat16) for heads in (8, 32, 48, 256, 512)]
    [16, 16, 8, 2, 1]
    """
    members, group = MOST_MEMBERS, form.heads // form.kv_heads
    line_bytes = power_of_two(form.head_dim) * dtype.itemsize
    while members > 1 and power_of_two(members * group) > min(MOST_LINES, MOST_QUERIES // line_bytes):
        members //= 2
    return members
