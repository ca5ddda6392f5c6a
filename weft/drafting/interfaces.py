"""What drafting needs of those who use it: sequences, devices, facts of seats, time for grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.base.constraint import Constraint
from weft.base.grammar import Grammar
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import SequenceDrafts
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.lease import Lease


class DraftedRequest(Protocol):
    @property
    def prompt(self) -> NDArray[np.int32]: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def prediction(self) -> NDArray[np.int32] | None: ...

    @property
    def grammar(self) -> Grammar | None: ...


class DraftedSequence(Protocol):
    """A running sequence. `drafting` is None if it may not have drafts."""

    seat: int
    drafting: SequenceDrafts | None
    generated: list[int]
    keys: list[Key]

    @property
    def request(self) -> DraftedRequest: ...

    @property
    def identity(self) -> PrefixIdentity: ...

    @property
    def constraint(self) -> Constraint | None: ...

    @property
    def lease(self) -> Lease | None: ...

    @property
    def leaving(self) -> bool: ...

    @property
    def length(self) -> int: ...

    def tokens(self, start: int, end: int) -> NDArray[np.int32]: ...

    def name_cells(self, cells: int) -> None: ...


class DraftingCapabilities(Protocol):
    @property
    def builds_on_flight(self) -> Callable[[int, int, int], bool] | None: ...


class DraftingDevice(Protocol):
    """The device of a drafter."""

    @property
    def capabilities(self) -> DraftingCapabilities: ...

    def launch(self, plan: Plan) -> Any: ...

    def land(self, flight: Any) -> Landing: ...


class SeatFacts(Protocol):
    """By seat: whether its samples need the tokens before them, and whether only the host can compute what they do."""

    penalised: NDArray[np.bool_]
    looks_back: NDArray[np.bool_]


class LookAheadBudget(Protocol):
    """The time that a step has for grammars."""

    def affords(self, constraint: Constraint) -> bool: ...

    def spend(self, seconds: float) -> None: ...
