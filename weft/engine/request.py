"""A request to the engine: a prompt in tokens and how to continue it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination
from weft.wire.messages import Token

MOST_NAME = 256
RequestName = Annotated[str, Meta(max_length=MOST_NAME)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]


class Request(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True, omit_defaults=True):
    """`snapshots` are positions in the prompt that the caller declares worth keeping; `boundaries` are ends of
    messages, and where a router knows that prompts part, which may be worth it; lower values of `priority` go first.
    Bad words are token sequences here. A request travels by the names of its fields, so that errors name them."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    stop_tokens: Annotated[frozenset[Token], Meta(max_length=1024)] = frozenset()
    salt: Annotated[bytes, Meta(max_length=1024)] = b""
    priority: Priority = 0
    snapshots: Annotated[tuple[Token, ...], Meta(max_length=4096)] = ()
    grammar: Grammar | None = None  # the form of the answer
    boundaries: Annotated[tuple[Token, ...], Meta(max_length=1 << 16)] = ()
    prediction: NDArray[np.int32] | None = None  # the answer that the caller expects
    send_to: Destination | None = None  # compute the prompt, send it there, and answer nothing; set by routers only
    # The tokens of an answer that this one goes on with: it starts like a preempted sequence that returns.
    answered: NDArray[np.int32] | None = None
    keeps_answer: bool = False  # the answer may be forked later: in an exact engine, its cells are published too
    retain: Annotated[tuple[Retain, ...], Meta(max_length=64)] = ()  # what to protect against eviction, and how long
    name: RequestName = ""  # under which clients find it while it runs; without one, it is not shown

    @property
    def known(self) -> NDArray[np.int32]:
        """The tokens to compute before the first one is sampled: the prompt, and what was answered before."""
        return self.prompt if self.answered is None else np.concatenate([self.prompt, self.answered])

    @property
    def known_length(self) -> int:
        return len(self.prompt) + (0 if self.answered is None else len(self.answered))


def check_vector(request: Request) -> None:
    """Check that a vector that is asked for is one of the prompt, computed here."""
    first = request.params.vector_from
    if first is None:
        return
    if first >= len(request.prompt):
        raise InvalidField("vector_from", f"must be less than the prompt's length {len(request.prompt)}, got {first}")
    if request.answered is not None or request.send_to is not None:
        raise InvalidField("vector_from", "must not be set for a fork or a prompt that is sent elsewhere")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check that the parameters' token ids are in the vocabulary."""
    bad = [token for word in params.bad_words for token in word if isinstance(token, int)]
    lists: list[tuple[str, Iterable[int]]] = [("stop_token_ids", params.stop_token_ids), ("bad_words", bad)]
    lists += [("logit_bias", params.logit_bias or ()), ("allowed_token_ids", params.allowed_token_ids or ())]
    for name, ids in lists:
        most = max(ids, default=0)
        if most >= vocab_size:
            raise InvalidField(name, f"has token id {most}; the vocabulary has ids 0 to {vocab_size - 1}")
