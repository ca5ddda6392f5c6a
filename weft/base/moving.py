"""Rows that start earlier than their plan says, because drafts in the flight before it were wrong.

At depth 1 a row is planned while drafts of its sequence are in flight. The plan is made for the case that all of them
are right. `move_rows` returns the plan as it would have been made for any other case: it defines what devices do.

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


def move_rows(plan: Plan, refused: Ints, cell: int) -> Plan:
    """Return the plan whose rows start `refused` [rows] positions earlier; those of rows with none behind are ignored.

    Pages reach as far as those of the given plan.
    """
    if not plan.drafts.may_move:
        return plan
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


def read_guesses(plan: Plan, refused: Ints, guesses: Ints) -> Plan:
    """Return the plan with the tokens that are only on the device: the first ones of its rows' lines [rows, most].

    Rows of a head end `refused` [rows] positions earlier if they have a token for every draft in flight.
    """
    drafts = plan.drafts
    if not len(drafts.on_device):
        return plan
    inside = drafts.unverified_inside
    cut = np.where(inside > 0, refused, 0) if len(inside) else np.zeros(plan.rows, np.int32)
    lengths = plan.end - plan.start
    ends, tokens = np.cumsum(lengths), []
    for row, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        count = int(drafts.on_device[row])
        known = plan.tokens[end - length : end - count]
        tokens += [known, guesses[row, : count - int(cut[row])]]
    packed = np.concatenate(tokens).astype(np.int32)
    drafts = replace(drafts, on_device=NO_INTS, unverified_inside=NO_INTS)
    return replace(plan, end=plan.end - cut.astype(np.int32), tokens=packed, drafts=drafts)


def _moved_tokens(plan: Plan, moved: Ints) -> Ints:
    """Return the tokens of all rows. The guesses of a row move, its first token comes from the board."""
    if not len(plan.drafts.counts):
        return plan.tokens
    tokens = plan.tokens.copy()
    first = np.cumsum(plan.end - plan.start) - (plan.end - plan.start)
    for row in np.flatnonzero(moved).tolist():
        drafts = slice(first[row] + 1, first[row] + 1 + plan.drafts.counts[row])
        guesses = np.concatenate([plan.drafts.earlier_tokens[row], plan.tokens[drafts]])
        begin = plan.drafts.earlier_tokens.shape[1] - moved[row]
        tokens[drafts] = guesses[begin : begin + plan.drafts.counts[row]]
    return tokens


def _moved_numbers(plan: Plan, moved: Ints) -> Floats:
    """Return the random numbers of all samples: a sample's index in the answer moves with its row."""
    numbers, early = plan.sampling.uniform, plan.sampling.earlier_uniform
    if not len(early):
        return numbers
    places = moved[plan.samples[0]]
    found: Floats = np.concatenate([numbers[:, None], early], axis=1)[np.arange(len(numbers)), places]
    return found
