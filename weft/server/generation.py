"""The sequences of one HTTP request: takes outputs of the engine, yields pieces of text.

A generation may have several sequences (`n`, lists of prompts). It knows no API: routes shape the pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from time import perf_counter, time

from weft.answers.followed import FollowedAnswer, Piece
from weft.backends.backend import Backend
from weft.backends.output_stream import OutputStream
from weft.base.errors import RequestError
from weft.engine.events import FinishReason, Output
from weft.server.access.auth import Tenant
from weft.server.access.rates import Used
from weft.server.metrics.registry import Meter, Metrics
from weft.server.texts.grammars import Form

# Of several answers, the first of these tells how it ended.
ENDS = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
# Length of a prompt that takes a millisecond to send.
LONG_PROMPT = 1 << 15


@dataclass(slots=True)
class OpenSequence:
    """An answer, and the engine's sequence behind it."""

    followed: FollowedAnswer
    stream: OutputStream
    meter: Meter
    ended: bool = False

    def take(self, outputs: list[Output], backend: Backend) -> Piece:
        """Process the engine's outputs. A stop string ends the engine's sequence too."""
        if self.stream.report is not None:
            self.update_report()
        piece = self.followed.take(outputs)
        if piece.stops_engine:
            backend.finish(self.stream)
        if piece.outputs:
            self.meter.token(len(piece.outputs))
        return piece

    def update_report(self) -> None:
        self.followed.report = self.stream.report or self.followed.report

    def measure(self) -> None:
        """Record the metrics of a sequence that is over."""
        self.update_report()
        followed, report = self.followed, self.followed.report
        reason = FinishReason.ABORT if followed.finish is None else followed.finish
        prompt = followed.request.known_length
        self.meter.finished(reason, prompt, report.cached_tokens, followed.generated, report.queued_seconds)


class Generation:
    """Iterate once over its pieces; always `close` it. A sequence's last piece has its finish."""

    def __init__(
        self,
        names: Iterable[str],
        tenant: Tenant,
        backend: Backend,
        metrics: Metrics,
        closed: Callable[[Generation], None] = lambda generation: None,
        form: Form | None = None,
        model: str = "",
    ) -> None:
        self.model = model
        self.names = tuple(dict.fromkeys(names))
        # On the clocks of Unix time and of `perf_counter`.
        self.started_at, self.started = time(), perf_counter()
        # The id of the HTTP request, once its response begins.
        self.request_id: str | None = None
        self.tenant = tenant
        self.sequences: list[FollowedAnswer] = []
        self._open: list[OpenSequence] = []
        self._backend = backend
        self._metrics = metrics
        self._closed = closed
        self._form = form
        self._aborted = False

    async def submit(self, answers: list[FollowedAnswer], save_to: str | None = None) -> None:
        """Submit the requests of all answers, or none; or the only one, whose prompt is written to a new file."""
        tasks: list[asyncio.Future[OpenSequence]] = []
        try:
            for followed in answers:
                tasks.append(asyncio.ensure_future(self._submit(followed, save_to)))
                if len(followed.request.prompt) > LONG_PROMPT:
                    # Each takes milliseconds to send, so other streams run between two.
                    await asyncio.sleep(0)
            self._add(await asyncio.gather(*tasks))
            if self._aborted:
                self.abort()
        except BaseException:
            for task in tasks:
                task.cancel()
            # Requests that were accepted meanwhile must end too; the backend aborts a cancelled submission.
            found = await asyncio.gather(*tasks, return_exceptions=True)
            self._add([each for each in found if isinstance(each, OpenSequence)])
            self.close()
            raise

    async def _submit(self, followed: FollowedAnswer, save_to: str | None) -> OpenSequence:
        meter = self._metrics.meter()
        meter.started()
        try:
            stream = await self._backend.submit(followed.request, *([] if save_to is None else [save_to]))
        except BaseException:
            meter.finished("refused", len(followed.request.prompt), 0, 0)
            raise
        return OpenSequence(followed, stream, meter)

    @property
    def open(self) -> list[OpenSequence]:
        """The answers with what was measured of them."""
        return self._open

    def _add(self, opened: list[OpenSequence]) -> None:
        self._open += opened
        self.sequences += [each.followed for each in opened]

    @property
    def scores(self) -> int:
        """Return the number of log-probabilities to report."""
        found = 0
        for sequence in self.sequences:
            tops, prompt_tops = sequence.request.params.logprobs, sequence.scored_by.request.params.prompt_logprobs
            if tops is not None:
                found += len(sequence.outputs) * (1 + tops)
            if prompt_tops is not None:
                found += len(sequence.prompt_scores) * (1 + prompt_tops)
        return found

    @property
    def size(self) -> int:
        """Return the approximate number of characters and scores to encode, including the prompts."""
        return self.scores + sum(len(each.request.prompt) + 4 * each.generated for each in self.sequences)

    def used(self) -> Used:
        """Return the tokens so far. Answers to one prompt share it, so it counts once. A fork's has its answer."""
        prompts = {id(each.request.prompt): each for each in reversed(self.sequences)}.values()
        return Used(
            sum(each.request.known_length for each in prompts),
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
        found = [each.meter.first_token_seconds for each in self._open]
        return min((each for each in found if each is not None), default=None)

    @property
    def finish(self) -> FinishReason | None:
        """Return how the answers ended; None if none has."""
        found = {each.finish for each in self.sequences}
        return next((reason for reason in ENDS if reason in found), None)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._follow(self._open[0]) if len(self._open) == 1 else self._merge()

    async def _follow(self, sequence: OpenSequence) -> AsyncIterator[Piece]:
        last: Piece | None = None
        async for outputs in sequence.stream:
            if last is not None:
                continue  # a stop string ended it; only the engine's report is still expected
            piece = sequence.take(outputs, self._backend)
            if piece.finish is None:
                yield piece
            else:
                last = piece
        sequence.ended = True
        sequence.measure()
        if last is not None:
            yield last

    async def _merge(self) -> AsyncIterator[Piece]:
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._feed(sequence, queue)) for sequence in self._open]
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

    async def _feed(self, sequence: OpenSequence, queue: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async for piece in self._follow(sequence):
                queue.put_nowait(piece)
        except Exception as error:  # raised again where the queue is read
            queue.put_nowait(error)
        queue.put_nowait(None)

    async def collect(self) -> list[FollowedAnswer]:
        """Wait for all answers; raise if one of them failed."""
        async for piece in self:
            self.check(piece)
        return self.sequences

    def check(self, piece: Piece) -> None:
        """Raise if the answer failed."""
        if piece.finish is FinishReason.ERROR:
            failed = self.sequences[piece.index]
            error = RequestError(failed.error or "the answer was not completed", 503, field=failed.error_field)
            raise error if self._form is None else self._form.named(error)

    def abort(self) -> None:
        """Abort sequences that run or are about to; their pieces then report it."""
        self._aborted = True
        for sequence in self._open:
            if not sequence.ended:
                self._backend.abort(sequence.stream)

    def close(self) -> None:
        """Abort what is left: no reader follows."""
        self.abort()
        for sequence in self._open:
            sequence.measure()
        self._closed(self)
