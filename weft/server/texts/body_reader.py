"""Decides where client text is read: a small body in this process, others in a worker process.

Reading a body means decoding its JSON, checking it, rendering its conversation and tokenizing its prompts. For eight
megabytes that takes seconds and holds the interpreter lock for fractions of a second at a time, during which no other
stream moves; so `text_pool.py` does it. The result is small: token ids, and the body without its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import numpy as np

from weft.base.errors import RequestError
from weft.server.texts.bodies import decode
from weft.server.texts.fields import check_fields
from weft.server.texts.prompt_builder import Prompt, PromptBuilder

B = TypeVar("B", bound=msgspec.Struct)
# Reading this many bytes takes a few milliseconds: less than handing them to a busy process.
SMALL_BYTES = 1 << 14


def is_quick(body: bytes, builder: PromptBuilder) -> bool:
    """Return whether a body may be read in this process. Each declared point costs another rendering.

    With a tokenizer whose patterns are not known to be linear, a text of any length may take long.
    """
    limits, tokenizer = builder.limits, builder.tokenizer
    if tokenizer is not None and not tokenizer.is_linear:
        return False
    return len(body) * (1 + min(body.count(b"cache_control"), limits.cache_points)) <= SMALL_BYTES


class PackedPrompt(msgspec.Struct, array_like=True):
    tokens: bytes  # little-endian int32
    snapshots: tuple[int, ...]
    prediction: bytes | None
    retain_seconds: float

    @classmethod
    def of(cls, prompt: Prompt) -> PackedPrompt:
        prediction = None if prompt.prediction is None else prompt.prediction.astype("<i4").tobytes()
        return cls(prompt.tokens.astype("<i4").tobytes(), prompt.snapshots, prediction, prompt.retain_seconds)

    def unpacked(self) -> Prompt:
        prediction = None if self.prediction is None else np.frombuffer(self.prediction, "<i4").astype(np.int32)
        tokens = np.frombuffer(self.tokens, "<i4").astype(np.int32)
        return Prompt(tokens, self.snapshots, prediction, self.retain_seconds)


class Packed(msgspec.Struct, array_like=True):
    body: bytes
    prompts: list[PackedPrompt]
    unknown: list[str]


@dataclass(frozen=True)
class BodyReader(Generic[B]):
    """How one route reads its bodies.

    `prompts` checks a body, returns its prompts, and empties the fields that they came from. `kept` are texts that stay
    because the response repeats them. `parts` are objects in the body whose fields are in the table of fields.
    """

    name: str
    kind: type[B]
    prompts: Callable[[PromptBuilder, B], list[Prompt]]
    kept: tuple[str, ...] = ()
    parts: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)

    def read(self, builder: PromptBuilder, data: bytes) -> tuple[B, list[Prompt], list[str]]:
        """Return a body without its texts, its prompts, and its first unknown fields."""
        body = decode(data, self.kind, builder.limits)
        unknown = check_fields(data, self.name, self.kind, self.parts, builder.strict_fields)
        return body, self.prompts(builder, body), unknown

    def packed(self, builder: PromptBuilder, data: bytes) -> bytes:
        """Read a body in a worker process, for `unpacked` in the front."""
        body, prompts, unknown = self.read(builder, data)
        # As JSON, like the client's: other formats have no room for its largest integers.
        rest = msgspec.json.encode(body)
        texts = sum(len(msgspec.json.encode(getattr(body, name) or "")) for name in self.kept)
        if len(rest) - texts > builder.limits.beside_bytes:
            most = builder.limits.beside_bytes
            raise RequestError(f"the body has {len(rest) - texts} bytes besides its prompts; the limit is {most}", 413)
        return msgspec.msgpack.encode(Packed(rest, [PackedPrompt.of(each) for each in prompts], unknown))

    def unpacked(self, data: bytes) -> tuple[B, list[Prompt], list[str]]:
        found = msgspec.msgpack.decode(data, type=Packed)
        prompts = [each.unpacked() for each in found.prompts]
        return msgspec.json.decode(found.body, type=self.kind), prompts, found.unknown
