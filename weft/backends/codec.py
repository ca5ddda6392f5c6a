"""Encodes and decodes the messages of engines. Decoding runs no code and is bounded in size."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from weft.backends import messages as wire
from weft.backends.backend import ModelInfo
from weft.base.errors import InvalidField, RequestError, WeftError
from weft.base.plan import Scores
from weft.base.tenants import Dropped
from weft.engine.events import Output, PromptScores, Report
from weft.engine.protocol import (
    Command,
    Drop,
    End,
    EngineNews,
    Event,
    Outputs,
    Question,
    Refusal,
    Refuse,
    Replies,
    RequestFailed,
    Shutdown,
    Stopped,
    Submit,
    Subscribe,
)
from weft.engine.request import Request
from weft.memory.journal import CacheChanges
from weft.wire.frames import HEADER_BYTES, MAX_FRAME_BYTES, ProtocolError

# Maximum characters of an error message for people.
MAX_WORDS = 4000

_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value)).encode
_from_front = msgspec.msgpack.Decoder(wire.FromFront)
_from_engine = msgspec.msgpack.Decoder(wire.FromEngine)
_request = msgspec.msgpack.Decoder(wire.RequestBody)


# frames ---------------------------------------------------------------------------------------------------------------


def frame(message: wire.EngineMessage) -> bytes:
    body = _encode(message)
    assert len(body) <= MAX_FRAME_BYTES, f"message has {len(body)} bytes"
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} cannot be encoded")


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message: {error}") from error


# commands -------------------------------------------------------------------------------------------------------------


def encode_command(command: Command) -> bytes:
    match command:
        case Submit(number, request):
            return frame(wire.SubmitMessage(number, _encode_request(request)))
        case End(number, stopped):
            return frame(wire.EndMessage(number, stopped))
        case Question(number, topic, limit):
            return frame(wire.QuestionMessage(number, topic, limit))
        case Drop(number, tenant, prefix):
            return frame(wire.DropMessage(number, tenant, prefix))
        case Subscribe(wanted):
            return frame(wire.SubscribeMessage(wanted))
        case _:
            return frame(wire.ShutdownMessage())


def _encode_request(request: Request) -> msgspec.Raw:
    prompt = np.ascontiguousarray(request.prompt, "<i4").tobytes()
    if len(prompt) > wire.MAX_PROMPT_BYTES:
        raise InvalidField("prompt", f"has {len(request.prompt)} tokens; the limit is {wire.MAX_PROMPT_BYTES // 4}")
    prediction = None if request.prediction is None else np.ascontiguousarray(request.prediction, "<i4").tobytes()
    body = wire.RequestBody(
        prompt,
        request.params,
        request.stop_tokens,
        request.salt,
        request.priority,
        request.snapshots,
        request.grammar,
        request.boundaries,
        prediction,
        request.send_to,
    )
    try:
        return msgspec.Raw(_encode(body))
    except (OverflowError, UnicodeEncodeError, NotImplementedError) as error:
        raise RequestError(f"the request has a value that cannot be sent: {error}") from error


def decode_begin(body: bytes) -> wire.Begin:
    try:
        message = _decode(_from_front, body)
    except WeftError as error:
        raise ProtocolError(str(error)) from error
    if not isinstance(message, wire.Begin):
        raise ProtocolError("the first message must name the model to load")
    return message


def decode_command(body: bytes) -> Command:
    """Return a command that the engine can execute; one with an invalid request becomes a refusal."""
    message = _decode(_from_front, body)
    match message:
        case wire.SubmitMessage(number, raw):
            try:
                return Submit(number, _decode_request(raw))
            except RequestError as error:
                return Refuse(number, str(error), error.field)
            except ProtocolError as error:
                return Refuse(number, str(error))
        case wire.EndMessage(number, stopped):
            return End(number, stopped)
        case wire.QuestionMessage(number, topic, limit):
            return Question(number, topic, limit)
        case wire.DropMessage(number, tenant, prefix):
            return Drop(number, tenant, prefix)
        case wire.SubscribeMessage(wanted):
            return Subscribe(wanted)
        case wire.ShutdownMessage():
            return Shutdown()
    raise ProtocolError("the model is already loaded")


def _decode_request(raw: msgspec.Raw) -> Request:
    body = _decode(_request, raw)
    if len(body.prompt) % 4 or len(body.prediction or b"") % 4:
        raise ProtocolError("the prompt or the prediction is not a list of tokens")
    grammar = body.grammar
    if grammar is not None and (length := len(grammar.text) + len(grammar.source or "")) > wire.MAX_TEXT:
        raise InvalidField("grammar", f"has {length} characters; the limit is {wire.MAX_TEXT}")
    prompt = np.frombuffer(body.prompt, "<i4").astype(np.int32)
    return Request(
        prompt,
        body.params,
        body.stop_tokens,
        body.salt,
        body.priority,
        body.snapshots,
        body.grammar,
        body.boundaries,
        None if body.prediction is None else np.frombuffer(body.prediction, "<i4").astype(np.int32),
        body.send_to,
    )


# events ---------------------------------------------------------------------------------------------------------------


def encode_event(event: Event) -> bytes:
    match event:
        case Outputs():
            return _encode_scores(event) + frame(_outputs_message(event))
        case Replies(accepted, refused, answers):
            refusals = [_refusal(each) for each in refused]
            return frame(wire.RepliesMessage(accepted, refusals, answers))
        case RequestFailed(number, message):
            return frame(wire.FailedMessage(number, message[:MAX_WORDS]))
        case EngineNews(changes, load):
            return frame(wire.NewsMessage(None if changes is None else _changes_body(changes), load))
        case Stopped(message):
            return frame(wire.StoppedMessage(message))


def _outputs_message(event: Outputs) -> wire.OutputsMessage:
    scores, endings = [], []
    for row, output in enumerate(event.outputs):
        if output.logprob is not None:
            tops = output.top or ()
            scores.append(wire.ScoreBody(row, output.logprob, [t for t, _ in tops], [p for _, p in tops]))
        if output.finish is not None:
            endings.append(_ending(row, output, event.reports[output.sequence]))
    numbers = [output.sequence for output in event.outputs]
    digests = {row: output.digest for row, output in enumerate(event.outputs) if output.digest is not None}
    return wire.OutputsMessage(numbers, [output.token for output in event.outputs], scores, endings, digests)


def _changes_body(changes: CacheChanges) -> wire.ChangesBody:
    tokens = np.array(changes.tokens, "<i4").tobytes()
    parts = (b"".join(changes.keys), tokens, changes.tiers, changes.held)
    dropped = tuple(wire.DroppedBody(each.tenant, each.prefix) for each in changes.dropped)
    return wire.ChangesBody(changes.epoch, changes.first, changes.fresh, *parts, changes.drops, dropped)


def _changes(body: wire.ChangesBody) -> CacheChanges:
    size = wire.KEY_BYTES
    if len(body.keys) % size:
        raise ProtocolError(f"keys must have {size} bytes each")
    keys = tuple(body.keys[start : start + size] for start in range(0, len(body.keys), size))
    try:
        tokens = tuple(np.frombuffer(body.tokens, "<i4").tolist())
        dropped = tuple(Dropped(each.tenant, each.prefix) for each in body.dropped)
        return CacheChanges(
            body.epoch, body.first, body.fresh, keys, tokens, body.tiers, body.held, body.drops, dropped
        )
    except ValueError as error:
        raise ProtocolError(f"changes do not match: {error}") from error


def _refusal(refusal: Refusal) -> wire.RefusalBody:
    field = _bounded(refusal.field)
    return wire.RefusalBody(refusal.number, refusal.message[:MAX_WORDS], refusal.status, field)


def _bounded(text: str | None) -> str | None:
    return None if text is None else text[:MAX_WORDS]


def _ending(row: int, output: Output, report: Report) -> wire.EndingBody:
    assert output.finish is not None
    error, field = _bounded(output.error), _bounded(output.error_field)
    return wire.EndingBody(
        row,
        output.finish,
        error,
        field,
        report.cached_tokens,
        report.loaded_tokens,
        report.disk_tokens,
        report.remote_tokens,
        report.miss,
        report.preemptions,
        report.queued_seconds,
        report.drafts,
    )


def _encode_scores(event: Outputs) -> bytes:
    """Encode the prompt scores of requests that end with this step."""
    frames = []
    for number, report in event.reports.items():
        for piece in report.prompt_scores.pieces(wire.SCORES_PER_PIECE):
            frames.append(
                wire.ScoresMessage(
                    number,
                    piece.top_token.shape[1],
                    piece.chosen.astype("<f4").tobytes(),
                    piece.top_token.astype("<i4").tobytes(),
                    piece.top_logprob.astype("<f4").tobytes(),
                )
            )
    return b"".join(map(frame, frames))


class EventReader:
    """Reads the messages of an engine process; keeps prompt scores until the output that they belong to."""

    def __init__(self) -> None:
        self._scores: dict[int, PromptScores] = {}

    def read(self, body: bytes) -> Event | ModelInfo | wire.Unloadable | None:
        """Return the event of a message, or None if it is only a part of one."""
        message = _decode(_from_engine, body)
        match message:
            case wire.OutputsMessage():
                return self._outputs(message)
            case wire.ScoresMessage():
                self._scores.setdefault(message.number, PromptScores()).add(_prompt_scores(message))
                return None
            case wire.RepliesMessage(accepted, refused, answers):
                return Replies(
                    accepted, [Refusal(each.number, each.message, each.status, each.field) for each in refused], answers
                )
            case wire.StoppedMessage(message=text):
                return Stopped(text)
            case wire.FailedMessage(number, text):
                return RequestFailed(number, text)
            case wire.NewsMessage(changes, load):
                return EngineNews(None if changes is None else _changes(changes), load)
            case wire.Ready():
                return ModelInfo(**msgspec.structs.asdict(message))
        assert isinstance(message, wire.Unloadable)
        return message

    def _outputs(self, message: wire.OutputsMessage) -> Outputs:
        if len(message.numbers) != len(message.tokens):
            raise ProtocolError("columns have different lengths")
        outputs = list(map(Output, message.numbers, message.tokens))
        reports: dict[int, Report] = {}
        try:
            for score in message.scores:
                output = outputs[score.row]
                output.logprob = score.logprob
                output.top = list(zip(score.tokens, score.logprobs, strict=True))
            for row, digest in message.digests.items():
                outputs[row].digest = digest
            for ending in message.endings:
                output = outputs[ending.row]
                output.finish, output.error, output.error_field = ending.finish, ending.error, ending.error_field
                reports[output.sequence] = self._report(output.sequence, ending)
        except (IndexError, ValueError) as error:
            raise ProtocolError(f"columns do not match: {error}") from error
        return Outputs(outputs, reports)

    def _report(self, number: int, ending: wire.EndingBody) -> Report:
        return Report(
            cached_tokens=ending.cached_tokens,
            loaded_tokens=ending.loaded_tokens,
            disk_tokens=ending.disk_tokens,
            remote_tokens=ending.remote_tokens,
            miss=ending.miss,
            preemptions=ending.preemptions,
            queued_seconds=ending.queued_seconds,
            prompt_scores=self._scores.pop(number, PromptScores()),
            drafts=ending.drafts,
        )


def _prompt_scores(message: wire.ScoresMessage) -> Scores:
    try:
        logprobs = np.frombuffer(message.logprobs, "<f4")
        shape = (len(logprobs), message.tops)
        tokens = np.frombuffer(message.top_tokens, "<i4").reshape(shape)
        return Scores(logprobs, tokens, np.frombuffer(message.top_logprobs, "<f4").reshape(shape))
    except ValueError as error:
        raise ProtocolError(f"scores do not match: {error}") from error
