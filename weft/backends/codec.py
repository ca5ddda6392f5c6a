"""Encodes and decodes the messages of engines. Decoding runs no code and is bounded in size.

The messages themselves are those of `weft.engine.protocol`; here is only what the start of an engine needs besides.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from weft.backends.backend import ModelInfo
from weft.base.errors import InvalidField, RequestError, WeftError
from weft.base.logs import LogFormat
from weft.base.options import Options
from weft.base.plan import Scores
from weft.base.sampling import SamplingParams
from weft.base.transfers import TransferSettings
from weft.engine.events import Output, PromptScores, Report, VectorSum
from weft.engine.protocol import (
    SCORES_PER_PIECE,
    Command,
    Drop,
    End,
    EngineNews,
    Event,
    LoadPrompt,
    Outputs,
    Question,
    Refuse,
    Replies,
    RequestFailed,
    SavePrompt,
    ScoresPiece,
    Shutdown,
    Stopped,
    Submit,
    Subscribe,
    Topic,
    VectorPiece,
    WatchRequests,
)
from weft.engine.request import Request
from weft.engine.tracing.events import TraceBatch
from weft.wire.frames import ProtocolError
from weft.wire.messages import Message, Number, Text, Writer, plain, reader
from weft.wire.versions import Protocol

MAX_PROMPT_BYTES = 1 << 26
MAX_GRAMMAR = 1 << 20
# Between routers and replicas. A version that adds fields names them here, and `docs/design-serving.md` has the rules.
FLEET = Protocol(
    "fleet",
    6,
    oldest=5,
    added={
        5: {Request: frozenset({"answered", "keeps_answer", "retain"})},
        6: {
            SamplingParams: frozenset({"vector_from"}),
            Report: frozenset({"vector", "loading_seconds"}),
            Output: frozenset({"drafted"}),
            Request: frozenset({"name"}),
            Question: frozenset({"name"}),
        },
    },
)


class Begin(Message, tag="begin"):
    """The first message to an engine process: the model to load, and its options."""

    options: Options
    progress: bool
    log_level: Annotated[int, Meta(ge=0, le=100)]
    log_format: LogFormat = "text"
    # CPU cores to stay on; empty: all.
    cores: Annotated[tuple[int, ...], Meta(max_length=4096)] = ()
    transfer: TransferSettings | None = None


class Unloadable(Message, tag="unloadable"):
    """The model cannot be loaded: a message for the user, and whether an option is at fault."""

    message: Text
    option: bool


class Submission(msgspec.Struct, array_like=True, tag="submit"):
    """The beginning of a `Submit`, whose request may be invalid."""

    number: Number


class SavedSubmission(msgspec.Struct, array_like=True, tag="save"):
    """The beginning of a `SavePrompt`, whose request may be invalid."""

    number: Number


FromFront = Begin | Submit | SavePrompt | LoadPrompt | End | Question | Drop | Subscribe | WatchRequests | Shutdown
FromEngine = (
    ModelInfo
    | Unloadable
    | Replies
    | ScoresPiece
    | VectorPiece
    | Outputs
    | Stopped
    | RequestFailed
    | EngineNews
    | TraceBatch
)


def _simple(value: Any) -> Any:
    """Return what stands for a value that MessagePack does not know."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, "<i4").tobytes()
    # Scores and vectors have been sent in pieces.
    return None if isinstance(value, PromptScores | VectorSum) else plain(value)


def _built(kind: type, value: Any) -> Any:
    if kind in (PromptScores, VectorSum) and value is None:
        return kind()
    if not isinstance(value, bytes) or len(value) % 4 or len(value) > MAX_PROMPT_BYTES:
        raise ValueError("not a list of tokens")
    return np.frombuffer(value, "<i4").astype(np.int32)


_read_command = reader(FromFront, build=_built)
_read_submission = reader(Submission | SavedSubmission)
_read_event = reader(FromEngine, build=_built)


def watches(command: Command) -> bool:
    """Return whether a command asks what requests do."""
    return isinstance(command, WatchRequests) or (isinstance(command, Question) and command.topic is Topic.REQUEST)


class EngineWriter(Writer):
    """Writes commands and events to a peer that speaks a version of a protocol."""

    def __init__(self, protocol: Protocol = FLEET, version: int | None = None) -> None:
        super().__init__(_simple, protocol.newer(protocol.version if version is None else version))

    def command(self, command: Command) -> bytes:
        if not isinstance(command, Submit):
            if Question in self._newer and watches(command):
                raise RequestError("this replica runs an older version of Weft, which reports no requests", 503)
            return self.frame(command)
        prompt, unknown = command.request.known, self._newer.get(Request, frozenset())
        if command.request.answered is not None and "answered" in unknown:
            raise RequestError("this replica runs an older version of Weft, which knows no forks; update it", 503)
        if command.request.params.vector_from is not None and "vector_from" in self._newer.get(SamplingParams, ()):
            raise RequestError("this replica runs an older version of Weft, which knows no embeddings; update it", 503)
        if 4 * len(prompt) > MAX_PROMPT_BYTES:
            raise InvalidField("prompt", f"has {len(prompt)} tokens; the limit is {MAX_PROMPT_BYTES // 4}")
        try:
            return self.frame(command)
        except (OverflowError, UnicodeEncodeError, NotImplementedError) as error:
            raise RequestError(f"the request has a value that cannot be sent: {error}") from error

    def event(self, event: Event) -> bytes:
        if isinstance(event, Outputs) and event.reports:
            return b"".join(map(self.frame, [*_score_pieces(event), *_vectors(event)])) + self.frame(event)
        return self.frame(event)


def decode_begin(body: bytes) -> Begin:
    try:
        message = _read_command(body)
    except WeftError as error:
        raise ProtocolError(str(error)) from error
    if not isinstance(message, Begin):
        raise ProtocolError("the first message must name the model to load")
    return message


def decode_command(body: bytes) -> Command:
    """Return a command that the engine can execute; one with an invalid request becomes a refusal."""
    try:
        message: FromFront = _read_command(body)
        if isinstance(message, Submit) and (grammar := message.request.grammar) is not None:
            length = len(grammar.text) + len(grammar.source or "")
            if length > MAX_GRAMMAR:
                raise InvalidField("grammar", f"has {length} characters; the limit is {MAX_GRAMMAR}")
    except RequestError as error:
        return Refuse(_read_submission(body).number, str(error), error.field)
    except ProtocolError as error:
        try:
            number = _read_submission(body).number
        except ProtocolError:
            raise error from None
        return Refuse(number, str(error))
    if isinstance(message, Begin):
        raise ProtocolError("the model is already loaded")
    return message


def _score_pieces(event: Outputs) -> list[ScoresPiece]:
    """Return the prompt scores of requests that end with this step."""
    return [
        ScoresPiece(
            number,
            piece.top_token.shape[1],
            piece.chosen.astype("<f4").tobytes(),
            piece.top_token.astype("<i4").tobytes(),
            piece.top_logprob.astype("<f4").tobytes(),
        )
        for number, report in event.reports.items()
        for piece in report.prompt_scores.pieces(SCORES_PER_PIECE)
    ]


def _vectors(event: Outputs) -> list[VectorPiece]:
    """Return the vectors of requests that end with this step."""
    found = ((number, report.vector.mean) for number, report in event.reports.items())
    return [VectorPiece(number, mean.astype("<f4").tobytes()) for number, mean in found if mean is not None]


class EventReader:
    """Reads the messages of an engine process; keeps scores and vectors until the output that they belong to."""

    def __init__(self) -> None:
        self._scores: dict[int, PromptScores] = {}
        self._vectors: dict[int, VectorSum] = {}

    def read(self, body: bytes) -> Event | ModelInfo | Unloadable | None:
        """Return the event of a message, or None if it is only a part of one."""
        message: FromEngine = _read_event(body)
        if isinstance(message, ScoresPiece):
            self._scores.setdefault(message.number, PromptScores()).add(_scores(message))
            return None
        if isinstance(message, VectorPiece):
            self._vectors[message.number] = _vector(message)
            return None
        if isinstance(message, Outputs) and (self._scores or self._vectors):
            for number, report in message.reports.items():
                report.prompt_scores = self._scores.pop(number, report.prompt_scores)
                report.vector = self._vectors.pop(number, report.vector)
        return message


def _scores(piece: ScoresPiece) -> Scores:
    try:
        logprobs = np.frombuffer(piece.logprobs, "<f4")
        shape = (len(logprobs), piece.tops)
        tokens = np.frombuffer(piece.top_tokens, "<i4").reshape(shape)
        return Scores(logprobs, tokens, np.frombuffer(piece.top_logprobs, "<f4").reshape(shape))
    except ValueError as error:
        raise ProtocolError(f"scores do not match: {error}") from error


def _vector(piece: VectorPiece) -> VectorSum:
    if not piece.values or len(piece.values) % 4:
        raise ProtocolError(f"a vector of {len(piece.values)} bytes is not made of numbers of 4 bytes")
    return VectorSum(np.frombuffer(piece.values, "<f4"))
