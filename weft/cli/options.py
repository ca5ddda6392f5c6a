"""From an options class to an argument parser, and to a table for the documentation. Knows no command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from inspect import get_annotations
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from weft.base.errors import OptionError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Tells errors in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def flag(name: str) -> str:
    """
    >>> flag("max_tokens")
    '--max-tokens'
    """
    return "--" + name.replace("_", "-")


def kind(hint: Any) -> type:
    """What a value on the command line is read as: the first type of a union.

    >>> kind(int), kind(str | None), kind(str | int), kind(tuple[str, ...])
    (<class 'int'>, <class 'str'>, <class 'str'>, <class 'str'>)
    """
    choices = [choice for choice in get_args(hint) or (hint,) if choice is not type(None)]
    return choices[0]


def listed(options: type) -> list[Field[Any]]:
    """A command's own options first, then those of the engine that it inherits."""
    own = get_annotations(options)
    return sorted(fields(options), key=lambda each: each.name not in own)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    hints = get_type_hints(options)
    for each in listed(options):
        about = each.metadata["help"]
        # argparse reads percent signs as its own.
        about = about.replace("%", "%%")
        if each.metadata.get("positional"):
            parser.add_argument(each.name, nargs="*", metavar=each.name.upper(), help=about)
        elif hints[each.name] is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag(each.name), action=action, default=each.default, help=about)
        else:
            _add_value(parser, each, kind(hints[each.name]), about)


def _add_value(parser: argparse.ArgumentParser, each: Field[Any], reads: type, about: str) -> None:
    default = "" if each.default is None else f" (default: {each.default})"
    choices = each.metadata["choices"] or None
    metavar = None if choices else each.name.rpartition("_")[2].upper()
    parser.add_argument(
        flag(each.name), type=reads, default=each.default, choices=choices, metavar=metavar, help=about + default
    )


def read_options(options: type[T], found: Mapping[str, Any]) -> T:
    """The options as an object; what cannot work is told by the name it has on the command line."""
    values = {each.name: found[each.name] for each in fields(options)}  # type: ignore[arg-type]
    try:
        return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except OptionError as error:
        name, _, rest = str(error).partition(" ")
        raise OptionError(f"{flag(name)} {rest}" if name in values else str(error)) from None


def table(options: type) -> Sequence[str]:
    """The options as rows of a Markdown table."""
    hints = get_type_hints(options)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for each in listed(options):
        if each.metadata.get("positional"):
            name = f"`{each.name.upper()}...`"
        elif hints[each.name] is bool:
            name = f"`{flag(each.name)}`, `--no-{flag(each.name)[2:]}`"
        else:
            values = each.metadata["choices"] or (each.name.rpartition("_")[2].upper(),)
            name = f"`{flag(each.name)} {' or '.join(values)}`"
        rows.append(f"| {name} | {_default(each)} | {each.metadata['help']} |")
    return rows


def _default(each: Field[Any]) -> str:
    if each.default in (None, MISSING, ()):
        return ""
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    return f"`{each.default}`"
