"""A device whose memory holds rolling hashes instead of tensors, and the oracle that knows what must come out.

Pages hold, for every position, a hash of all tokens up to it; slots the state at their grid position and the token
before it (a convolution of width two); tails the tokens of the open cell. The next token is a hash of the state, of
every page entry that full attention would read, and of the window. One wrong restore, stolen page, stale tail or
forgotten window changes the output. A banned token gives way to the next one that is not;
where a mask leaves only banned tokens, one of those is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.plan import Captures, Landing, Plan
from weft.engine.device import Capabilities, Device
from weft.engine.seat_sampling import uniform
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

MASK = (1 << 64) - 1
VOCABULARY = 97
POISON = 0xDEADBEEFDEADBEEF
POSITIONS = 4096
_COEFFICIENTS = np.array([(p * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & MASK for p in range(POSITIONS)], np.uint64)


def rolling_spec(
    full: bool = True,
    window: int | None = None,
    recurrent: bool = True,
    cell: int = 4,
    room: int = 0,
    heavy: bool = False,
) -> MemorySpec:
    """Memories of a model in miniature. `heavy` states cost so much that only few are kept."""
    memories: list[AttentionMemory | RecurrentMemory] = []
    if full:
        memories.append(AttentionMemory(1, 4, "float32"))
    if window is not None:
        memories.append(AttentionMemory(1, 4, "float32", window))
    if recurrent:
        state = (Part("hash", (256 if heavy else 16,), "float32"),)
        memories.append(RecurrentMemory(state, (Part("token", (1,), "float32"),), conv_width=1))
    return MemorySpec(tuple(memories), cell=cell, draft_room=room)


def mix(a: int, b: int) -> int:
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & MASK
    x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & MASK
    return x ^ (x >> 32)


def digest(entries: np.ndarray, first: int) -> int:
    """A hash of page entries at positions first, first + 1, ..."""
    with np.errstate(over="ignore"):
        return int((entries * _COEFFICIENTS[first : first + len(entries)]).sum(dtype=np.uint64))


class Remembered(NamedTuple):
    """What a model remembers. A specification adds it up at every question."""

    state: bool
    pages: bool
    window: int | None

    @classmethod
    def by(cls, spec: MemorySpec) -> Remembered:
        return cls(bool(spec.state_bytes), bool(spec.page_bytes), spec.window)

    def value(self, state: int, full: int, window: int) -> int:
        value = mix(state if self.state else 1, full if self.pages else 2)
        return mix(value, window if self.window else 3)

    def next_token(self, state: int, full: int, window: int) -> int:
        return self.value(state, full, window) % VOCABULARY


def hidden_of(value: int) -> np.ndarray:
    """The hidden state of a position: small integers, so that sums are not rounded."""
    return np.array([value & 0xFFFF, value >> 16 & 0xFFFF], np.float32)


def drawn(token: int, number: float) -> int:
    """The token that a random number in [0, 1) makes of the most likely one."""
    return mix(token, int(number * (1 << 24))) % VOCABULARY


def nearest(token: int, masked: set[int], banned: Callable[[int], bool]) -> int:
    """The token, or the next one after it that is neither masked nor banned, or else the next that is not masked."""
    if token not in masked and not banned(token):
        return token
    left = [each % VOCABULARY for each in range(token, token + VOCABULARY) if each % VOCABULARY not in masked]
    return next((each for each in left if not banned(each)), left[0])


def completes(word: tuple[int, ...], answer: list[int], token: int) -> bool:
    return (*answer, token)[-len(word) :] == word


def oracle(
    spec: MemorySpec,
    prompt: list[int],
    count: int,
    stop: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
    allowed: tuple[int, ...] | None = None,
    exact: bool = False,
    seed: int | None = None,
) -> list[int]:
    """What an engine without any cache, batch or memory limit answers; `exact`: on a device that rounds.

    With a seed, tokens are drawn.
    """
    run = LoneRun(spec, prompt, exact)
    tokens = list(prompt)
    answer: list[int] = []
    masked = set() if allowed is None else set(range(VOCABULARY)).difference(allowed)
    while len(answer) < count:
        for token in tokens[run.length :]:
            run.read(token)
        token = run.value % VOCABULARY
        if seed is not None:
            token = drawn(token, uniform(np.array([seed], np.uint64), np.array([len(answer)]))[0])
        token = nearest(token, masked, lambda t: any(completes(word, answer, t) for word in bad_words))
        answer.append(token)
        tokens.append(token)
        if token in stop:
            break
    return answer


class LoneRun:
    """Reads tokens one by one, without cache or batch."""

    def __init__(self, spec: MemorySpec, prompt: list[int], exact: bool) -> None:
        self.spec, self.prompt, self.exact = spec, prompt, exact
        self.remembered = Remembered.by(spec)
        self.state = self.last = self.entry = 0
        # Digests of the entries up to each position.
        self.digests = [0]

    @property
    def length(self) -> int:
        return len(self.digests) - 1

    def read(self, token: int) -> None:
        if self.exact:
            token = rounded(token, *canonical_piece(self.length, len(self.prompt), self.spec.cell))
        self.entry = mix(self.entry, token)
        self.state, self.last = mix(self.state, mix(self.last, token)), token
        self.digests.append((self.digests[-1] + self.entry * int(_COEFFICIENTS[self.length])) & MASK)

    @property
    def value(self) -> int:
        before = self.digests[max(0, self.length - (self.remembered.window or 0))]
        return self.remembered.value(self.state, self.digests[-1], (self.digests[-1] - before) & MASK)


def lone_vector(spec: MemorySpec, prompt: list[int], first: int, exact: bool = False) -> np.ndarray:
    """The mean of the hidden states from a position on, without any cache, batch or memory limit."""
    run, found = LoneRun(spec, prompt, exact), []
    for token in prompt:
        run.read(token)
        found.append(hidden_of(run.value).astype(np.float64))
    return np.mean(found[first:], axis=0).astype(np.float32)


def rounded(token: int, first: int, end: int) -> int:
    """A token's value as computed in a piece from offset `first` to `end` of its cell."""
    return mix(mix(token, first), end)


DECODED = (0, 0)


def canonical_piece(position: int, prompt: int, cell: int) -> tuple[int, int]:
    """The piece that a lone, cold, unchunked run computes a position in."""
    here = position - position % cell
    end = min(here + cell, prompt)
    return DECODED if position >= prompt or end - here == 1 else (0, end - here)


def masked_tokens(plan: Plan, place: int) -> set[int]:
    """Tokens that a mask forbids to the plan's sampled row at `place`."""
    found: set[int] = set()
    for mask in plan.sampling.mask_bits[plan.sampling.mask_row == place]:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        found |= {token for token in range(VOCABULARY) if token >= len(allowed) or not allowed[token]}
    return found


class RollingDevice(Device):
    """Executes plans late (`lazy`): at landing, or when the next but one is launched, as a real stream would."""

    def __init__(self, spec: MemorySpec, memory_bytes: int, seats: int, lazy: bool = False) -> None:
        self.spec = spec
        self.remembered = Remembered.by(spec)
        self.lazy = lazy
        sizes = unit_bytes(spec)

        def empty(kind: Kind, length: int) -> np.ndarray:
            units = memory_bytes // sizes[kind] if kind in sizes else 0
            return np.full((units, length), POISON, np.uint64)

        self.ring = spec.cell + spec.draft_room
        self.memory = {
            Kind.PAGE: empty(Kind.PAGE, spec.cell),
            Kind.WINDOW: empty(Kind.WINDOW, spec.cell),
            Kind.STATE: empty(Kind.STATE, 2),
            Kind.TAIL: empty(Kind.TAIL, self.ring),
        }
        self.board = [0] * seats
        # By seat: how many drafts of its last row were wrong.
        self.refused = [0] * seats
        self.computed_tokens = 0
        self.late_masks = 0
        self._waiting: deque[tuple[Plan, dict]] = deque()

    @property
    def capabilities(self) -> Capabilities:
        """What this class can do, and what its subclasses add."""
        added: dict[str, Any] = {
            name: self
            for name, method in (("sizes", "padded_tokens"), ("progress", "has_computed"), ("tiers", "copy"))
            if hasattr(self, method)
        }
        return Capabilities(self.supply_masks, self.builds_on_flight, **added)

    def builds_on_flight(self, decodes: int, drafting: int, tokens: int) -> bool:
        return True

    def launch(self, plan: Plan) -> dict:
        flight: dict = {"plan": plan}
        assert not self._waiting or not self._waits_for_masks(self._waiting[-1][0]), "the step before has no masks"
        self._waiting.append((plan, flight))
        if not self.lazy and not self._waits_for_masks(plan):
            self.execute_all()
        return flight

    @staticmethod
    def _waits_for_masks(plan: Plan) -> bool:
        return len(plan.sampling.awaiting_mask) > 0

    def supply_masks(self, flight: dict, masks: np.ndarray) -> None:
        plan, launched = self._waiting[-1]
        assert launched is flight, "masks belong to the last step"
        self.late_masks += len(masks)
        self._waiting[-1] = replace(plan, sampling=plan.sampling.with_masks(masks)), flight
        if not self.lazy:
            self.execute_all()

    def land(self, flight: dict) -> Landing:
        while "landing" not in flight:
            self._execute_next()
        return flight["landing"]

    def execute_all(self) -> None:
        while self._waiting:
            self._execute_next()

    def _execute_next(self) -> None:
        plan, flight = self._waiting.popleft()
        assert not self._waits_for_masks(plan), "a step without its masks cannot land"
        flight["landing"] = self.execute(plan)

    def execute(self, plan: Plan) -> Landing:
        """As on a GPU: all rows read what earlier plans left before any row writes."""
        for kind, unit in plan.poison:
            self.memory[Kind(kind)][unit] = POISON
        plan = self.placed(plan)
        tokens = self._tokens(plan)
        before = [self._read(plan, row) for row in range(plan.rows)]
        states = [self._write(plan, row, tokens[row], before[row]) for row in range(plan.rows)]
        rows, ends = self.samples_of(plan)
        choices = [
            self._choose(plan, row, states[row][end - int(plan.start[row]) - 1], end)
            for row, end in zip(rows, ends, strict=True)
        ]
        draws = zip(choices, plan.sampling.temperature.tolist(), plan.sampling.uniform.tolist(), strict=True)
        choices = [drawn(token, number) if temperature else token for token, temperature, number in draws]
        sampled = [
            nearest(choice, masked_tokens(plan, place), self.banned_tokens(plan, place).__contains__)
            for place, choice in enumerate(choices)
        ]
        self.leave_on_board(plan, tokens, sampled)
        return Landing(np.array(sampled, np.int32), None, None, vectors=self._vectors(plan, states))

    def _vectors(self, plan: Plan, states: list[list[int]]) -> np.ndarray | None:
        """Sums of the hidden states of the tokens that the plan asks for."""
        if not len(plan.vector_index):
            return None
        last = np.cumsum(plan.end - plan.start)
        sums = []
        for index, count in zip(plan.vector_index.tolist(), plan.vector_count.tolist(), strict=True):
            row = int(np.searchsorted(last, index, side="right"))
            first = index - int(last[row] - (plan.end - plan.start)[row])
            ends = [int(plan.start[row]) + place + 1 for place in range(first, first + count)]
            values = [self._value(plan, row, states[row][end - int(plan.start[row]) - 1], end) for end in ends]
            sums.append(np.sum([hidden_of(value) for value in values], axis=0))
        return np.array(sums, np.float32)

    def leave_on_board(self, plan: Plan, tokens: list[list[int]], sampled: list[int]) -> None:
        """Leave the token after the last right draft of each row, and how many drafts were wrong."""
        of_row: dict[int, list[int]] = {}
        for row, token in zip(plan.samples[0].tolist(), sampled, strict=True):
            of_row.setdefault(row, []).append(token)
        for row, found in of_row.items():
            drafts = tokens[row][len(tokens[row]) - len(found) + 1 :]
            right = next((n for n, draft in enumerate(drafts) if found[n] != draft), len(drafts))
            self.board[plan.seat[row]], self.refused[plan.seat[row]] = found[right], len(drafts) - right

    def placed(self, plan: Plan) -> Plan:
        """The plan with its rows where the board says that they start. Any page, slot or guess may be wrong there."""
        if not len(plan.drafts.unverified_before):
            return plan
        start, slots, tokens = plan.start.copy(), plan.read_slot.copy(), plan.tokens.copy()
        length = (plan.end - plan.start).tolist()
        first = 0
        for row, seat in enumerate(plan.seat.tolist()):
            refused = self.refused[seat] if plan.drafts.unverified_before[row] else 0
            assert refused <= plan.drafts.unverified_before[row]
            start[row] -= refused
            if start[row] // self.spec.cell != plan.start[row] // self.spec.cell:
                slots[row] = plan.drafts.earlier_slot[row]
            if refused:
                early = plan.drafts.earlier_tokens[row].tolist()
                drafts = early + plan.tokens[first + 1 : first + length[row]].tolist()
                for place in range(1, length[row]):
                    tokens[first + place] = drafts[len(early) - refused + place - 1]
            first += length[row]
        inside = [start[r] < p <= start[r] + length[r] for r, p in zip(plan.captures.row, plan.captures.position)]
        captures = Captures(*(getattr(plan.captures, name)[inside] for name in ("row", "position", "slot")))
        moved = (plan.start - start)[plan.samples[0]]
        numbers, early = plan.sampling.uniform.copy(), plan.sampling.earlier_uniform
        for sample in np.flatnonzero(moved).tolist() if len(early) else ():
            numbers[sample] = early[sample, moved[sample] - 1]
        return replace(
            plan, start=start, end=start + np.array(length, np.int32), read_slot=slots, tokens=tokens,
            captures=captures, drafts=replace(plan.drafts, unverified_before=np.zeros(0, np.int32)),
            sampling=replace(plan.sampling, uniform=numbers),
        )  # fmt: skip

    def samples_of(self, plan: Plan) -> tuple[list[int], list[int]]:
        """The row of each sample, and the position after which it is taken, plus one."""
        rows, index = plan.samples
        first = np.cumsum(plan.end - plan.start) - (plan.end - plan.start)
        return rows.tolist(), (plan.start[rows] + index - first[rows] + 1).tolist()

    def _tokens(self, plan: Plan) -> list[list[int]]:
        rows, first = [], 0
        for row, count in enumerate((plan.end - plan.start).tolist()):
            tokens = plan.tokens[first : first + count].tolist()
            if plan.from_board[row]:
                tokens[0] = self.board[plan.seat[row]]
            rows.append(tokens)
            first += count
            self.computed_tokens += count
        return rows

    # reading --------------------------------------------------------------------------------------------------------

    def _read(self, plan: Plan, row: int) -> dict[str, int]:
        start = int(plan.start[row])
        before = {"state": 0, "last": 0, "page": 0, "window": 0}
        if self.remembered.state:
            before["state"], before["last"] = self.restore(plan, row)
        if start and self.remembered.pages:
            before["page"] = self._entry(Kind.PAGE, plan, row, start - 1)
        if start and self.remembered.window:
            before["window"] = self._entry(Kind.WINDOW, plan, row, start - 1)
        return before

    def restore(self, plan: Plan, row: int) -> tuple[int, int]:
        """State and last token before the row's first position: checkpoint at the grid, then the tail."""
        start = int(plan.start[row])
        here = start - start % self.spec.cell
        state, last = self.memory[Kind.STATE][plan.read_slot[row]].tolist() if here else (0, 0)
        tail = self.memory[Kind.TAIL][plan.tail[row]]
        for position in range(here, start):
            token = int(tail[position % self.ring])
            state, last = mix(state, mix(last, token)), token
        return state, last

    def _entry(self, kind: Kind, plan: Plan, row: int, position: int) -> int:
        return int(self.memory[kind][self._place(kind, plan, row, position)])

    def _place(self, kind: Kind, plan: Plan, row: int, position: int) -> tuple[int, int]:
        cell = position // self.spec.cell
        if kind is Kind.PAGE:
            return int(plan.page_table[row, cell]), position % self.spec.cell
        return int(plan.window_table[row, cell - int(plan.window_first[row])]), position % self.spec.cell

    # writing --------------------------------------------------------------------------------------------------------

    def _write(self, plan: Plan, row: int, tokens: list[int], before: dict[str, int]) -> list[int]:
        """Extend pages, tail and checkpoints by the row's tokens; the state after each."""
        states = []
        state, last, page, window = before["state"], before["last"], before["page"], before["window"]
        captures = self.captures_of(plan, row) if self.remembered.state else {}
        for position, token in enumerate(tokens, int(plan.start[row])):
            page, window = mix(page, token), mix(window, token)
            if self.remembered.pages:
                self.memory[Kind.PAGE][self._place(Kind.PAGE, plan, row, position)] = page
            if self.remembered.window:
                self.memory[Kind.WINDOW][self._place(Kind.WINDOW, plan, row, position)] = window
            earlier, last = last, token
            state = mix(state, mix(earlier, token))
            states.append(state)
            if self.remembered.state:
                self.memory[Kind.TAIL][plan.tail[row], position % self.ring] = token
            if position + 1 in captures:
                self.memory[Kind.STATE][captures[position + 1]] = self.checkpoint(state, last, earlier)
        return states

    def checkpoint(self, state: int, last: int, earlier: int) -> tuple[int, int]:
        """Matrix state and convolution window of one position."""
        return state, last

    def captures_of(self, plan: Plan, row: int) -> dict[int, int]:
        captures = plan.captures
        columns = zip(captures.row.tolist(), captures.position.tolist(), captures.slot.tolist(), strict=True)
        return {position: slot for of_row, position, slot in columns if of_row == row}

    # choosing -------------------------------------------------------------------------------------------------------

    def _choose(self, plan: Plan, row: int, state: int, end: int) -> int:
        return self._value(plan, row, state, end) % VOCABULARY

    def _value(self, plan: Plan, row: int, state: int, end: int) -> int:
        cell = self.spec.cell
        full = window = 0
        if self.remembered.pages:
            full = digest(self.memory[Kind.PAGE][plan.page_table[row, : -(-end // cell)]].ravel()[:end], 0)
        if self.remembered.window:
            window = self.digest_window(plan, row, end)
        return self.remembered.value(state, full, window)

    def banned_tokens(self, plan: Plan, place: int) -> set[int]:
        """Tokens that the plan bans from its sampled row at `place`, whose input may be on the board."""
        sampling, board = plan.sampling, self.board[plan.seat[plan.samples[0][place]]]
        found = {int(t) for row, t in zip(sampling.bias_row, sampling.bias_token, strict=True) if row == place}
        bans = zip(sampling.ban_row.tolist(), sampling.ban_token.tolist(), sampling.ban_input.tolist(), strict=True)
        return found | {token for row, token, newest in bans if row == place and newest == board}

    def digest_window(self, plan: Plan, row: int, end: int) -> int:
        assert self.spec.window is not None
        cell, visible, first = self.spec.cell, max(0, end - self.spec.window), int(plan.window_first[row])
        low = visible // cell
        pages = plan.window_table[row, low - first : -(-end // cell) - first]
        return digest(self.memory[Kind.WINDOW][pages].ravel()[visible - low * cell : end - low * cell], visible)


class RoundingDevice(RollingDevice):
    """A device whose results depend on how a token is computed, as rounding does.

    A row of one token is a decode. Longer rows are cut at the grid, and the bits of a token depend on where its piece
    begins and ends. Company does not matter.
    """

    def _tokens(self, plan: Plan) -> list[list[int]]:
        cell = self.spec.cell
        rows = []
        for tokens, start in zip(super()._tokens(plan), plan.start.tolist(), strict=True):
            end = start + len(tokens)
            pieces = [(max(start, p - p % cell) % cell, min(end - p + p % cell, cell)) for p in range(start, end)]
            rows.append([rounded(t, *(piece if len(tokens) > 1 else DECODED)) for t, piece in zip(tokens, pieces)])
        return rows
