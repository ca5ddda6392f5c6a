"""Turns words that an answer must not contain into token sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.base.errors import InvalidField
from weft.text.tokenizer import Tokenizer

Word = str | Sequence[int]


def token_sequences(words: Iterable[Word], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return words as token sequences. A text becomes two where a space before it changes its tokens.

    A word has other tokens at the start of a text than after a space, and must not occur at either place.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(word))
            continue
        if tokenizer is None:
            raise InvalidField("bad_words", "has a text, but this model has no tokenizer; pass lists of token ids")
        forms = tokenizer.encode_all([word, " " + word.lstrip()], special=False)
        found += [tuple(form) for form in forms if form]
    return tuple(dict.fromkeys(found))
