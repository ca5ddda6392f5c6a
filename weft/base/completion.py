"""A plan completed with what the step before it decided.

At depth 1 a row is planned while drafts of its sequence are in flight. The plan is made for the case that all of them
are right, and some of its tokens may be only on the device. `complete` returns the plan as it would have been made
after the landing: it defines what devices do.

    the flight before   certain  draft  draft  draft          one is right: two of three are refused
    planned                                           start   drafts ...
    moved by 2                          start   drafts ...
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.base.plan import NO_INTS, NO_TABLE, Floats, Ints, Plan

NO_NUMBERS = np.zeros((0, 0), np.float32)


def add_masks(plan: Plan, masks: Ints) -> Plan:
    """Return the plan with the masks of the samples that waited for them."""
    return replace(plan, sampling=plan.sampling.with_masks(masks))


def complete(plan: Plan, refused: Ints, cell: int, on_device: Ints | None = None) -> Plan:
    """Return the plan as it would have been made if the step before it had landed.

    `refused` [rows] drafts in flight were wrong; those of rows with none are ignored. `on_device` [rows, most] are the
    tokens that follow those the host knows, for rows that need some; without it, they stay on the device.
    """
    if plan.drafts.may_move:
        plan = _moved(plan, refused, cell)
    if on_device is not None and len(plan.drafts.on_device):
        plan = _with_tokens(plan, refused, on_device)
    return plan


def _moved(plan: Plan, refused: Ints, cell: int) -> Plan:
    """Return the plan whose rows start where right drafts end. Pages reach as far as those of the given plan."""
    moved = np.where(plan.drafts.unverified_before > 0, refused, 0).astype(np.int32)
    start, end = plan.start - moved, plan.end - moved
    captures, row = plan.captures, plan.captures.row
    written = (captures.position > start[row]) & (captures.position <= end[row])
    return replace(
        plan,
        start=start,
        end=end,
        tokens=_moved_tokens(plan, moved),
        read_slot=np.where(start // cell < plan.start // cell, plan.drafts.earlier_slot, plan.read_slot),
        captures=captures.of(written),
        sampling=replace(plan.sampling, uniform=_moved_numbers(plan, moved), earlier_uniform=NO_NUMBERS),
        drafts=replace(plan.drafts, unverified_before=NO_INTS, earlier_slot=NO_INTS, earlier_tokens=NO_TABLE),
    )


def _with_tokens(plan: Plan, refused: Ints, on_device: Ints) -> Plan:
    """Return the plan with the tokens of the device. Rows of a head end earlier by what was refused inside them."""
    inside = plan.drafts.unverified_inside
    cut = np.where(inside > 0, refused, 0) if len(inside) else np.zeros(plan.rows, np.int32)
    lengths = plan.end - plan.start
    ends, tokens = np.cumsum(lengths), []
    for row, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        count = int(plan.drafts.on_device[row])
        tokens += [plan.tokens[end - length : end - count], on_device[row, : count - int(cut[row])]]
    packed = np.concatenate(tokens).astype(np.int32)
    drafts = replace(plan.drafts, on_device=NO_INTS, unverified_inside=NO_INTS)
    return replace(plan, end=plan.end - cut.astype(np.int32), tokens=packed, drafts=drafts)


def _moved_tokens(plan: Plan, moved: Ints) -> Ints:
    """Return the tokens of all rows. The drafts of a row move, its first token comes from the board."""
    if not len(plan.drafts.counts):
        return plan.tokens
    tokens = plan.tokens.copy()
    first = np.cumsum(plan.end - plan.start) - (plan.end - plan.start)
    for row in np.flatnonzero(moved).tolist():
        own = slice(first[row] + 1, first[row] + 1 + plan.drafts.counts[row])
        drafts = np.concatenate([plan.drafts.earlier_tokens[row], plan.tokens[own]])
        begin = plan.drafts.earlier_tokens.shape[1] - moved[row]
        tokens[own] = drafts[begin : begin + plan.drafts.counts[row]]
    return tokens


def _moved_numbers(plan: Plan, moved: Ints) -> Floats:
    """Return the random numbers of all samples: a sample's index in the answer moves with its row."""
    numbers, early = plan.sampling.uniform, plan.sampling.earlier_uniform
    if not len(early):
        return numbers
    places = moved[plan.samples[0]]
    found: Floats = np.concatenate([numbers[:, None], early], axis=1)[np.arange(len(numbers)), places]
    return found
