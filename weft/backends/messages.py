"""The messages between front and engine process on the wire: typed, tagged, every field bounded.

Only `codec.py` builds and reads these; all other code uses `weft.engine.protocol`. A step's outputs are columns, not an
object per token, so that a batch of hundreds costs little.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.base.grammar import Grammar
from weft.base.logs import LogFormat
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination, TransferSettings
from weft.engine.events import DraftReport, FinishReason
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import Topic
from weft.memory.journal import MOST_DROPS, MOST_IN_BATCH
from weft.memory.misses import Miss

MAX_ROWS = 1 << 16
MAX_PROMPT_BYTES = 1 << 26
MAX_TEXT = 1 << 20
# Scores of a long prompt travel in pieces of this many tokens, so that reading one does not delay other streams.
SCORES_PER_PIECE = 1 << 10
MAX_TOPS = 32

Number = Annotated[int, Meta(ge=0, le=(1 << 62))]
Count = Annotated[int, Meta(ge=0, le=(1 << 40))]
Seconds = Annotated[float, Meta(ge=0)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31))]


class EngineMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: the fields in order, after the tag."""


# from the front -------------------------------------------------------------------------------------------------------


class Begin(EngineMessage, tag="begin"):
    """The first message: the model to load, and its options."""

    options: Options
    progress: bool
    log_level: Annotated[int, Meta(ge=0, le=100)]
    log_format: LogFormat = "text"
    # CPU cores to stay on; empty: all.
    cores: Annotated[tuple[int, ...], Meta(max_length=4096)] = ()
    transfer: TransferSettings | None = None


class RequestBody(msgspec.Struct, forbid_unknown_fields=True):
    """`Request`, field by field and by name, so that errors name the field; the prompt as little-endian int32."""

    prompt: Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
    params: SamplingParams
    stop_tokens: Annotated[frozenset[Token], Meta(max_length=1024)]
    salt: Annotated[bytes, Meta(max_length=1024)]
    priority: Priority
    snapshots: Annotated[tuple[Token, ...], Meta(max_length=4096)]
    grammar: Grammar | None
    boundaries: Annotated[tuple[Token, ...], Meta(max_length=1 << 16)]
    prediction: Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)] | None
    send_to: Destination | None = None


class SubmitMessage(EngineMessage, tag="submit"):
    """A request with its number. The body is decoded separately, so that a bad one is refused under its number."""

    number: Number
    request: msgspec.Raw


class EndMessage(EngineMessage, tag="end"):
    number: Number
    stopped: bool


class QuestionMessage(EngineMessage, tag="ask"):
    number: Number
    topic: Topic
    limit: Annotated[int, Meta(ge=0, le=1 << 20)]


class DropMessage(EngineMessage, tag="drop"):
    number: Number
    tenant: Annotated[bytes, Meta(max_length=16)] | None
    prefix: Annotated[bytes, Meta(max_length=32)] | None


class SubscribeMessage(EngineMessage, tag="subscribe"):
    wanted: bool


class ShutdownMessage(EngineMessage, tag="shutdown"):
    pass


FromFront = Begin | SubmitMessage | EndMessage | QuestionMessage | DropMessage | SubscribeMessage | ShutdownMessage

# from the engine ------------------------------------------------------------------------------------------------------


class Ready(EngineMessage, tag="ready"):
    """The model is loaded: the fields of `ModelInfo`."""

    name: Text
    architecture: Text
    dtype: Text
    vocab_size: Count
    max_length: Count
    memory_bytes: Count
    memory_tokens: Count
    max_sequences: Count
    settings: dict[str, Any]


class Unloadable(EngineMessage, tag="unloadable"):
    """The model cannot be loaded: a message for the user, and whether an option is at fault."""

    message: Text
    option: bool


class RefusalBody(EngineMessage):
    number: Number
    message: Text
    status: Annotated[int, Meta(ge=400, le=599)]
    field: Text | None


class RepliesMessage(EngineMessage, tag="replies"):
    accepted: Annotated[list[Number], Meta(max_length=MAX_ROWS)]
    refused: Annotated[list[RefusalBody], Meta(max_length=MAX_ROWS)]
    answers: Annotated[dict[Number, Any], Meta(max_length=MAX_ROWS)]


class ScoresMessage(EngineMessage, tag="scores"):
    """A piece of a request's prompt scores, sent before its last output: float32 and int32, `tops` per token."""

    number: Number
    tops: Annotated[int, Meta(ge=0, le=MAX_TOPS)]
    logprobs: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE)]
    top_tokens: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE * MAX_TOPS)]
    top_logprobs: Annotated[bytes, Meta(max_length=4 * SCORES_PER_PIECE * MAX_TOPS)]


Row = Annotated[int, Meta(ge=0, le=MAX_ROWS)]


class ScoreBody(EngineMessage):
    """Log-probabilities of one row's token and of the most likely ones."""

    row: Row
    logprob: float
    tokens: Annotated[list[Token], Meta(max_length=MAX_TOPS)]
    logprobs: Annotated[list[float], Meta(max_length=MAX_TOPS)]


class EndingBody(EngineMessage):
    """The end of a row, and the fields of its report; prompt scores are sent before."""

    row: Row
    finish: FinishReason
    error: Text | None
    error_field: Text | None
    cached_tokens: Count
    loaded_tokens: Count
    disk_tokens: Count
    remote_tokens: Count
    miss: Miss | None
    preemptions: Count
    queued_seconds: Seconds
    drafts: DraftReport


class OutputsMessage(EngineMessage, tag="outputs"):
    """One step: a number and a token (or none) per row; fields that only some rows have are separate."""

    numbers: Annotated[list[Number], Meta(max_length=MAX_ROWS)]
    tokens: Annotated[list[Token | None], Meta(max_length=MAX_ROWS)]
    scores: Annotated[list[ScoreBody], Meta(max_length=MAX_ROWS)]
    endings: Annotated[list[EndingBody], Meta(max_length=MAX_ROWS)]
    digests: Annotated[dict[Row, int], Meta(max_length=MAX_ROWS)] = {}


class StoppedMessage(EngineMessage, tag="stopped"):
    message: Text


class FailedMessage(EngineMessage, tag="failed"):
    number: Number
    message: Text


KEY_BYTES = 32


class DroppedBody(EngineMessage):
    tenant: Annotated[bytes, Meta(max_length=16)] | None
    prefix: Annotated[bytes, Meta(max_length=KEY_BYTES)] | None


class ChangesBody(EngineMessage):
    """`CacheChanges`: keys one after the other, positions as little-endian int32, a byte for each tier and flag."""

    epoch: Number
    first: Number
    fresh: bool
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MOST_IN_BATCH)]
    tokens: Annotated[bytes, Meta(max_length=4 * MOST_IN_BATCH)]
    tiers: Annotated[bytes, Meta(max_length=MOST_IN_BATCH)]
    held: Annotated[bytes, Meta(max_length=MOST_IN_BATCH)]
    drops: Number = 0
    dropped: Annotated[tuple[DroppedBody, ...], Meta(max_length=MOST_DROPS)] = ()


class NewsMessage(EngineMessage, tag="news"):
    changes: ChangesBody | None
    load: ReplicaLoad


FromEngine = (
    Ready | Unloadable | RepliesMessage | ScoresMessage | OutputsMessage | StoppedMessage | FailedMessage | NewsMessage
)
