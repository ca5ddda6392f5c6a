"""Regular expressions of a tokenizer.json: which ones are refused, and which ones are known to take linear time.

The library's engine backtracks. A pattern as short as `a*b|a` takes quadratic time on a run of a, and no probe finds
all texts that a pattern is slow on. So the patterns of published models are listed: they are tested to be linear, and
texts for any other one are read where they cannot stop a stream (`weft/server/texts/body_reader.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from weft.base.errors import ModelError

# Far beyond any published pattern.
MAX_PATTERN_CHARACTERS = 16 << 10
MAX_REPEATED = 4096
_COUNTS = re.compile(r"\{(?:\d*,)?(\d+)\}")

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_NO_HAN = "&&[^\\p{Han}]"
_KIMI = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]"
_KIMI = rf"{_KIMI}*[{_LOWER}{_NO_HAN}]+{_ENDINGS}?|{_KIMI}+[{_LOWER}{_NO_HAN}]*{_ENDINGS}?"
# By the first models that had them. Patterns that `ByteLevel` and `Whitespace` bring along are not in the file.
LINEAR = {
    "weft": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}",
    "qwen3.5": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "llama 3": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",
    "gpt-4o": rf"{_CASED}{_ENDINGS}?|{_CAPITALS}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}",
    "kimi": rf"[\p{{Han}}]+|{_KIMI}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",
    "mistral tekken": rf"{_CASED}|{_CAPITALS}|\p{{N}}|{_SLASHED}|{_SPACES}",
}
_LINEAR = frozenset(LINEAR.values())


def patterns_of(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the regular expressions that a tokenizer uses."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    # Each part of the file as JSON; all of it would be the vocabulary, too.
    return [found for part in parts if part is not None for found in _patterns_in(json.loads(part.__getstate__()))]


def _patterns_in(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(part.get("Regex"), str):
            yield part["Regex"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _patterns_in(inner)


def are_linear(patterns: Iterable[str]) -> bool:
    """Return whether every pattern is known to take linear time on any text."""
    return _LINEAR.issuperset(patterns)


def check_pattern(path: Path, pattern: str) -> None:
    """Refuse a regular expression that is long, or whose counted repetitions multiply: any text takes it minutes."""
    repeated = math.prod(max(1, int(most[-9:])) for most in _COUNTS.findall(pattern))
    if len(pattern) > MAX_PATTERN_CHARACTERS or repeated > MAX_REPEATED:
        raise ModelError(
            f"{path}: a regular expression must have at most {MAX_PATTERN_CHARACTERS} characters and repeat "
            f"at most {MAX_REPEATED} times, got {pattern!r:.80}"
        )
