"""Sampling parameters of each seat, as arrays: filled when a sequence takes a seat, gathered for every plan.

The random number of a token depends only on its request's seed and its index in the answer, so the same seed gives the
same text whatever the batch, the chunking or the number of preemptions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from weft.base.plan import BANNED, Floats, Ints, Sampling
from weft.drafting.policy.choosing import RowDrafts
from weft.engine.bad_words import BadWords
from weft.engine.sequence import Sequence

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Samples up to which Python's own numbers are faster than arrays.
FEW = 4
_STEP, _FIRST, _SECOND, _WORD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1
_NO_INTS = np.zeros(0, np.int32)


class DraftsBefore:
    """The drafts before each sample of a step. `before` is their number, `drafts` the drafts of rows."""

    def __init__(self, rows: NDArray[np.int64], before: NDArray[np.int64], drafts: Mapping[int, RowDrafts]) -> None:
        self.before = before
        self._rows = rows
        self._drafts = drafts

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def tokens(self, sample: int) -> tuple[int, ...]:
        """Return the drafts before a sample, which is chosen as if they were the end of the answer."""
        if not self._drafts or sample >= len(self.before) or not self.before[sample]:
            return ()
        return self._drafts[int(self._rows[sample])].tokens[: int(self.before[sample])]


NO_DRAFTS_BEFORE = DraftsBefore(np.zeros(0, np.int64), np.zeros(0, np.int64), {})
# What `gather` finds for samples whose logits nothing changes.
NO_HISTORY = _NO_INTS, _NO_INTS, _NO_INTS
NO_BIASES = _NO_INTS, _NO_INTS, np.zeros(0, np.float32)
NO_MASKS = _NO_INTS, np.zeros((0, 0), np.int32)
NO_BANS = np.zeros((0, 3), np.int32)


def uniform(seed: NDArray[np.uint64], index: NDArray[np.int64]) -> Floats:
    """Return random numbers in [0, 1), one per (seed, index): SplitMix64 of both.

    >>> import numpy as np
    >>> u = uniform(np.full(1000, 7, np.uint64), np.arange(1000))
    >>> bool(0.45 < u.mean() < 0.55), len(set(u.tolist())) > 990
    (True, True)
    >>> bool((uniform(np.full(3, 7, np.uint64), np.arange(3)) == u[:3]).all())
    True
    """
    if index.ndim == 1 and len(index) <= FEW:
        each = zip(seed.tolist(), index.tolist(), strict=True)
        return np.array([(_mixed(_mixed(s + _STEP) + i * _STEP) >> 40) / (1 << 24) for s, i in each], np.float32)
    with np.errstate(over="ignore"):
        x = _mix(seed + np.uint64(_STEP)) + index.astype(np.uint64) * np.uint64(_STEP)
        bits = _mix(x) >> np.uint64(40)
    return (bits.astype(np.float64) / (1 << 24)).astype(np.float32)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _mixed(x: int) -> int:
    x &= _WORD
    x = (x ^ (x >> 30)) * _FIRST & _WORD
    x = (x ^ (x >> 27)) * _SECOND & _WORD
    return x ^ (x >> 31)


class SeatSampling:
    def __init__(self, seats: int) -> None:
        self._floats = {name: np.zeros(seats, np.float32) for name in _FLOATS}
        self._top_k = np.zeros(seats, np.int32)
        self._logprobs = np.full(seats, -1, np.int32)
        self._digests = np.zeros(seats, np.bool_)
        self._seed = np.zeros(seats, np.uint64)
        # Seats whose samples need the tokens before them.
        self.penalised = np.zeros(seats, np.bool_)
        self._biased = np.zeros(seats, np.bool_)
        # By seat: words that must not occur, and the only tokens that may, as bits.
        self._bad_words: dict[int, BadWords] = {}
        self._allowed: dict[int, Ints] = {}
        self._masked = np.zeros(seats, np.bool_)
        # Seats whose logits are changed by any of these.
        self._adjusted = np.zeros(seats, np.bool_)
        # Seats that need more than the most likely token.
        self._special = np.zeros(seats, np.bool_)
        # Seats whose next token depends on the last one, through a grammar.
        self.constrained = np.zeros(seats, np.bool_)
        # Seats whose masks take long, and seats whose mask is not found yet: no step has them.
        self.slow = np.zeros(seats, np.bool_)
        self.waiting = np.zeros(seats, np.bool_)
        # Seats whose samples depend on tokens before them, or on their number, in ways that only the host computes.
        self.looks_back = np.zeros(seats, np.bool_)
        # Number of samples planned so far, including those in flight: the index of the next one.
        self.sampled = np.zeros(seats, np.int64)

    def sit(self, sequence: Sequence) -> None:
        seat, params = sequence.seat, sequence.request.params
        for name, values in self._floats.items():
            values[seat] = getattr(params, name)
        self._top_k[seat] = params.top_k
        self._logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        self._digests[seat] = params.logits_digest
        self._seed[seat] = sequence.seed & 0xFFFFFFFFFFFFFFFF
        neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
        self.penalised[seat] = not neutral
        self._biased[seat] = bool(params.logit_bias or params.bad_words) or params.min_tokens > 0
        self._bad_words.pop(seat, None)
        self._allowed.pop(seat, None)
        if params.bad_words:
            self._bad_words[seat] = BadWords(word for word in params.bad_words if not isinstance(word, str))
        if params.allowed_token_ids is not None:
            self._allowed[seat] = _bits(params.allowed_token_ids)
        self.constrained[seat] = sequence.constraint is not None
        self.note_mask(sequence)
        self.looks_back[seat] = bool(
            not neutral or params.bad_words or params.min_tokens > 0 or sequence.constraint is not None
        )
        self._masked[seat] = sequence.constraint is not None or params.allowed_token_ids is not None
        reports = params.logprobs is not None or params.logits_digest
        self._adjusted[seat] = self.penalised[seat] or self._biased[seat] or self._masked[seat]
        self._special[seat] = reports or params.temperature > 0 or self._adjusted[seat]
        self.sampled[seat] = len(sequence.generated)

    def gather(
        self,
        seats: NDArray[np.int64],
        sequences: list[Sequence],
        starts: NDArray[np.int64],
        boarded: NDArray[np.bool_],
        drafts_before: DraftsBefore = NO_DRAFTS_BEFORE,
        awaiting_mask: frozenset[int] = frozenset(),
        unverified: int = 0,
    ) -> Sampling:
        """Return the sampling of these samples, and count them as sampled.

        `drafts_before` are the drafts before each sample, `awaiting_mask` the seats whose masks follow after the
        launch. Samples may turn out to be up to `unverified` earlier in their answers.
        """
        index = self.sampled[seats]
        if drafts_before:
            index += drafts_before.before
        if not self._special[seats].any():
            self.sampled[seats] = index + 1
            return Sampling.greedy(len(seats))
        values = {name: array[seats] for name, array in self._floats.items()}
        logprobs = self._logprobs[seats]
        waiting, history, biases, bans, masks = _NO_INTS, NO_HISTORY, NO_BIASES, NO_BANS, NO_MASKS
        if self._adjusted[seats].any():
            waiting = np.array([row for row, seat in enumerate(seats.tolist()) if seat in awaiting_mask], np.int32)
            history = self.token_history(seats, sequences, starts, boarded, drafts_before)
            biases = self.biases(seats, sequences, index, boarded, drafts_before)
            bans = self.bans_by_input(seats, sequences, starts, boarded)
            masks = self.masks(seats, sequences, drafts_before, frozenset(waiting.tolist()))
        draws = bool(values["temperature"].any())
        self.sampled[seats] = index + 1
        return Sampling(
            **values,
            top_k=self._top_k[seats],
            uniform=uniform(self._seed[seats], index) if draws else np.zeros(len(seats), np.float32),
            top_logprobs=np.maximum(logprobs, 0),
            history_row=history[0],
            history_token=history[1],
            history_generated=history[2],
            bias_row=biases[0],
            bias_token=biases[1],
            bias_value=biases[2],
            all_greedy=not (draws or len(history[0]) or len(biases[0]) or len(masks[0]) or len(waiting) or len(bans)),
            wants_logprobs=bool((logprobs >= 0).any()),
            wants_digests=bool(self._digests[seats].any()),
            mask_row=masks[0],
            mask_bits=masks[1],
            awaiting_mask=waiting,
            ban_row=bans[:, 0].copy(),
            ban_token=bans[:, 1].copy(),
            ban_input=bans[:, 2].copy(),
            earlier_uniform=self.earlier_numbers(seats, index, unverified if draws else 0),
        )

    def note_mask(self, sequence: Sequence) -> None:
        """Note of the sequence on a seat whether its mask is found, and how long it takes."""
        self.waiting[sequence.seat] = sequence.awaits_mask
        self.slow[sequence.seat] = sequence.constraint is not None and sequence.constraint.slow

    def earlier_numbers(self, seats: NDArray[np.int64], index: NDArray[np.int64], unverified: int) -> Floats:
        """Return the random numbers of samples that turn out to be 1, 2, ... earlier."""
        if not unverified:
            return np.zeros((0, 0), np.float32)
        # Before the first token there is none; a row in its place has no unverified drafts.
        earlier = np.maximum(index[:, None] - np.arange(1, unverified + 1), 0)
        return uniform(np.broadcast_to(self._seed[seats][:, None], earlier.shape), earlier)

    def wants_logprobs(self, seats: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of alternatives that each seat reports; negative: not even the chosen token."""
        return self._logprobs[seats]

    def undo(self, seats: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Take back the last samples of seats, which were taken after drafts that turned out wrong."""
        self.sampled[seats] -= samples

    def token_history(
        self,
        seats: NDArray[np.int64],
        sequences: list[Sequence],
        starts: NDArray[np.int64],
        boarded: NDArray[np.bool_],
        drafts_before: DraftsBefore = NO_DRAFTS_BEFORE,
    ) -> tuple[Ints, Ints, Ints]:
        """Return the tokens that penalties apply to. A row fed from the board adds its own input on the device."""
        rows, tokens, generated = [], [], []
        for row in np.flatnonzero(self.penalised[seats]).tolist():
            sequence = sequences[row]
            end = int(starts[row]) if boarded[row] else sequence.length
            seen = sequence.tokens(0, end)
            if drafts := drafts_before.tokens(row):
                seen = np.concatenate([seen, np.asarray(drafts, np.int32)])
            rows.append(np.full(len(seen), row, np.int32))
            tokens.append(seen)
            generated.append((np.arange(len(seen)) >= len(sequence.request.prompt)).astype(np.int32))
        return _join(rows), _join(tokens), _join(generated)

    def biases(
        self,
        seats: NDArray[np.int64],
        sequences: list[Sequence],
        index: NDArray[np.int64],
        boarded: NDArray[np.bool_],
        drafts_before: DraftsBefore,
    ) -> tuple[Ints, Ints, Floats]:
        """Return what is added to logits: (row, token, value). `index` is the place of each sample in its answer."""
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row in np.flatnonzero(self._biased[seats]).tolist():
            request = sequences[row].request
            entries = dict(request.params.logit_bias or {})
            if index[row] < request.params.min_tokens:
                entries.update(dict.fromkeys(request.stop_tokens, BANNED))
            words = self._bad_words.get(int(seats[row]))
            if words is not None:
                answer, drafts = sequences[row].generated, drafts_before.tokens(row)
                answer = [*answer, *drafts] if drafts else answer
                banned = words.single if boarded[row] else words.banned(answer)
                entries.update(dict.fromkeys(banned, BANNED))
            rows.extend([row] * len(entries))
            tokens.extend(entries)
            values.extend(entries.values())
        return np.asarray(rows, np.int32), np.asarray(tokens, np.int32), np.asarray(values, np.float32)

    def masks(
        self, seats: NDArray[np.int64], sequences: list[Sequence], drafts_before: DraftsBefore, waiting: frozenset[int]
    ) -> tuple[Ints, Ints]:
        """Return the tokens that grammars or the request allow next, for the samples that are restricted by now."""
        rows: list[int] = []
        masks: list[Ints] = []
        along: list[Ints] = []
        # Backwards: the last sample of a row has all its drafts before it.
        for row in reversed(np.flatnonzero(self._masked[seats]).tolist()):
            constraint, drafts = sequences[row].constraint, drafts_before.tokens(row)
            if row in waiting:
                continue
            rows.append(row)
            if constraint is None:
                masks.append(self._allowed[int(seats[row])])
            elif drafts:
                is_last = len(drafts_before.tokens(row + 1)) <= len(drafts)
                along = constraint.masks_along(drafts) if is_last else along
                masks.append(along[len(drafts) - 1])
            else:
                masks.append(constraint.mask)
        return np.asarray(rows[::-1], np.int32), stacked(masks[::-1])

    def bans_by_input(
        self, seats: NDArray[np.int64], sequences: list[Sequence], starts: NDArray[np.int64], boarded: NDArray[np.bool_]
    ) -> Ints:
        """Return [bans, (row, token, input)]: tokens that a row may not choose if its input on the board is `input`."""
        found: list[tuple[int, int, int]] = []
        for row in np.flatnonzero(self._biased[seats] & boarded).tolist():
            words, sequence = self._bad_words.get(int(seats[row])), sequences[row]
            if words is not None:
                known = int(starts[row]) - len(sequence.request.prompt)
                recent = sequence.generated[max(0, known - words.longest) : known]
                found += [(row, token, newest) for newest, token in words.banned_after(recent)]
        return np.array(found, np.int32).reshape(-1, 3)


def _bits(tokens: tuple[int, ...]) -> Ints:
    """
    >>> _bits((0, 33)).tolist()
    [1, 2]
    """
    bits = np.zeros((max(tokens) // 32 + 1) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def stacked(masks: list[Ints]) -> Ints:
    """Return masks as rows of one array. Tokens beyond a mask's end are not allowed."""
    found = np.zeros((len(masks), max(map(len, masks), default=0)), np.int32)
    for row, mask in enumerate(masks):
        found[row, : len(mask)] = mask
    return found


def _join(parts: list[NDArray[np.int32]]) -> Ints:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
