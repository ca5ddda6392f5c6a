"""The messages between the front and its text workers: MessagePack in frames, every reply bounded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weft.base.logs import LogFormat
from weft.server.settings import Limits
from weft.server.texts.prompt_builder import PromptFacts
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.wire.frames import MAX_FRAME_BYTES
from weft.wire.messages import Message, Writer, reader

# Bound of a worker's reply. Token ids of the longest prompt that an engine accepts fit.
MAX_REPLY_BYTES = MAX_FRAME_BYTES
Line = Annotated[str, Meta(max_length=4000)]


class WorkerSetup(Message, tag="setup"):
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


class Job(Message, tag="job"):
    name: str
    facts: PromptFacts
    body: bytes


class Done(Message, tag="done"):
    """`leaving`: the worker ends now, and the next job needs another one."""

    body: bytes
    leaving: bool


class Refused(Message, tag="refused"):
    """The fields of a `RequestError`."""

    message: Line
    status: Annotated[int, Meta(ge=400, le=599)]
    field: Line | None
    code: Line | None
    leaving: bool


class Failed(Message, tag="failed"):
    """An error of the worker itself; its log has the details."""


FromFront = WorkerSetup | Job
FromWorker = Done | Refused | Failed

framed = Writer().frame
read_command = reader(FromFront)
read_reply = reader(FromWorker)


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
