"""The state of one request: its tokens, the keys of its prefixes, and its position."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from weft.base.constraint import Constraint
from weft.base.grid import floor_to_grid
from weft.drafting.policy.choosing import SequenceDrafts
from weft.engine.events import FinishReason, Report
from weft.engine.request import Request
from weft.engine.tracing.events import Wait
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.lease import Lease
from weft.memory.misses import Miss, Reason


class Sequence:
    """`known` are the tokens to compute before the next one can be sampled: the prompt, and what was generated before a
    preemption. `leaving` is set once no more steps are planned for it; with None as its reason, the sequence will
    return. `constraint` stands at the end of `generated`, whatever happened to the memory meanwhile. While the sequence
    `awaits_mask`, a thread advances the constraint by the last token, and no step may sample. The keys of its cells
    come from `identity`."""

    __slots__ = (
        "arrival",
        "arrived_seconds",
        "awaits_mask",
        "constraint",
        "drafting",
        "fresh_starts",
        "generated",
        "id",
        "identity",
        "keys",
        "known",
        "lease",
        "leaving",
        "loads_since",
        "max_tokens",
        "plain_key",
        "reason",
        "report",
        "request",
        "seat",
        "seed",
        "stop_tokens",
        "waited_since",
        "waits_for",
    )

    def __init__(
        self,
        number: int,
        request: Request,
        max_tokens: int,
        seed: int,
        identity: PrefixIdentity,
        constraint: Constraint | None = None,
    ) -> None:
        self.id = number
        self.arrival = number
        self.arrived_seconds = monotonic()
        self.request = request
        self.max_tokens = max_tokens
        self.stop_tokens = request.stop_tokens
        self.seed = seed
        self.constraint = constraint
        self.awaits_mask = False
        self.drafting: SequenceDrafts | None = None
        self.identity = identity
        self.known: NDArray[np.int32] = request.known
        self.generated: list[int] = self.known[len(request.prompt) :].tolist()
        self.keys: list[Key] = identity.keys(self.known, decoded_from=len(request.prompt))
        self.plain_key: Key | None = self._plain_key()
        self.lease: Lease | None = None
        self.seat = 0
        self.leaving = False
        self.reason: FinishReason | None = None
        self.report = Report()
        self.waited_since = 0
        self.waits_for = Wait.TURN
        self.loads_since: float | None = None
        self.fresh_starts = 0

    def _plain_key(self) -> Key | None:
        identity = self.identity
        if not self.keys or not identity.salt:
            return self.keys[0] if self.keys else None
        decoded_from = len(self.request.prompt)
        return replace(identity, salt=b"").keys(self.known[: identity.cell], decoded_from=decoded_from)[0]

    @property
    def declared(self) -> tuple[int, ...]:
        """The positions that are worth keeping because the caller says so, and where an answer forks."""
        return self.request.snapshots if self.request.answered is None else (len(self.request.known) - 1,)

    @property
    def shares_answer(self) -> bool:
        """Whether the cells of its answer are for other sequences."""
        return self.request.keeps_answer or self.request.answered is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Return the scheduling order: lower priority numbers, then earlier arrivals."""
        return self.request.priority, self.arrival

    @property
    def length(self) -> int:
        """Number of tokens that the host knows."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def answer_length(self) -> int:
        """Number of tokens that were generated for this request: a fork begins with those of another answer."""
        return self.length - self.request.known_length

    @property
    def scored(self) -> int:
        """The first position whose logits are still needed to score the prompt."""
        return self.request.params.prompt_logprobs_start + len(self.report.prompt_scores)

    @property
    def summed(self) -> int:
        """The first position whose hidden state is still needed for the vector."""
        return (self.request.params.vector_from or 0) + self.report.vector.tokens

    @property
    def reuse_limit(self) -> int:
        """Maximum number of cached tokens to use: at least one must be computed, and so must those that are read."""
        limit, params = len(self.known) - 1, self.request.params
        if params.prompt_logprobs is not None:
            limit = min(limit, self.scored)
        return limit if params.vector_from is None else min(limit, self.summed)

    def note_load(self) -> None:
        """Record that the sequence waits for its prefix from a tier below."""
        self.waits_for = Wait.LOAD
        if self.loads_since is None:
            self.loads_since = monotonic()

    def note_start(self, miss: Miss) -> Miss:
        """Record where the sequence started and why not further; the report has the client's version of it."""
        cell = self.identity.cell
        reusable, limit = floor_to_grid(len(self.request.known) - 1, cell), floor_to_grid(self.reuse_limit, cell)
        if limit < reusable and miss.cached == limit and miss.reason is not Reason.CACHE_OFF:
            lost = reusable - miss.cached
            reads = Reason.SCORES_WANTED if self.request.params.vector_from is None else Reason.MEAN_WANTED
            miss = replace(miss, reason=reads, reusable=reusable, tokens_lost=lost)
        self.report.cached_tokens = miss.cached
        self.report.miss = miss.for_client()
        now = monotonic()
        self.report.queued_seconds = now - self.arrived_seconds
        self.report.loading_seconds = 0.0 if self.loads_since is None else now - self.loads_since
        return miss

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """Return the known tokens of an interval of positions."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        if start >= len(prompt):
            return np.array(self.generated[start - len(prompt) : end - len(prompt)], np.int32)
        tail = np.asarray(self.generated[max(0, start - len(prompt)) : end - len(prompt)], np.int32)
        return np.concatenate([prompt[start:], tail])

    def name_cells(self, cells: int, accepted: SequenceOf[int] = ()) -> None:
        """Extend the keys to this many cells, once their tokens are known; those of `accepted` follow `generated`."""
        if cells > len(self.keys):
            start, end = len(self.keys) * self.identity.cell, cells * self.identity.cell
            after = self.keys[-1] if self.keys else None
            tokens = self.tokens(start, min(end, self.length))
            if end > self.length:
                tokens = np.concatenate([tokens, np.asarray(accepted[: end - self.length], np.int32)])
            self.keys.extend(self.identity.keys(tokens, after, decoded_from=len(self.request.prompt) - start))

    def go_back(self) -> None:
        """Reset after a preemption: everything known must be computed again, from wherever the cache allows."""
        self.lease = None
        self.leaving = False
        self.known = self.tokens(0, self.length)
        self.report.preemptions += 1
        self.waits_for = Wait.GRAMMAR if self.awaits_mask else Wait.MEMORY
