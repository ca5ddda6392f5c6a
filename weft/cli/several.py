"""Reads `--model NAME=PATH,OPTION=VALUE` and `--alias ALIAS=NAME`, and refuses what several models exclude."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from weft.base.durations import duration_seconds
from weft.base.errors import InvalidOption, OptionError
from weft.base.options import Options, memory_bytes
from weft.base.suggest import did_you_mean

if TYPE_CHECKING:
    from weft.start.several import NamedModel

NAME = re.compile(r"[A-Za-z0-9][\w.:/-]{0,127}")
KEEP_ALIVE_SECONDS = 300.0
# The field of an options class that takes them.
MODELS = {
    "help": "one of several models, with options of its own: NAME=PATH,memory=8GiB,threads=4 (docs/several-models.md); "
    "may be repeated",
    "choices": (),
    "metavar": "NAME=PATH",
}
# Of one model besides the options of its engine.
PARSERS = ("tool_parser", "reasoning_parser")
# What needs one model, and what to do instead.
ALONE: Mapping[str, str] = {
    "model": "name every model: --model NAME=PATH",
    "served_model_name": "names are those of --model NAME=PATH, and --alias",
    "tokenizer": "give it to a model: NAME=PATH,tokenizer=FOLDER",
    "chat_template": "give it to a model: NAME=PATH,chat-template=FILE",
    "disk": "each model needs a file of its own: NAME=PATH,disk=FILE,disk-size=SIZE",
    "in_process": "each model has a process of its own",
    "restart_engine": "an engine that ends is loaded again for the next request",
    "fleet_listen": "start a server for each model, and a router for each",
    "kv_events": "start a server for each model",
    "prefix_key": "start a server for each model",
    "trusted_prefix_keys": "start a server for each model",
}


class Models(Protocol):
    """Options that name several models."""

    @property
    def models(self) -> tuple[str, ...]: ...


class Together(Models, Protocol):
    """The options of a server that this module reads."""

    @property
    def alias(self) -> tuple[str, ...]: ...

    @property
    def models_memory(self) -> str | int: ...

    @property
    def keep_alive(self) -> str | None: ...

    @property
    def replicas(self) -> int: ...


@dataclass(slots=True)
class GivenModel:
    """One model as it was given."""

    name: str
    path: str
    own: dict[str, str] = field(default_factory=dict)


def check_together(options: Together) -> None:
    """Raise unless the models and what was given beside them go together."""
    memory_bytes(options.models_memory, "models_memory")
    keep_alive_seconds(options.keep_alive)
    given, aliases = read_models(options.models), aliases_of(options.alias)
    if len(given) < 2:
        for name in ("models_memory", "keep_alive"):
            if getattr(options, name) not in (None, "auto"):
                raise InvalidOption(name, "needs several models (--model NAME=PATH); one model is never unloaded")
    if given:
        check_alone(options, ALONE if len(given) > 1 else ("model", "served_model_name"))
        if options.replicas > 1 and len(given) > 1:
            raise InvalidOption("replicas", f"is {options.replicas}, but each of several models has one engine")
        names = [each.name for each in given]
        check_names(names, aliases)
        models_of(options)


def check_alone(options: Together, names: Iterable[str]) -> None:
    for name in names:
        if getattr(options, name) not in (None, False):
            raise InvalidOption(name, f"cannot be combined with --model NAME=PATH; {ALONE[name]}")


def check_names(names: list[str], aliases: tuple[tuple[str, str], ...]) -> None:
    known = [*names, *(alias for alias, _ in aliases)]
    twice = next((name for place, name in enumerate(known) if name in known[:place]), None)
    if twice is not None:
        raise InvalidOption("models", f"and aliases must have different names, got {twice!r} twice")
    for alias, name in aliases:
        if name not in names:
            raise InvalidOption("alias", f"{alias} must stand for one of {', '.join(names)}, got {name!r}")


def keep_alive_seconds(text: str | None) -> float | None:
    """Return after which time a model is unloaded; None: never for that.

    >>> keep_alive_seconds(None), keep_alive_seconds("10m"), keep_alive_seconds("0"), keep_alive_seconds("-1")
    (300.0, 600.0, 0.0, None)
    """
    if text is None:
        return KEEP_ALIVE_SECONDS
    try:
        seconds = duration_seconds(text)
    except ValueError:
        raise InvalidOption("keep_alive", f"must be a time such as 5m, 90 or -1, got {text!r}") from None
    return None if seconds == math.inf else seconds


def aliases_of(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """
    >>> aliases_of(["gpt-4o=small"])
    (('gpt-4o', 'small'),)
    """
    found = []
    for text in texts:
        alias, _, name = text.partition("=")
        if not NAME.fullmatch(alias) or not NAME.fullmatch(name):
            raise InvalidOption("alias", f"must be ALIAS=NAME, such as gpt-4o=weft-small, got {text!r}")
        found.append((alias, name))
    return tuple(found)


def read_models(texts: Iterable[str]) -> list[GivenModel]:
    """Return the models of all texts. A variable is split at every comma, so an option may be a text of its own.

    >>> [(each.name, each.path, each.own) for each in read_models(["a=./a,memory=8GiB", "b=./b", "threads=2"])]
    [('a', './a', {'memory': '8GiB'}), ('b', './b', {'threads': '2'})]
    """
    found: list[GivenModel] = []
    for text in texts:
        first, *more = text.split(",")
        if found and option_of(first) is not None:
            more = [first, *more]
        else:
            found.append(read_model(first))
        for piece in more:
            add_option(found[-1], piece)
    return found


def read_model(text: str) -> GivenModel:
    name, _, path = text.partition("=")
    if not NAME.fullmatch(name) or not path or option_of(text) is not None:
        raise InvalidOption("models", f"must be NAME=PATH, such as small=./checkpoint, got {text!r:.200}")
    return GivenModel(name, path)


def add_option(model: GivenModel, text: str) -> None:
    name = option_of(text)
    if name is None:
        asked = text.partition("=")[0]
        hint = did_you_mean(asked, [each.replace("_", "-") for each in own_options()])
        raise InvalidOption("models", f"{model.name}: {asked!r:.80} is no option of a model{hint}")
    if name in model.own:
        raise InvalidOption("models", f"{model.name}: {name.replace('_', '-')} is given twice")
    model.own[name] = text.partition("=")[2]


def option_of(text: str) -> str | None:
    """Return the option of a model that a text OPTION=VALUE sets."""
    name, equals, _ = text.partition("=")
    name = name.strip().replace("-", "_")
    return name if equals and name in own_options() else None


def own_options() -> list[str]:
    return [each.name for each in fields(Options) if each.name != "model"] + list(PARSERS)


def models_of(options: Models) -> list[NamedModel]:
    """Return the models with all their options: those of the server, and their own."""
    from weft.start.several import NamedModel

    shared = Options(**{each.name: getattr(options, each.name) for each in fields(Options)})
    found = []
    for given in read_models(options.models):
        own = values_of(given, type(options))
        settings = {name: own.pop(name) for name in PARSERS if name in own}
        try:
            found.append(NamedModel(given.name, replace(shared, model=given.path, **own), settings))
        except OptionError as error:
            raise OptionError(f"model {given.name}: {error}") from None
    files = [model.options.disk for model in found if model.options.disk is not None]
    if len(set(files)) < len(files):
        raise InvalidOption("disk", "must be another file for each model")
    return found


def values_of(model: GivenModel, options: type) -> dict[str, Any]:
    """Parse a model's own options as the command line parses them."""
    from weft.cli.sources import parse

    hints, choices = get_type_hints(options), {each.name: each.metadata["choices"] for each in fields(options)}
    return {
        name: parse(
            f"model {model.name}: {name.replace('_', '-')}", [text], hints.get(name, str), choices.get(name, ())
        )
        for name, text in model.own.items()
    }
