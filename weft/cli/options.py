"""Derives an argument parser and a documentation table from an options class. Knows no command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import cache
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from weft.base.errors import InvalidOption, WeftError
from weft.base.options import Options
from weft.cli.groups import Groups, title_of, titles

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class CommandParser(argparse.ArgumentParser):
    """Reports errors in one line and accepts no abbreviations, whose meaning would change with every new option."""

    def __init__(self, **named: Any) -> None:
        # The epilog has one example per line.
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **named})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Give a switch that stands alone its value: `--exact MODEL` is `--exact=on MODEL`."""
        given = [*(sys.argv[1:] if args is None else args)]
        for place, word in enumerate(given):
            value = given[place + 1] if place + 1 < len(given) else None
            if getattr(self._option_string_actions.get(word), "type", None) is switch and value not in tuple(SWITCH):
                given[place] = f"{word}=on"
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def argument(help: str, many: bool = False, choices: tuple[str, ...] = (), default: Any = None) -> Any:
    """Return a positional field: one optional value, or any number of values."""
    default = () if many else default
    return field(default=default, metadata={"help": help, "choices": choices, "positional": "*" if many else "?"})


# A flag that is given once for each value is singular; in a file its key is plural.
FLAGS = {"models": "--model"}
# The beginning of NAME=VALUE.
NAMED = re.compile(r"[A-Za-z0-9][\w.:/-]*=")


def flag(name: str) -> str:
    """
    >>> flag("max_tokens"), flag("models"), flag("from_")
    ('--max-tokens', '--model', '--from')
    """
    return FLAGS.get(name) or "--" + name.rstrip("_").replace("_", "-")


class NamedValue(argparse.Action):
    """Appends a value NAME=VALUE to its option; any other is the value of the option that the flag names."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if NAMED.match(values):
            setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), values])
        else:
            setattr(namespace, (option or self.dest).lstrip("-").replace("-", "_"), values)


def kind(hint: Any) -> Callable[[str], Any]:
    """Return the parser of an option's value: the first type of a union, or a number if the value looks like one.

    >>> kind(int), kind(str | None), kind(str | int), kind(tuple[str, ...]), kind(int | str)("7")
    (<class 'int'>, <class 'str'>, <class 'str'>, <class 'str'>, 7)
    """
    choices = [choice for choice in get_args(hint) or (hint,) if choice is not type(None)]
    return number_or_word if choices == [int, str] else choices[0]


def number_or_word(value: str) -> int | str:
    return value if value == "auto" else int(value)


SWITCH: Mapping[str, bool | str] = {"on": True, "off": False, "auto": "auto"}


def switch(value: str) -> bool | str:
    """Parse the value of an option that is a boolean, or "auto".

    >>> switch("on"), switch("auto")
    (True, 'auto')
    """
    if value not in SWITCH:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SWITCH)}, got {value!r}")
    return SWITCH[value]


def is_switch(hint: Any) -> bool:
    return get_args(hint) == (bool, str)


def listed(options: type) -> list[Field[Any]]:
    """Return a command's own options first, then the engine options that it inherits."""
    own = own_names(options)
    return sorted(fields(options), key=lambda each: each.name not in own)


def own_names(options: type) -> set[str]:
    """Return the options that a command defines itself: all but the unchanged options of the engine."""
    classes = [each for each in options.__mro__ if each not in Options.__mro__]
    return {name for each in classes for name in get_annotations(each)}


@cache
def hints_of(options: type) -> Mapping[str, Any]:
    """Return the types of all options of a class. Python evaluates the texts of annotations at every question."""
    return get_type_hints(options)


def add_options(
    parser: argparse.ArgumentParser,
    options: type,
    groups: Groups | None = None,
    hidden: Collection[str] = (),
) -> None:
    """Add all options, each to its group. The help omits the hidden ones.

    Nothing has a default here: what was parsed was given.
    """
    hints, own = hints_of(options), own_names(options)
    # In the order of the help, which omits those that stay empty.
    titled = {title: parser.add_argument_group(title) for title in titles(groups or {})}
    taken = {flag(each.name) for each in listed(options) if not each.metadata.get("positional")}
    for each in listed(options):
        title = None if each.metadata.get("positional") else title_of(each.name, groups or {}, each.name in own)
        place = parser if title is None else titled[title]
        _add_option(place, each, hints[each.name], each.name not in hidden, flag(each.name) not in taken)


def usage(name: str, options: type) -> str:
    """Return one line: the options are many, and listed below it.

    >>> usage("weft chat", Options)
    'weft chat [options]'
    """
    positional = [each for each in fields(options) if each.metadata.get("positional")]
    shown = [f"[{_shown(each)}{' ...' if each.metadata['positional'] == '*' else ''}]" for each in positional]
    return " ".join([name, "[options]", *shown])


def _shown(each: Field[Any]) -> str:
    return "|".join(each.metadata["choices"]) or each.name.upper()


def _add_option(
    parser: argparse._ActionsContainer, each: Field[Any], hint: Any, is_shown: bool, has_flag: bool
) -> None:
    # argparse interprets percent signs.
    about = (each.metadata["help"] + _default_note(each, hint)).replace("%", "%%") if is_shown else argparse.SUPPRESS
    if each.metadata.get("positional"):
        _add_argument(parser, each, about, has_flag)
    elif hint is bool:
        action = argparse.BooleanOptionalAction
        parser.add_argument(flag(each.name), action=action, default=argparse.SUPPRESS, help=about)
    elif is_switch(hint):
        _add_switch(parser, each, about)
    else:
        _add_value(parser, each, hint, about)


def _default_note(each: Field[Any], hint: Any) -> str:
    if each.metadata.get("positional") or each.default in (None, ()):
        return ""
    shown = ("on" if each.default else "off") if hint is bool else each.default
    return f" (default: {shown})"


def _add_switch(parser: argparse._ActionsContainer, each: Field[Any], about: str) -> None:
    name, unset = flag(each.name), argparse.SUPPRESS
    parser.add_argument(name, type=switch, default=unset, metavar="|".join(SWITCH), help=about)
    opposite = f"--no-{name[2:]}"
    parser.add_argument(opposite, action="store_const", const=False, dest=each.name, default=unset, help=unset)


def _add_argument(parser: argparse._ActionsContainer, each: Field[Any], about: str, has_flag: bool) -> None:
    nargs = each.metadata["positional"]
    # Choices are checked with all other values of the options class.
    parser.add_argument(each.name, nargs=nargs, metavar=_shown(each), help=about, default=argparse.SUPPRESS)
    if nargs == "?" and has_flag:
        parser.add_argument(flag(each.name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_value(parser: argparse._ActionsContainer, each: Field[Any], hint: Any, about: str) -> None:
    choices = each.metadata["choices"] or None
    parser.add_argument(
        flag(each.name),
        dest=each.name,
        type=kind(hint),
        action=NamedValue if each.name in FLAGS else "append" if get_origin(hint) is tuple else "store",
        default=argparse.SUPPRESS,
        choices=choices,
        metavar=None if choices else metavar(each),
        help=about,
    )


def metavar(each: Field[Any]) -> str:
    return each.metadata.get("metavar") or each.name.rpartition("_")[2].upper()


def read_options(options: type[T], found: Mapping[str, Any]) -> T:
    """Return the options as an object."""
    values = {each.name: found[each.name] for each in fields(options) if found.get(each.name) is not None}
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def complaint(error: WeftError, options: type, names: Mapping[str, str] | None = None) -> str:
    """Return an error in one line, with an option at fault named as it was given, or else as on the command line."""
    text = str(error)
    if isinstance(error, InvalidOption) and error.option in {each.name for each in fields(options)}:
        text = f"{(names or {}).get(error.option, flag(error.option))} {error.complaint}"
    return text.replace("\n", " ")


def table(options: type, names: Iterable[str] | None = None) -> Sequence[str]:
    """Return the options as rows of a Markdown table: all, or the given names."""
    hints = hints_of(options)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    wanted = None if names is None else set(names)
    for each in listed(options):
        if wanted is None or each.name in wanted:
            rows.append(f"| {_name(each, hints[each.name])} | {_default(each)} | {each.metadata['help']} |")
    return rows


def _name(each: Field[Any], hint: Any) -> str:
    if each.metadata.get("positional"):
        shown = " or ".join(each.metadata["choices"]) or each.name.upper()
        return f"`{shown}{'...' if each.metadata['positional'] == '*' else ''}`"
    if hint is bool:
        return f"`{flag(each.name)}`, `--no-{flag(each.name)[2:]}`"
    if is_switch(hint):
        return f"`{flag(each.name)}`, `{flag(each.name)} on or off or auto`"
    return f"`{flag(each.name)} {' or '.join(each.metadata['choices'] or (metavar(each),))}`"


def _default(each: Field[Any]) -> str:
    if each.default in (None, MISSING, ()):
        return ""
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    return f"`{each.default}`"
