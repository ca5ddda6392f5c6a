"""Finds the end of a long text that has its last tokens, so that a prompt which is cut to them is not tokenized whole.

A text is tokenized from two places. Where both results agree, what stands before does not matter: pre-tokenizers split
a text from left to right and merges are local, so two tokenizations that share a border stay together. The places are
borders of all common tokenizers if possible: a letter, a space, a letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from weft.text.tokenizer import Tokenizer, check_unicode

# Characters to begin with: enough for most texts, which have two to five for each token.
LEAST_CHARACTERS = 4096
CHARACTERS_PER_TOKEN = 6
# Distance of the two places. A prime, so that both are never at the same phase of a repeated token.
APART = 1021
# How far to look for a border.
REACH = 2048
# Tokens that may stand before a prompt, such as BOS.
MARGIN = 8
# Ends of different lengths whose tokens depended on where they began, until the next one is taken as it is.
MOST_DOUBTS = 3
_BORDERS = (re.compile(r"[A-Za-z] (?=[A-Za-z])"), re.compile(r"\S\n(?=\S)"))


def start_of_last(tokenizer: Tokenizer, text: str, keep: int, special: bool = True) -> int:
    """Return a place from which a text has the same last `keep` tokens as from its beginning.

    Takes time in proportion to `keep`, unless tokens are very long. If the tokens of a text depend on its beginning
    however far that is, as in a run of one letter, they are those of the end alone.
    """
    check_unicode(text)
    size, doubts = max(LEAST_CHARACTERS, CHARACTERS_PER_TOKEN * keep), 0
    while 2 * size < len(text):
        start = _border_before(text, len(text) - size)
        tokens, longer = tokenizer.encode_all([text[start:], text[_border_before(text, start - APART) :]], special)
        doubts += len(tokens) >= keep + MARGIN
        if common_end(tokens, longer) >= keep or doubts == MOST_DOUBTS:
            return start
        size *= 2
    return 0


def common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """
    >>> common_end([1, 2, 3], [9, 2, 3]), common_end([1], [1, 1]), common_end([1], [2])
    (2, 1, 0)
    """
    differ = (count for count, (a, b) in enumerate(zip(reversed(one), reversed(other))) if a != b)
    return next(differ, min(len(one), len(other)))


def _border_before(text: str, place: int) -> int:
    """Return the nearest place at or before this one where tokenizers split a text, or this one."""
    first = max(0, place - REACH)
    for border in _BORDERS:
        found = [match.end() - 1 for match in border.finditer(text, first, place + 2)]
        if found:
            return found[-1]
    return max(0, place)
