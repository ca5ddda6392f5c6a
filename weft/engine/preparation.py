"""Compiles constraints outside the engine's thread, because compiling a grammar may take longer than a step.

A request with a grammar enters the queue when its constraint is ready; running rows are not affected.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from weft.base.constraint import Constraint
from weft.base.errors import InvalidField, RequestError
from weft.engine.request import Request

log = logging.getLogger("weft")

# One long compilation must not delay the next; more threads would take cores from the engine.
THREADS = 2
BROKEN = "cannot be used: compiling it failed"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request whose constraint is compiled, or the error."""

    number: int
    request: Request
    constraint: Constraint | None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Wake:
    """A thread of this process has something for the engine to take between steps."""


# What threads of the engine's own process send to it.
OwnCommand = PreparedRequest | Wake


class Preparation:
    """Calls `make` in its own threads, then `done`. The threads start with the first request."""

    def __init__(self, make: Callable[[Request], Constraint | None], done: Callable[[PreparedRequest], None]) -> None:
        self._make = make
        self._done = done
        self._waiting: SimpleQueue[tuple[int, Request] | None] = SimpleQueue()
        self._begun = False

    def begin(self, number: int, request: Request) -> None:
        if not self._begun:
            self._begun = True
            for _ in range(THREADS):
                threading.Thread(target=self._work, name="weft-preparation", daemon=True).start()
        self._waiting.put((number, request))

    def end(self) -> None:
        """Accept no more requests; the threads end when they have finished the pending ones."""
        for _ in range(THREADS if self._begun else 0):
            self._waiting.put(None)

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            self._done(self._prepared(*asked))

    def _prepared(self, number: int, request: Request) -> PreparedRequest:
        try:
            return PreparedRequest(number, request, self._make(request))
        except RequestError as error:
            return PreparedRequest(number, request, None, error)
        except BaseException:  # third-party code: any failure is this request's error alone
            log.exception("cannot compile a grammar")
            return PreparedRequest(number, request, None, InvalidField("grammar", BROKEN))
