"""Options from keyword arguments: Weft's own, and those of vLLM's and SGLang's classes, by the table of their flags."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from weft.base.aliases import ANY, SERVER, Alias
from weft.base.errors import OptionError
from weft.base.options import Options
from weft.base.suggest import did_you_mean

log = logging.getLogger("weft")

OWN = tuple(each.name for each in fields(Options))
BY_FLAG = {flag: alias for alias in SERVER for flag in alias.names if flag.startswith("--")}


def keyword(flag: str) -> str:
    """
    >>> keyword("--max-model-len")
    'max_model_len'
    """
    return flag.removeprefix("--").replace("-", "_")


KNOWN = tuple(dict.fromkeys([*OWN, *map(keyword, BY_FLAG)]))


def options_of(given: Mapping[str, Any]) -> Options:
    """Return the engine's options; None means the default.

    A keyword that has no effect is logged; one that cannot be honoured raises.

    >>> options_of({"max_model_len": 4096, "enable_prefix_caching": False, "quantization": None}).max_length
    4096
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        for ours, meant in _translated(name, value):
            if found.get(ours, meant) != meant:
                raise OptionError(f"{name} and another argument both set {ours}; pass only one of them")
            found[ours] = meant
    return Options(**found)


def _translated(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    flag = "--" + name.replace("_", "-")
    alias = BY_FLAG.get(flag)
    if alias is None and isinstance(value, bool):
        alias = BY_FLAG.get(f"--no-{flag.removeprefix('--')}")
        value = value if alias is None else not value
    if alias is None and name not in OWN:
        raise OptionError(f"unknown argument {name!r}{did_you_mean(name, KNOWN)}")
    if value is None:
        return
    if alias is None:
        yield name, value
    else:
        yield from _meant(name, alias, value)


def _meant(name: str, alias: Alias, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a keyword of another engine means here."""
    if not alias.takes_value:
        if not isinstance(value, bool):
            raise OptionError(f"{name} must be True or False, got {value!r}")
        opposite = BY_FLAG.get(f"--no-{name.replace('_', '-')}")
        if not value and opposite is None:
            return
        alias = alias if value or opposite is None else opposite
        if alias.refused:
            raise OptionError(f"{name}: {alias.refused}")
        if alias.to:
            yield from _option(name, alias.to)
    else:
        text = str(value).removeprefix("torch.")
        renamed = alias.values.get(text, alias.values.get(ANY))
        if renamed is None:
            raise OptionError(f"{name}={value!r}: {alias.refused or f'must be one of {_texts(alias)}'}")
        if alias.to:
            yield from _option(name, alias.to[:1], (text if text in DTYPES else value) if renamed == ANY else renamed)
    if alias.note:
        log.warning("%s: %s", name, alias.note)


DTYPES = ("float32", "float16", "bfloat16")


def _option(name: str, flags: tuple[str, ...], value: Any = True) -> Iterator[tuple[str, Any]]:
    ours = keyword(flags[0])
    if len(flags) > 1:
        value = int(flags[1])
    if ours.removeprefix("no_") in OWN:
        yield (ours, value) if ours in OWN else (ours.removeprefix("no_"), False)
    else:
        log.warning("%s: only weft serve uses it", name)


def _texts(alias: Alias) -> str:
    return ", ".join(each for each in alias.values if each != ANY)


class EngineArgs:
    """Keyword arguments of an engine, to be checked now and passed later: vLLM's `EngineArgs` and `AsyncEngineArgs`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.options = options_of({"model": model, **options})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add all arguments of an engine. Those that are not given are absent from the parsed ones."""
        # Flags that a script has defined are its own.
        taken = set(parser._option_string_actions)
        for name in KNOWN:
            flag = "--" + name.replace("_", "-")
            if flag not in taken:
                parser.add_argument(flag, dest=name, type=_read, nargs="?", const=True, default=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the arguments of an engine among parsed ones."""
        return cls(**{name: value for name, value in vars(args).items() if name in KNOWN})


def _read(text: str) -> Any:
    """
    >>> _read("7"), _read("0.5"), _read("auto")
    (7, 0.5, 'auto')
    """
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
