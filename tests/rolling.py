"""A device whose memory holds rolling hashes instead of tensors, and the oracle that knows what must come out.

Pages hold, for every position, a hash of all tokens up to it; slots the hash at their grid position; tails the tokens
of the open cell. The next token is a hash of the state, of every page entry that full attention would read, and of the
window. One wrong restore, stolen page, stale tail or forgotten window changes the output.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from weft.base.plan import Landing, Plan
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

MASK = (1 << 64) - 1
VOCABULARY = 97
POISON = 0xDEADBEEFDEADBEEF
POSITIONS = 4096
_COEFFICIENTS = np.array([(p * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & MASK for p in range(POSITIONS)], np.uint64)


def rolling_spec(
    full: bool = True, window: int | None = None, recurrent: bool = True, cell: int = 4, room: int = 0, heavy: bool = False
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


def next_token(spec: MemorySpec, state: int, full: int, window: int) -> int:
    value = mix(state if spec.state_bytes else 1, full if spec.page_bytes else 2)
    return mix(value, window if spec.window else 3) % VOCABULARY


def oracle(spec: MemorySpec, prompt: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What an engine without any cache, batch or memory limit answers."""
    hashes: list[int] = []
    tokens = list(prompt)
    answer: list[int] = []
    while len(answer) < count:
        for token in tokens[len(hashes) :]:
            hashes.append(mix(hashes[-1] if hashes else 0, token))
        entries = np.array(hashes, np.uint64)
        first = max(0, len(entries) - (spec.window or 0))
        token = next_token(spec, hashes[-1], digest(entries, 0), digest(entries[first:], first))
        answer.append(token)
        tokens.append(token)
        if token in stop:
            break
    return answer


class RollingDevice:
    """Executes plans late (`lazy`): at landing, or when the next but one is launched, as a real stream would."""

    def __init__(self, spec: MemorySpec, memory_bytes: int, seats: int, lazy: bool = False) -> None:
        self.spec = spec
        self.lazy = lazy
        sizes = unit_bytes(spec)

        def empty(kind: Kind, length: int) -> np.ndarray:
            units = memory_bytes // sizes[kind] if kind in sizes else 0
            return np.full((units, length), POISON, np.uint64)

        self.ring = spec.cell + spec.draft_room
        self.memory = {
            Kind.PAGE: empty(Kind.PAGE, spec.cell),
            Kind.WINDOW: empty(Kind.WINDOW, spec.cell),
            Kind.STATE: empty(Kind.STATE, 1),
            Kind.TAIL: empty(Kind.TAIL, self.ring),
        }
        self.board = [0] * seats
        self.computed_tokens = 0
        self._waiting: deque[tuple[Plan, dict]] = deque()

    def launch(self, plan: Plan) -> dict:
        flight: dict = {}
        self._waiting.append((plan, flight))
        if not self.lazy:
            self._execute_all()
        return flight

    def land(self, flight: dict) -> Landing:
        while "landing" not in flight:
            self._execute_next()
        return flight["landing"]

    def _execute_all(self) -> None:
        while self._waiting:
            self._execute_next()

    def _execute_next(self) -> None:
        plan, flight = self._waiting.popleft()
        flight["landing"] = self.execute(plan)

    def execute(self, plan: Plan) -> Landing:
        for kind, unit in plan.poison:
            self.memory[Kind(kind)][unit] = POISON
        first, choices = 0, {}
        for row in range(plan.rows):
            count = int(plan.end[row] - plan.start[row])
            tokens = plan.tokens[first : first + count].tolist()
            if plan.from_board[row]:
                tokens[0] = self.board[plan.seat[row]]
            choices[row] = self._extend(plan, row, tokens)
            first += count
            self.computed_tokens += count
        sampled = [choices[row] for row in plan.sampled.tolist()]
        for row, token in zip(plan.sampled.tolist(), sampled, strict=True):
            self.board[plan.seat[row]] = token
        return Landing(np.array(sampled, np.int32), None, None)

    def _extend(self, plan: Plan, row: int, tokens: list[int]) -> int:
        start, end = int(plan.start[row]), int(plan.end[row])
        state = self._recurrent(plan, row, tokens) if self.spec.state_bytes else 0
        full = window = 0
        if self.spec.page_bytes:
            full = self._attend(Kind.PAGE, plan.page_table[row], 0, 0, start, tokens)
        if self.spec.window:
            visible = max(0, end - self.spec.window)
            first = int(plan.window_first[row])
            window = self._attend(Kind.WINDOW, plan.window_table[row], first, visible, start, tokens)
        return next_token(self.spec, state, full, window)

    def _recurrent(self, plan: Plan, row: int, tokens: list[int]) -> int:
        cell, start = self.spec.cell, int(plan.start[row])
        here = start - start % cell
        state = int(self.memory[Kind.STATE][plan.read_slot[row], 0]) if here else 0
        tail = self.memory[Kind.TAIL][plan.tail[row]]
        for position in range(here, start):
            state = mix(state, int(tail[position % self.ring]))
        captures = {
            int(p): int(s)
            for r, p, s in zip(plan.captures.row, plan.captures.position, plan.captures.slot, strict=True)
            if r == row
        }
        for position, token in enumerate(tokens, start):
            state = mix(state, token)
            tail[position % self.ring] = token
            if position + 1 in captures:
                self.memory[Kind.STATE][captures[position + 1], 0] = state
        return state

    def _attend(
        self, kind: Kind, table: np.ndarray, first_cell: int, visible: int, start: int, tokens: list[int]
    ) -> int:
        """Write the new entries, continuing from the entry before them, and digest all that is visible."""
        cell, pages = self.spec.cell, self.memory[kind]

        def at(position: int) -> tuple[int, int]:
            return int(table[position // cell - first_cell]), position % cell

        chained = int(pages[at(start - 1)]) if start else 0
        for position, token in enumerate(tokens, start):
            chained = mix(chained, token)
            pages[at(position)] = chained
        end = start + len(tokens)
        low = visible // cell
        entries = pages[table[low - first_cell : -(-end // cell) - first_cell]].ravel()
        return digest(entries[visible - low * cell : end - low * cell], visible)
