"""Advances grammars beside the steps: a mask that takes long delays the row that needs it, and no other.

Most masks take a tenth of a millisecond and are found when their token lands, within a bound for each step. Those of
an ambiguous grammar take ever longer. They are found in a thread, which is fair to tenants and leaves the interpreter
lock to the engine; until then, no step has their row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

from weft.base.constraint import Constraint
from weft.base.errors import RequestError
from weft.base.tenants import KEY_SALT_BYTES
from weft.engine.sequence import Sequence

# Processor time of all masks that are found between two launches. 128 rows of usual schemas take less than half of it.
STEP_SECONDS = 0.03
# How long an engine without other work waits for a mask before it looks for new requests.
WAIT_SECONDS = 0.01


@dataclass(slots=True)
class LateMask:
    """A token that a sequence has taken, and whose mask is found in the thread. `error`: there is none."""

    sequence: Sequence
    token: int
    error: BaseException | None = None

    @property
    def tenant(self) -> bytes:
        return self.sequence.request.salt[:KEY_SALT_BYTES]

    def find(self) -> None:
        constraint = self.sequence.constraint
        assert constraint is not None
        if self.sequence.reason is not None:
            return  # aborted meanwhile
        try:
            constraint.take(self.token)
        except BaseException as error:
            self.error = error


class MaskFinder:
    def __init__(self, step_seconds: float = STEP_SECONDS) -> None:
        self._step_seconds = step_seconds
        self._left = step_seconds
        self._thread = MaskThread()

    def begin_step(self) -> None:
        self._left = self._step_seconds

    def affords(self, constraint: Constraint) -> bool:
        """Return whether this step has time for another mask of a grammar, or for a look ahead."""
        return self._left > 0 and not constraint.slow

    def spend(self, seconds: float) -> None:
        """Count processor time that masks took in this step."""
        self._left -= seconds

    def take(self, sequence: Sequence, token: int) -> bool:
        """Advance a sequence's grammar by a token; return False if the thread will. Raises `RequestError` at dead ends.

        Until `take_found` returns the sequence, it `awaits_mask`.
        """
        constraint = sequence.constraint
        assert constraint is not None
        assert not sequence.awaits_mask, "a row without a mask was sampled"
        if not constraint.foresees(token) and not self.affords(constraint):
            sequence.awaits_mask = True
            self._thread.add(LateMask(sequence, token))
            return False
        before = constraint.seconds
        try:
            constraint.take(token)
        finally:
            self.spend(constraint.seconds - before)
        return True

    def take_found(self) -> list[tuple[Sequence, RequestError | None]]:
        """Return the sequences whose masks the thread has found, or found that there is none."""
        found: list[tuple[Sequence, RequestError | None]] = []
        for mask in self._thread.take_found():
            if mask.error is not None and not isinstance(mask.error, RequestError):
                raise mask.error
            mask.sequence.awaits_mask = False
            found.append((mask.sequence, mask.error))
        return found

    def wait(self) -> None:
        """Wait for a mask, for as long as new requests may wait."""
        self._thread.wait(WAIT_SECONDS)


class MaskThread:
    """Finds masks in a thread, tenants in turn. It runs while there is work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, deque[LateMask]] = OrderedDict()
        self._found: list[LateMask] = []
        self._served = b""
        self._runs = False

    def add(self, mask: LateMask) -> None:
        with self._changed:
            self._waiting.setdefault(mask.tenant, deque()).append(mask)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="weft-masks", daemon=True).start()

    def take_found(self) -> list[LateMask]:
        # Most steps have none, and need no lock to see that.
        if not self._found:
            return []
        with self._changed:
            found, self._found = self._found, []
        return found

    def wait(self, seconds: float) -> None:
        """Wait until there is something to take, or for this long. Return at once if nothing is being looked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._found or not self._runs, seconds)

    def _work(self) -> None:
        while (mask := self._next()) is not None:
            mask.find()
            with self._changed:
                self._found.append(mask)
                self._changed.notify_all()

    def _next(self) -> LateMask | None:
        with self._changed:
            if not self._waiting:
                self._runs = False
                self._changed.notify_all()
                return None
            # A tenant's next turn comes after those of all others that wait by then.
            self._served = next((tenant for tenant in self._waiting if tenant != self._served), self._served)
            masks = self._waiting.pop(self._served)
            mask = masks.popleft()
            if masks:
                self._waiting[self._served] = masks
            return mask
