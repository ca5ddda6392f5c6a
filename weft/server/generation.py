"""The sequences of one HTTP request: takes outputs of the engine, yields pieces of text.

A run may have several sequences (`n`, lists of prompts). It knows no API: routes shape the pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from weft.base.errors import RequestError
from weft.engine.events import FinishReason, Output, Report
from weft.engine.request import Request
from weft.server.auth import Tenant
from weft.server.backend import Backend, Stream
from weft.server.grammars import Form
from weft.server.metrics import Meter, Metrics
from weft.server.rates import Used
from weft.text.answer import Answer

# Of several answers, the first of these tells how the run ended.
ENDS = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
# Length of a prompt that takes a millisecond to send.
LONG_PROMPT = 1 << 15


@dataclass(slots=True)
class Piece:
    """Output of one sequence since its last piece. `outputs` has the tokens and their scores."""

    index: int
    text: str
    outputs: list[Output]
    finish: FinishReason | None = None
    error: str | None = None
    error_field: str | None = None


@dataclass(slots=True)
class Followed:
    """One sequence and its answer so far. `text_ends[i]` is the length of the text after the i-th token."""

    index: int
    request: Request
    answer: Answer
    stream: Stream
    meter: Meter
    outputs: list[Output] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    error_field: str | None = None
    _length: int = 0

    def take(self, outputs: list[Output], backend: Backend) -> Piece:
        """Process the engine's outputs. A stop string ends the answer and the engine's sequence."""
        pieces: list[str] = []
        new: list[Output] = []
        for output in outputs:
            if self.finish is None and output.token is not None:
                text = self.answer.feed(output.token)
                pieces.append(text)
                new.append(output)
                self._length += len(text)
                self.text_ends.append(self._length)
            if output.finish is not None:
                self._end(output, pieces)
            elif self.answer.stopped and self.finish is None:
                self.finish = FinishReason.STOP
                backend.finish(self.stream)
        if new:
            self.outputs += new
            self.meter.token(len(new))
        return Piece(self.index, "".join(pieces), new, self.finish, self.error, self.error_field)

    def _end(self, output: Output, pieces: list[str]) -> None:
        if self.finish is None:
            pieces.append(self.answer.finish())
            self.finish = FinishReason.STOP if self.answer.stopped else output.finish
            self.error, self.error_field = output.error, output.error_field

    def measured(self) -> None:
        """Record the metrics of a sequence that is over."""
        reason = FinishReason.ABORT if self.finish is None else self.finish
        report = self.report
        self.meter.finished(
            reason, len(self.request.prompt), report.cached_tokens, self.generated, report.queued_seconds
        )

    def begins(self, count: int, shift: int = 0) -> list[int]:
        """Return the positions in the text where the last `count` tokens begin."""
        first = len(self.text_ends) - count
        ends = self.text_ends[max(first - 1, 0) : len(self.text_ends) - 1]
        return [shift + end for end in ([0, *ends] if first <= 0 else ends)]

    @property
    def cut(self) -> bool:
        """Return whether the client's stop string or stop token ended it."""
        return self.answer.stop_reason is not None

    @property
    def report(self) -> Report:
        return self.stream.report or Report()

    @property
    def generated(self) -> int:
        return len(self.answer.tokens)


class Generation:
    """Iterate once over its pieces; always `close` it. A sequence's last piece has its finish."""

    def __init__(
        self,
        names: Iterable[str],
        tenant: Tenant,
        backend: Backend,
        metrics: Metrics,
        closed: Callable[[Generation], None] = lambda run: None,
        form: Form | None = None,
    ) -> None:
        self.names = frozenset(names)
        self.tenant = tenant
        self.sequences: list[Followed] = []
        self._backend = backend
        self._metrics = metrics
        self._closed = closed
        self._form = form
        self._ended: set[int] = set()
        self._aborted = False

    async def submit(self, requests: list[Request], answers: list[Answer]) -> None:
        """Submit all requests, or none."""
        tasks: list[asyncio.Future[Followed]] = []
        try:
            for index, (request, answer) in enumerate(zip(requests, answers)):
                tasks.append(asyncio.ensure_future(self._submit(index, request, answer)))
                if len(request.prompt) > LONG_PROMPT:
                    # Each takes milliseconds to send, so other streams run between two.
                    await asyncio.sleep(0)
            self.sequences += await asyncio.gather(*tasks)
            if self._aborted:
                self.abort()
        except BaseException:
            for task in tasks:
                task.cancel()
            # Requests that were accepted meanwhile must end too; the backend aborts a cancelled submission.
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Followed):
                    self.sequences.append(found)
            self.close()
            raise

    async def _submit(self, index: int, request: Request, answer: Answer) -> Followed:
        meter = self._metrics.meter()
        meter.started()
        try:
            stream = await self._backend.submit(request)
        except BaseException:
            meter.finished("refused", len(request.prompt), 0, 0)
            raise
        return Followed(index, request, answer, stream, meter)

    @property
    def scores(self) -> int:
        """Return the number of log-probabilities to report."""
        found = 0
        for sequence in self.sequences:
            params = sequence.request.params
            if params.logprobs is not None:
                found += len(sequence.outputs) * (1 + params.logprobs)
            if params.prompt_logprobs is not None:
                found += len(sequence.report.prompt_scores) * (1 + params.prompt_logprobs)
        return found

    @property
    def size(self) -> int:
        """Return the approximate number of characters and scores to encode, including the prompts."""
        return self.scores + sum(len(each.request.prompt) + 4 * each.generated for each in self.sequences)

    def used(self) -> Used:
        """Return the tokens so far. Answers to one prompt share it, so it counts once."""
        prompts = {id(each.request.prompt): each for each in reversed(self.sequences)}.values()
        return Used(
            sum(len(each.request.prompt) for each in prompts),
            sum(each.report.cached_tokens for each in prompts),
            sum(each.generated for each in self.sequences),
        )

    @property
    def queued_seconds(self) -> float:
        """Return the longest time that one of the answers waited before it first ran."""
        return max((each.report.queued_seconds for each in self.sequences), default=0.0)

    @property
    def first_token_seconds(self) -> float | None:
        """Return when the first token of all arrived, on the clock of `perf_counter`."""
        found = [each.meter.first_token_seconds for each in self.sequences]
        return min((each for each in found if each is not None), default=None)

    @property
    def finish(self) -> FinishReason | None:
        """Return how the answers ended; None if none has."""
        found = {each.finish for each in self.sequences}
        return next((reason for reason in ENDS if reason in found), None)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._follow(self.sequences[0]) if len(self.sequences) == 1 else self._merge()

    async def _follow(self, sequence: Followed) -> AsyncIterator[Piece]:
        finished = False
        async for outputs in sequence.stream:
            if finished:
                continue  # a stop string ended it; only the engine's report is still expected
            piece = sequence.take(outputs, self._backend)
            if piece.finish is None:
                yield piece
            else:
                finished = True
                last = piece
        self._ended.add(sequence.index)
        sequence.measured()
        if finished:
            yield last

    async def _merge(self) -> AsyncIterator[Piece]:
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._feed(sequence, queue)) for sequence in self.sequences]
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if found is None:
                    left -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()

    async def _feed(self, sequence: Followed, queue: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async for piece in self._follow(sequence):
                queue.put_nowait(piece)
        except Exception as error:  # raised again where the queue is read
            queue.put_nowait(error)
        queue.put_nowait(None)

    async def collect(self) -> list[Followed]:
        """Wait for all answers; raise if one of them failed."""
        async for piece in self:
            self.check(piece)
        return self.sequences

    def check(self, piece: Piece) -> None:
        """Raise if the answer failed."""
        if piece.finish is FinishReason.ERROR:
            error = RequestError(piece.error or "the answer was not completed", 503, field=piece.error_field)
            raise error if self._form is None else self._form.named(error)

    def abort(self) -> None:
        """Abort sequences that run or are about to; their pieces then report it."""
        self._aborted = True
        for sequence in self.sequences:
            if sequence.index not in self._ended:
                self._backend.abort(sequence.stream)

    def close(self) -> None:
        """Abort what is left: no reader follows."""
        self.abort()
        for sequence in self.sequences:
            sequence.measured()
        self._closed(self)
