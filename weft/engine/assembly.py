"""Turns the rows that the planner chose into a frozen plan, by gathering from the ledger's arrays."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.base.grid import floor_to_grid
from weft.base.plan import NO_DRAFTS, NO_INTS, Ints, Plan, StepDrafts
from weft.drafting.policy.choosing import RowDrafts
from weft.engine.seat_sampling import NO_DRAFTS_BEFORE, DraftsBefore, SeatSampling
from weft.engine.sequence import Sequence
from weft.memory.lease import Grant
from weft.memory.ledger import Ledger
from weft.memory.plans import build_plan


@dataclass(slots=True)
class StepBuilder:
    """A step under construction. Decodes are arrays of seats; prefill rows are added one by one."""

    decode_seats: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    decode_starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    prefills: list[tuple[Sequence, int, int, bool]] = field(default_factory=list)  # start, end, samples
    grants: dict[int, Grant] = field(default_factory=dict)  # by seat
    # By seat: decodes with drafts, which are the last rows of the step, and where they start.
    drafts: dict[int, RowDrafts] = field(default_factory=dict)
    draft_starts: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    # Seats that depend, through a grammar, on a token in flight.
    awaiting_mask: frozenset[int] = frozenset()
    # By seat: inputs of decodes that the host knows and the board does not have.
    inputs: dict[int, int] = field(default_factory=dict)
    # By seat: rows with drafts whose first token is in flight, and the drafts in flight before it.
    following: dict[int, int] = field(default_factory=dict)

    def carry(self, seat: int) -> bool:
        """Return whether the sequence on this seat is already part of the step."""
        return seat in self.grants or seat in self.drafts or seat in self.decode_seats

    @property
    def tokens(self) -> int:
        prompts = sum(end - start for _, start, end, _ in self.prefills) if self.prefills else 0
        return len(self.decode_seats) + prompts + len(self.drafts) + self.draft_tokens


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the sequences of its rows: what settling needs, recorded when the plan was made."""

    plan: Plan
    sequences: list[Sequence]  # by row
    grants: dict[int, Grant]  # by row
    plain_rows: NDArray[np.int64]  # rows without a grant
    prompt_rows: range  # rows that compute tokens of prompts
    scored: tuple[tuple[Sequence, int], ...]  # sequences with scored prompt tokens, and how many, in order
    vectors: tuple[tuple[Sequence, int], ...]  # sequences with vectors, and how many, in order
    drafts: dict[int, RowDrafts] = field(default_factory=dict)  # by row
    # Rows that turned out to lie beyond the end of their sequence: nothing that they computed counts.
    void: frozenset[int] = frozenset()


def assemble(
    number: int, rows: StepBuilder, by_seat: list[Sequence | None], ledger: Ledger, choices: SeatSampling
) -> PlannedStep:
    # Rows of one token come first, whatever they are; rows with drafts come last.
    prefills = sorted(rows.prefills, key=lambda p: p[2] - p[1] > 1)
    decodes, others = len(rows.decode_seats), len(rows.decode_seats) + len(prefills)
    counts = [len(row_drafts.tokens) for row_drafts in rows.drafts.values()]
    seats = _joined(rows.decode_seats, [p[0].seat for p in prefills], list(rows.drafts))
    start = _joined(rows.decode_starts, [p[1] for p in prefills], rows.draft_starts)
    ends = [first + 1 + count for first, count in zip(rows.draft_starts, counts, strict=True)]
    end = _joined(rows.decode_starts + 1, [p[2] for p in prefills], ends)
    sequences = [s for seat in seats.tolist() if (s := by_seat[seat]) is not None]
    from_board, inputs = _inputs(rows, len(prefills))
    does_sample = np.ones(len(seats), np.bool_)
    if prefills:
        does_sample[decodes:others] = [p[3] for p in prefills]
    sampled = np.flatnonzero(does_sample)
    grants = _by_row(rows.grants, seats)
    drafts = dict(enumerate(rows.drafts.values(), others))
    step_drafts = _step_drafts(rows, others, grants)
    samples, drafts_before = _samples(sampled, step_drafts.counts, drafts)
    scores, scored = _scores(prefills, decodes)
    sums, vectors = _vectors(prefills, decodes, ledger.cell)
    unverified = step_drafts.unverified_before
    plan = build_plan(
        ledger,
        number,
        (seats, start, end),
        _tokens(inputs, prefills, sequences[others:], rows.drafts.values(), from_board[others:].tolist()),
        from_board,
        grants,
        sampled.astype(np.int32),
        choices.gather(
            seats[samples],
            sequences if len(samples) == len(sequences) and not drafts else [sequences[i] for i in samples.tolist()],
            start[samples],
            from_board[samples] > 0,
            drafts_before,
            rows.awaiting_mask,
            int(unverified.max(initial=0)),
        ),
        step_drafts,
        **scores,
        **sums,
    )
    plain = np.ones(len(seats), np.bool_)
    plain[list(grants)] = False
    prompt_rows = range(decodes, others)
    return PlannedStep(plan, sequences, grants, np.flatnonzero(plain), prompt_rows, scored, vectors, drafts)


def _joined(first: NDArray[np.int64], *others: list[int]) -> NDArray[np.int64]:
    """Return one array of the numbers of all rows."""
    more = [each for numbers in others for each in numbers]
    return np.concatenate([first, np.array(more, np.int64)]) if more else first


def _inputs(rows: StepBuilder, prefills: int) -> tuple[Ints, Ints]:
    """Return whose first token is on the board, and the known tokens of decodes."""
    decodes = len(rows.decode_seats)
    from_board = np.array([0] * (decodes + prefills) + [seat in rows.following for seat in rows.drafts], np.int32)
    from_board[:decodes] = 1
    inputs = np.zeros(decodes, np.int32)
    for row in np.flatnonzero(np.isin(rows.decode_seats, list(rows.inputs))).tolist() if rows.inputs else ():
        from_board[row], inputs[row] = 0, rows.inputs[int(rows.decode_seats[row])]
    return from_board, inputs


def _tokens(
    inputs: NDArray[np.int32],
    prefills: list[tuple[Sequence, int, int, bool]],
    drafting: list[Sequence],
    drafts: Iterable[RowDrafts],
    on_board: list[int],
) -> Ints:
    """Return the tokens of all rows. The first token of a row with drafts is the last one of the answer."""
    each = zip(drafting, drafts, on_board, strict=True)
    drafted = [t for s, row_drafts, there in each for t in (0 if there else s.generated[-1], *row_drafts.tokens)]
    known = [s.known[start:end] for s, start, end, _ in prefills]
    return np.concatenate([inputs, *known, np.array(drafted, np.int32)])


def _step_drafts(rows: StepBuilder, others: int, grants: dict[int, Grant]) -> StepDrafts:
    """Return the drafts of all rows, of which `others` have none, and what rows read if they start earlier."""
    if not rows.drafts:
        return NO_DRAFTS
    numbers = [len(row_drafts.tokens) for row_drafts in rows.drafts.values()]
    only_device = [row_drafts.landing is not None for row_drafts in rows.drafts.values()]
    counts, on_device = _after(others, numbers), NO_INTS
    if any(only_device):
        on_device = counts * _after(others, only_device)
    most = max(rows.following.values(), default=0)
    if not most:
        return StepDrafts(counts, on_device=on_device)
    unverified = _after(others, [rows.following.get(seat, 0) for seat in rows.drafts])
    slots, tokens = np.zeros_like(counts), np.zeros((len(counts), most), np.int32)
    for row, row_drafts in enumerate(rows.drafts.values(), others):
        if earlier := row_drafts.earlier:
            tokens[row, most - len(earlier) :] = earlier
        if row in grants:
            slots[row] = grants[row].earlier_slot or 0
    return StepDrafts(counts, unverified, slots, tokens, on_device)


def _after(others: int, values: SequenceOf[int]) -> Ints:
    """Return the numbers of all rows: 0 for the first `others`."""
    return np.array([0] * others + list(values), np.int32)


def _samples(
    sampled: NDArray[np.int64], counts: Ints, drafts: dict[int, RowDrafts]
) -> tuple[NDArray[np.int64], DraftsBefore]:
    """Return the row of each sample, and the drafts before it."""
    if not drafts:
        return sampled, NO_DRAFTS_BEFORE
    of_row = counts[sampled] + 1
    rows = np.repeat(sampled, of_row)
    before = np.arange(len(rows)) - np.repeat(np.cumsum(of_row) - of_row, of_row)
    return rows, DraftsBefore(rows, before, drafts)


def _by_row(grants: dict[int, Grant], seats: NDArray[np.int64]) -> dict[int, Grant]:
    if not grants:
        return {}
    row_of = {seat: row for row, seat in enumerate(seats.tolist())}
    return {row_of[seat]: grant for seat, grant in grants.items()}


def _scores(
    prefills: list[tuple[Sequence, int, int, bool]], first: int
) -> tuple[dict[str, Any], tuple[tuple[Sequence, int], ...]]:
    """Return the prompt tokens to score: the logits at a position give the probability of the token after it."""
    index: list[NDArray[np.int64]] = []
    token: list[NDArray[np.int32]] = []
    scored, top = [], 0
    for sequence, start, end, _ in prefills:
        params, prompt = sequence.request.params, sequence.request.prompt
        if params.prompt_logprobs is not None:
            low, high = max(start, sequence.scored), min(end, len(prompt) - 1)
            if low < high:
                index.append(np.arange(first + low - start, first + high - start))
                token.append(prompt[low + 1 : high + 1])
                scored.append((sequence, high - low))
                top = max(top, params.prompt_logprobs)
        first += end - start
    if not index:
        return {}, ()
    scores = np.concatenate(index).astype(np.int32), np.concatenate(token), top
    return dict(zip(("score_index", "score_token", "score_top"), scores, strict=True)), tuple(scored)


def _vectors(
    prefills: list[tuple[Sequence, int, int, bool]], first: int, cell: int
) -> tuple[dict[str, Ints], tuple[tuple[Sequence, int], ...]]:
    """Return the sums of hidden states to compute, cut at the grid: chunks do not change how they are rounded."""
    index: list[int] = []
    count: list[int] = []
    vectors = []
    for sequence, start, end, _ in prefills:
        if sequence.request.params.vector_from is not None:
            begins = cuts(max(start, sequence.summed), min(end, len(sequence.request.prompt)), cell)
            index += [first + low - start for low, _ in begins]
            count += [high - low for low, high in begins]
            vectors.append((sequence, len(begins)))
        first += end - start
    if not index:
        return {}, ()
    return {"vector_index": np.array(index, np.int32), "vector_count": np.array(count, np.int32)}, tuple(vectors)


def cuts(low: int, high: int, cell: int) -> list[tuple[int, int]]:
    """Return an interval of positions cut at the grid.

    >>> cuts(3, 10, 4), cuts(4, 4, 4)
    ([(3, 4), (4, 8), (8, 10)], [])
    """
    ends = [*range(floor_to_grid(low, cell) + cell, high, cell), high]
    return list(zip([low, *ends], ends)) if low < high else []
