"""Checks prompts and converts them to token ids before anything runs. Errors name the prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidField, RequestError
from weft.text.tokenizer import Tokenizer

Tokens = NDArray[np.int32]
Prompt = str | Sequence[int]

# The engine gets the ends of at most this many messages: half of them the first ones, where different conversations
# diverge, and half the last ones, where branches of one do. Each may cost a snapshot.
MOST_ENDS = 16
NO_TOKENIZER = "this model has no tokenizer.json: send prompts as lists of token ids, or set --tokenizer"


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list of prompts.

    >>> as_list("a"), as_list([1, 2]), as_list(["a", [1, 2]]), as_list([])
    (['a'], [[1, 2]], ['a', [1, 2]], [])
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidField("prompts", f"must be a string, a list of token ids, or a list of those, got {prompts!r:.80}")
    if prompts and all(isinstance(item, int | np.integer) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, vocab_size: int, one: str = "prompt", many: str = "prompts"
) -> list[Tokens]:
    """Return the token ids of every prompt; texts are tokenized together.

    Errors call a single prompt `one`, and several `many[0]`, `many[1]` and so on.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    encoded = iter(tokenizer.encode_all(texts) if tokenizer is not None and texts else ())
    names = [one] if len(prompts) == 1 else [f"{many}[{place}]" for place in range(len(prompts))]
    return [
        checked_tokens(next(encoded) if isinstance(prompt, str) else prompt, vocab_size, name)
        for prompt, name in zip(prompts, names)
    ]


def checked_tokens(tokens: Sequence[int], vocab_size: int, name: str = "prompt") -> Tokens:
    """Return token ids as an array, after checking them."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        array = np.empty(0, np.object_)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise InvalidField(name, f"must be a string or a list of token ids (integers), got {tokens!r:.80}")
    if not array.size:
        raise InvalidField(name, "is empty; it must have at least one token")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise InvalidField(
            f"{name}[{place}]", f"is token id {array[place]}; the vocabulary has ids 0 to {vocab_size - 1}"
        )
    return array.astype(np.int32)


def check_snapshots(snapshots: Sequence[int], length: int) -> tuple[int, ...]:
    """Check the positions of a prompt whose state is worth keeping, and return them sorted."""
    for position in snapshots:
        if isinstance(position, bool) or not isinstance(position, int | np.integer) or not 0 < position <= length:
            raise InvalidField(
                "snapshots", f"must be positions from 1 to the prompt's length {length}, got {position!r}"
            )
    return tuple(sorted({int(position) for position in snapshots}))


def ends_of_messages(tokens: Tokens, end_tokens: Collection[int]) -> tuple[int, ...]:
    """Return the positions in a prompt after tokens that end a message: other prompts may diverge there.

    >>> ends_of_messages(np.array([5, 2, 6, 7, 2, 8]), {2}), len(ends_of_messages(np.full(100, 2), {2}))
    ((2, 5), 16)
    """
    found = (np.flatnonzero(np.isin(tokens[:-1], list(end_tokens))) + 1).tolist()
    if len(found) > MOST_ENDS:
        found = found[: MOST_ENDS // 2] + found[-MOST_ENDS // 2 :]
    return tuple(found)
