"""Tracks one offline request from the engine's outputs to its result, and defers Ctrl-C. No torch."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from weft.engine.events import FinishReason, Output
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.offline.result import Chunk, Result, TokenScore
from weft.text.answer import Answer


class Track:
    """One open request: its answer so far, and its chunks if it is streamed."""

    def __init__(self, sequence: int, request: Request, answer: Answer) -> None:
        self.sequence = sequence
        self.request = request
        self.answer = answer
        self.scores: list[TokenScore] | None = None if request.params.logprobs is None else []
        self.chunks: deque[Chunk] | None = None
        self.result: Result | None = None
        self._last: tuple[str, tuple[int, ...], tuple[TokenScore, ...] | None] = ("", (), None)

    def take(self, output: Output) -> FinishReason | None:
        """Process the output of a step; return why the answer ends, if it does."""
        text = ""
        new: tuple[TokenScore, ...] | None = None if self.scores is None else ()
        if output.token is not None:
            text = self.answer.feed(output.token)
            if self.scores is not None and output.logprob is not None:
                new = (TokenScore(output.token, output.logprob, tuple(output.top or ())),)
                self.scores.extend(new)
        if output.finish is not None:
            text += self.answer.finish()
        finish = FinishReason.STOP if self.answer.stopped else output.finish
        chunk = (text, () if output.token is None else (output.token,), new)
        if finish is None and self.chunks is not None:
            self.chunks.append(Chunk(*chunk))
        self._last = chunk
        return finish

    def complete(self, finish: FinishReason, error: str | None, engine: Engine) -> None:
        report, prompt = engine.report(self.sequence), self.request.prompt.tolist()
        scores: list[TokenScore | None] | None = None
        if self.request.params.prompt_logprobs is not None:
            first = 1 + min(self.request.params.prompt_logprobs_start, len(prompt) - 1)
            known = zip(prompt[first:], report.prompt_scores)
            scores = [None] * first
            scores += [TokenScore(token, found.logprob, tuple(found.top)) for token, found in known]
        self.result = Result(
            text=self.answer.text,
            token_ids=self.answer.tokens,
            finish_reason=str(finish),
            stop_reason=self.answer.stop_reason,
            logprobs=self.scores,
            prompt_logprobs=scores,
            prompt_token_ids=prompt,
            cached_tokens=report.cached_tokens,
            miss=report.miss,
            preemptions=report.preemptions,
            error=error,
        )
        if self.chunks is not None:
            self.chunks.append(Chunk(*self._last, finish_reason=str(finish), result=self.result))


class InterruptLater:
    """Defers Ctrl-C until a step is complete, so that the engine stays usable. A second one interrupts at once."""

    def __enter__(self) -> None:
        self._pending = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending and callable(self._previous):
            self._previous(number, frame)
        self._pending = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._pending:
                self._previous(signal.SIGINT, None)
