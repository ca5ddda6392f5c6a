"""Typed messages: one definition of each, with bounds, which both sides use. Decoding runs no code.

A `Message` travels as a MessagePack array of its fields, after its tag. Types with names for their fields, such as
dataclasses, travel as maps. Bounds stand in the annotations and are checked where a message arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from weft.wire.frames import MAX_FRAME_BYTES, ProtocolError, framed

MAX_ROWS = 1 << 16
# Maximum characters of an error message for people.
MAX_WORDS = 4000

Number = Annotated[int, Meta(ge=0, le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, Meta(max_length=1 << 20)]

T = TypeVar("T")
# Fields that a peer does not know, by type.
Newer = Mapping[type, frozenset[str]]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages: the fields in order, after the tag."""


class MutableMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of messages, and of parts of them, that their sender fills field by field."""


def plain(value: Any) -> Any:
    """Return what stands for a number of NumPy."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} cannot be encoded")


def reader(
    kind: Any, name: str = "message", build: Callable[[type, Any], Any] | None = None
) -> Callable[[bytes | bytearray], Any]:
    """Return a function that decodes a message of a kind. It raises `ProtocolError`."""
    decode = msgspec.msgpack.Decoder(kind, dec_hook=build).decode

    def read(body: bytes | bytearray) -> Any:
        try:
            return decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a {name}: {error}") from error

    return read


class Writer:
    """Encodes messages as frames. `newer` are fields that the peer does not know, and that are not sent to it.

    They stand at the end of their message and have defaults, with which the peer does without them.
    """

    def __init__(
        self,
        simplify: Callable[[Any], Any] = plain,
        newer: Newer | None = None,
        limit: int = MAX_FRAME_BYTES,
    ) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=simplify).encode
        self._newer = dict(newer or {})
        self._limit = limit

    def frame(self, message: Message | MutableMessage) -> bytes:
        if self._newer and any(kind in self._newer for kind in parts_of(type(message))):
            return framed(self._encode(self._older(message)), self._limit)
        return framed(self._encode(message), self._limit)

    def _older(self, value: Any) -> Any:
        """Return what stands for a value without the fields that the peer does not know."""
        if isinstance(value, list | tuple):
            return [self._older(each) for each in value]
        if isinstance(value, dict):
            return {key: self._older(each) for key, each in value.items()}
        names, config = fields_of(type(value)), getattr(value, "__struct_config__", None)
        if names is None:
            return value
        known = [name for name in names if name not in self._newer.get(type(value), ())]
        found = {name: self._older(getattr(value, name)) for name in known}
        if config is None or not config.array_like:
            return found
        return [*([] if config.tag is None else [config.tag]), *found.values()]


def fields_of(kind: Any) -> Sequence[str] | None:
    """Return the names of the fields of a kind of message, or of a part of one; None if it has none."""
    if is_dataclass(kind):
        return [each.name for each in fields(kind)]
    names: Sequence[str] | None = getattr(kind, "__struct_fields__", None)
    return names


@cache
def parts_of(kind: Any) -> frozenset[type]:
    """Return all types with fields in a type, itself among them."""
    found: set[Any] = set()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        waiting += get_args(each)
        if each not in found and fields_of(each) is not None:
            found.add(each)
            waiting += get_type_hints(each).values()
    return frozenset(found)
