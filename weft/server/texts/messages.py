"""The messages between the front and its text workers: MessagePack in frames, every reply bounded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weft.base.logs import LogFormat
from weft.server.settings import Limits
from weft.server.texts.prompt_builder import PromptFacts
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer

HEADER_BYTES = 4
# Bound of a worker's reply. Token ids of the longest prompt that an engine accepts fit.
MAX_REPLY_BYTES = 1 << 27
Line = Annotated[str, Meta(max_length=4000)]


class WorkerMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: the fields in order, after the tag."""


class WorkerSetup(WorkerMessage, tag="setup"):
    """The first message: everything that a worker needs to know about texts. A tokenizer travels as its own JSON."""

    tokenizer: str | None
    specials: dict[str, str]
    end_tokens: list[int]
    template: str | None
    tool_template: str | None
    strict_fields: bool
    limits: Limits
    log_level: int
    log_format: LogFormat


class Job(WorkerMessage, tag="job"):
    name: str
    facts: PromptFacts
    body: bytes


class Done(WorkerMessage, tag="done"):
    """`leaving`: the worker ends now, and the next job needs another one."""

    body: bytes
    leaving: bool


class Refused(WorkerMessage, tag="refused"):
    """The fields of a `RequestError`."""

    message: Line
    status: Annotated[int, Meta(ge=400, le=599)]
    field: Line | None
    code: Line | None
    leaving: bool


class Failed(WorkerMessage, tag="failed"):
    """An error of the worker itself; its log has the details."""


FromFront = WorkerSetup | Job
FromWorker = Done | Refused | Failed

encode = msgspec.msgpack.Encoder().encode
_from_front = msgspec.msgpack.Decoder(FromFront)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: WorkerMessage) -> bytes:
    body = encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def decode_command(body: bytes | bytearray) -> FromFront:
    found: FromFront = _from_front.decode(body)
    return found


def decode_reply(body: bytes) -> FromWorker:
    found: FromWorker = _from_worker.decode(body)
    return found


def setup_of(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    limits: Limits,
    strict_fields: bool,
    log_level: int,
    log_format: LogFormat = "text",
) -> WorkerSetup:
    return WorkerSetup(
        tokenizer=None if tokenizer is None else tokenizer.backend.to_str(),
        specials={} if tokenizer is None else tokenizer.specials,
        end_tokens=[] if tokenizer is None else sorted(tokenizer.end_tokens),
        template=None if template is None else template.source,
        tool_template=None if template is None else template.tool_source,
        strict_fields=strict_fields,
        limits=limits,
        log_level=log_level,
        log_format=log_format,
    )
