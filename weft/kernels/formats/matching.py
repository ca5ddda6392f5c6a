"""Which modules of a checkpoint a configuration means: paths, wildcards, regular expressions, parts of names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from weft.base.errors import ModelError
from weft.kernels.formats.fields import shown

# A repeated group may take forever, and so may many repetitions after each other.
REPEATED_GROUP = re.compile(r"\)[*+{]")
MOST_REPETITIONS = 4

Matches = Callable[[str], bool]


def anything(name: str) -> bool:
    return True


def paths(texts: Sequence[str]) -> Matches:
    """Match modules and everything in them, by a path that may begin anywhere; `*` stands for anything.

    >>> [paths(["mlp.gate"])(name) for name in ("a.mlp.gate", "a.mlp.gate.x", "a.mlp.gate_proj", "mlp.gate")]
    [True, True, False, True]
    """
    plain = frozenset(text.strip(".") for text in texts if "*" not in text)
    patterns = [_path(text) for text in texts if "*" in text]

    def matches(name: str) -> bool:
        ends = [*(match.start() for match in re.finditer(r"\.", name)), len(name)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        if any(name[start:end] in plain for start in starts for end in ends if start < end):
            return True
        return any(pattern.search(name) for pattern in patterns)

    return matches


def _path(text: str) -> re.Pattern[str]:
    first, *between, last = (re.escape(part) for part in text.strip(".").split("*"))
    # What stands between two wildcards is found once and never elsewhere, so that many of them take no longer.
    middle = "".join(f"(?>.*?{part})" for part in between)
    return re.compile(rf"(^|\.){first}{middle}.*{last}(\.|$)")


def targets_of(texts: Sequence[str]) -> Matches:
    """Match by a class (`Linear`: every matrix), by regular expressions after `re:`, or by names."""
    if "Linear" in texts:
        return anything
    expressions = [expression(text[3:]) for text in texts if text.startswith("re:")]
    named = paths([text for text in texts if not text.startswith("re:")])
    return lambda name: named(name) or any(expression.match(name) for expression in expressions)


def expression(text: str) -> re.Pattern[str]:
    try:
        if REPEATED_GROUP.search(text) or len(re.findall(r"[*+{]", text)) > MOST_REPETITIONS:
            raise ValueError(f"it repeats a group, or has more than {MOST_REPETITIONS} repetitions")
        return re.compile(text)
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ModelError(f"quantization_config: {shown(text)} is not a regular expression to use: {error}") from error


def wildcards(texts: Sequence[str]) -> Matches:
    """Match whole names, or those of modules that hold them.

    >>> [wildcards(["model.layers.*.mixer"])(name) for name in ("model.layers.3.mixer.q_proj", "model.norm")]
    [True, False]
    """
    patterns = [re.compile(fnmatch.translate(text)) for text in texts]

    def matches(name: str) -> bool:
        ends = [*(match.start() for match in re.finditer(r"\.", name)), len(name)]
        return any(pattern.match(name[:end]) for pattern in patterns for end in ends)

    return matches


def endings(texts: Sequence[str]) -> Matches:
    """Match modules whose names end with one of these.

    >>> [endings(["self_attn.q_proj"])(name) for name in ("a.0.self_attn.q_proj", "a.0.cross_self_attn.q_proj")]
    [True, False]
    """
    dotted = tuple(f".{text}" for text in texts)
    return lambda name: f".{name}".endswith(dotted)


def parts(texts: Sequence[str]) -> Matches:
    """Match names that contain one of these anywhere."""
    return lambda name: any(text in name for text in texts)


def except_for(matches: Matches) -> Matches:
    """Match what another matcher does not."""
    return lambda name: not matches(name)


def starts(pattern: str) -> Matches:
    """Match names that start with a regular expression."""
    found = expression(pattern)
    return lambda name: found.match(name) is not None


def contains(pattern: str) -> Matches:
    """Match names that have a regular expression somewhere."""
    found = expression(pattern)
    return lambda name: found.search(name) is not None
