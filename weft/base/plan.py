"""One step as a frozen value: what the planner decided, and everything the runner needs.

Arrays with one entry per row are marked `ROWS` where they are declared; whatever builds, cuts or sends a plan, and what
kernels receive, follows from that: a new one is one line here.

All fields are plain integers (numpy, read-only). The runner executes a plan whole, in order, on one stream. Rows of one
token (decodes) come first. A missing checkpoint is known from the position alone, never from a special index: if
`start` lies in the first cell there is no checkpoint, and the runner ignores `read_slot`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Places = slice | NDArray[np.int64]
NO_INTS: Ints = np.zeros(0, np.int32)
NO_TABLE: Ints = np.zeros((0, 0), np.int32)
# Marks of fields: arrays of one number, or one line, per row; those that kernels read as they are, under the same name.
ROWS: Mapping[str, Any] = {"rows": True}
LINES: Mapping[str, Any] = {"rows": True, "lines": True}
KERNEL_ROWS: Mapping[str, Any] = {"rows": True, "kernels": True}
# Added to a banned token's logit. Finite, so that where a mask leaves only banned tokens, one of them is chosen.
BANNED = -1e30


@cache
def row_arrays(kind: Hashable, mark: str = "rows") -> tuple[str, ...]:
    """Return the names of a dataclass's arrays that have a mark.

    >>> row_arrays(Plan, "lines"), row_arrays(Plan, "kernels")
    (('page_table', 'window_table'), ('start', 'tail'))
    """
    return tuple(each.name for each in fields(cast(Any, kind)) if mark in each.metadata)


def cut_rows(value: Any, rows: Places) -> dict[str, Any]:
    """Return these rows of all arrays of a plan or its drafts; arrays without rows stay as they are."""
    arrays = ((name, getattr(value, name)) for name in row_arrays(value.__class__))
    return {name: array[rows] if len(array) else array for name, array in arrays}


class Frozen:
    """Base of dataclasses whose arrays become read-only when created."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Sampling(Frozen):
    """How the samples of a plan choose their token; one entry per sample, in the order of `Plan.samples`.

    Without drafts a sample is a sampled row.
    """

    temperature: Floats  # 0 is greedy
    top_k: Ints  # 0 is off
    top_p: Floats  # 1 is off
    min_p: Floats  # 0 is off
    uniform: Floats  # random number in [0, 1) of this row and position
    top_logprobs: Ints  # number of alternatives to report
    repetition_penalty: Floats  # 1 is off
    presence_penalty: Floats  # 0 is off
    frequency_penalty: Floats  # 0 is off
    # Tokens that penalties apply to: the history of penalised rows, as (sampled row, token, whether it was generated).
    history_row: Ints
    history_token: Ints
    history_generated: Ints
    # Values added to logits, `BANNED` to ban: (sampled row, token, value).
    bias_row: Ints
    bias_token: Ints
    bias_value: Floats
    all_greedy: bool  # every row needs only an argmax
    wants_logprobs: bool
    wants_digests: bool = field(default=False, kw_only=True)
    # Rows restricted to some tokens, in order, and one bit per vocabulary entry, lowest first: set if it is allowed.
    mask_row: Ints = field(default_factory=lambda: NO_INTS)
    mask_bits: Ints = field(default_factory=lambda: NO_TABLE)  # [masked rows, words]
    # Samples whose mask follows after the launch, when the step before has landed (`with_masks`).
    awaiting_mask: Ints = field(default_factory=lambda: NO_INTS)
    # Tokens banned if the row's input, which is only on the board, is a certain token: (sampled row, token, input).
    ban_row: Ints = field(default_factory=lambda: NO_INTS)
    ban_token: Ints = field(default_factory=lambda: NO_INTS)
    ban_input: Ints = field(default_factory=lambda: NO_INTS)
    # Random numbers of samples whose row may start earlier: column i if it starts i + 1 tokens earlier.
    earlier_uniform: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [samples, positions]

    def with_masks(self, masks: Ints) -> Sampling:
        """Return the sampling with the masks of the samples that waited for theirs."""
        bits = np.zeros((len(self.mask_row) + len(masks), max(self.mask_bits.shape[1], masks.shape[1])), np.int32)
        bits[: len(self.mask_row), : self.mask_bits.shape[1]] = self.mask_bits
        bits[len(self.mask_row) :, : masks.shape[1]] = masks
        rows = np.concatenate([self.mask_row, self.awaiting_mask])
        # In the order of samples, like all masks of a plan.
        order = np.argsort(rows)
        return replace(self, mask_row=rows[order], mask_bits=bits[order], awaiting_mask=np.zeros(0, np.int32))

    @classmethod
    @lru_cache(maxsize=1024)
    def greedy(cls, count: int) -> Sampling:
        """Return the sampling of `count` samples that take the most likely token. Plans share it."""
        none, zeros, ones = np.zeros(0, np.int32), np.zeros(count, np.float32), np.ones(count, np.float32)
        return cls(
            temperature=zeros, top_k=np.zeros(count, np.int32), top_p=ones, min_p=zeros, uniform=zeros,
            top_logprobs=np.zeros(count, np.int32), repetition_penalty=ones, presence_penalty=zeros,
            frequency_penalty=zeros, history_row=none, history_token=none, history_generated=none, bias_row=none,
            bias_token=none, bias_value=np.zeros(0, np.float32), all_greedy=True, wants_logprobs=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Captures(Frozen):
    """All states that a plan writes; the only source of snapshot indices.

    `position` is a grid position in (start, end] of row `row`; its state is written to slot `slot`.
    """

    row: Ints
    position: Ints
    slot: Ints

    def of(self, chosen: NDArray[np.bool_]) -> Captures:
        """Return some of the captures."""
        return Captures(self.row[chosen], self.position[chosen], self.slot[chosen])


NO_CAPTURES = Captures(NO_INTS, NO_INTS, NO_INTS)


@dataclass(frozen=True, slots=True)
class StepDrafts(Frozen):
    """Drafts of a step, by row. An empty array means that no row of the step has any."""

    # [rows] how many of the row's last tokens are drafts. A row with drafts also samples before each of them. On the
    # board it leaves the sample after the last accepted draft, if the device moves rows there, and nothing otherwise:
    # then its next row has its token from the host.
    counts: Ints = field(default_factory=lambda: NO_INTS, metadata=ROWS)
    # [rows] drafts of the row's sequence that are in flight when the row is planned: the row starts as many positions
    # before `start` as of these are rejected. `read_slot` is for `start`, `earlier_slot` for a start in the cell
    # before; captures are those of every start.
    unverified_before: Ints = field(default_factory=lambda: NO_INTS, metadata=ROWS)
    earlier_slot: Ints = field(default_factory=lambda: NO_INTS, metadata=ROWS)  # [rows]
    # Drafts of the tokens before the row's own, which take their place if it starts earlier: the last ones count.
    earlier_tokens: Ints = field(default_factory=lambda: NO_TABLE, metadata=LINES)  # [rows, positions]
    # [rows] how many of the row's last tokens are only on the device: drafts of an MTP head that have not landed, or,
    # in its own plans, what the model has chosen. `tokens` has zeros there.
    on_device: Ints = field(default_factory=lambda: NO_INTS, metadata=ROWS)
    # [rows] drafts in flight for which a row of an MTP head has tokens: it ends as many positions before `end` as of
    # these are rejected.
    unverified_inside: Ints = field(default_factory=lambda: NO_INTS, metadata=ROWS)
    # In plans of an MTP head: whether drafts are chosen among the first, frequent, tokens of the vocabulary only.
    frequent_only: bool = False

    @property
    def may_move(self) -> bool:
        """Return whether rows may start earlier than their plan says."""
        return len(self.unverified_before) > 0


NO_DRAFTS = StepDrafts()


@dataclass(frozen=True, slots=True)
class Plan(Frozen):
    number: int
    seat: Ints = field(metadata=ROWS)  # [rows] line of the token board
    start: Ints = field(metadata=KERNEL_ROWS)  # [rows] first position to compute
    end: Ints = field(metadata=ROWS)  # [rows] one past the last
    tokens: Ints  # [sum(end - start)] the rows' tokens, packed
    from_board: Ints = field(metadata=ROWS)  # [rows] 1: the row's first token is the last one sampled for its seat
    read_slot: Ints = field(metadata=ROWS)  # [rows] checkpoint at the grid position at or before `start`
    tail: Ints = field(metadata=KERNEL_ROWS)  # [rows]
    page_table: Ints = field(metadata=LINES)  # [rows, cells] pages of cells 0, 1, ...
    window_table: Ints = field(metadata=LINES)  # [rows, window cells] of cells window_first, window_first + 1, ...
    window_first: Ints = field(metadata=ROWS)  # [rows]
    sampled: Ints  # [sampled rows] rows that sample a token after their last position, and after each draft's input
    sampling: Sampling
    captures: Captures = NO_CAPTURES
    # Prompt tokens to score: the logits at packed index `score_index` give the probability of `score_token`.
    score_index: Ints = field(default_factory=lambda: NO_INTS)
    score_token: Ints = field(default_factory=lambda: NO_INTS)
    score_top: int = 0
    # Vectors to return: the sum of the hidden states of `vector_count` tokens of one row and cell, the first of which
    # has packed index `vector_index`. The host adds them up.
    vector_index: Ints = field(default_factory=lambda: NO_INTS)
    vector_count: Ints = field(default_factory=lambda: NO_INTS)
    # Units freed since the last plan, by kind. Paranoid mode fills them with NaN before the step; otherwise empty.
    poison: tuple[tuple[str, int], ...] = ()
    drafts: StepDrafts = NO_DRAFTS

    @classmethod
    def build(cls, **given: Any) -> Self:
        """Return a plan. Per-row arrays that are not given are zeros, and lines without entries."""
        rows = len(given["start"])
        for name in row_arrays(Plan):
            if name not in given:
                given[name] = np.zeros((rows, 0) if name in row_arrays(Plan, "lines") else rows, np.int32)
        return cls(**given)

    def __post_init__(self) -> None:
        Frozen.__post_init__(self)
        assert (self.start < self.end).all(), "every row computes at least one token"
        assert len(self.tokens) == int((self.end - self.start).sum())

    @property
    def rows(self) -> int:
        return len(self.start)

    @property
    def reads_prompts(self) -> bool:
        """Return whether hidden states are read besides those of samples."""
        return len(self.score_index) > 0 or len(self.vector_index) > 0

    @property
    def samples(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row of each sample, and the packed index of the token after which it is taken."""
        sampled = self.sampled.astype(np.int64)
        if not len(self.drafts.counts):
            return sampled, self._last[sampled]
        counts = self.drafts.counts[sampled].astype(np.int64) + 1
        row = np.repeat(sampled, counts)
        if len(row) == len(self.tokens):
            return row, np.arange(len(row))
        # Samples of a row end at its last token.
        left = np.repeat(np.cumsum(counts), counts) - np.arange(len(row)) - 1
        return row, self._last[row] - left

    @property
    def _last(self) -> NDArray[np.int64]:
        """Return the packed index of each row's last token."""
        return np.cumsum(self.end - self.start, dtype=np.int64) - 1

    @property
    def draft_counts(self) -> Ints:
        """Return the number of drafts of each row, whether or not any row has some."""
        return self.drafts.counts if len(self.drafts.counts) else np.zeros(self.rows, np.int32)

    @property
    def sample_count(self) -> int:
        return len(self.sampled) + (int(self.drafts.counts[self.sampled].sum()) if len(self.drafts.counts) else 0)

    @property
    def decode_rows(self) -> int:
        """Return the number of leading rows that compute exactly one token."""
        if len(self.tokens) == len(self.start):
            return len(self.start)
        return int(((self.end - self.start) == 1).argmin())


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the chosen tokens and of the most likely ones."""

    chosen: Floats  # [n]
    top_token: Ints  # [n, k]
    top_logprob: Floats  # [n, k]

    def part(self, first: int, end: int, top: int | None = None) -> Scores:
        """Return rows `first` to `end`, with the `top` most likely tokens of each, or all of them."""
        return Scores(self.chosen[first:end], self.top_token[first:end, :top], self.top_logprob[first:end, :top])

    def copy(self) -> Scores:
        """Return a copy that keeps no other array alive."""
        return Scores(self.chosen.copy(), self.top_token.copy(), self.top_logprob.copy())


@dataclass(frozen=True, slots=True)
class Landing:
    """Results of a completed flight, in the order of `plan.samples`, `plan.score_index` and `plan.vector_index`."""

    tokens: Ints  # [samples]
    sampled_scores: Scores | None
    prompt_scores: Scores | None
    digests: NDArray[np.int64] | None = None  # [sampled rows] of the logits, if any row asked for them
    vectors: Floats | None = None  # [vectors, size]
