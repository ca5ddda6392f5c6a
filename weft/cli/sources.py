"""Collects options from the command line, the environment and a file, in this order of precedence.

The fields of an options class are the only table: `max_length` is the flag --max-length, the variable WEFT_MAX_LENGTH
and the key `max-length` of the file. Texts from the environment and the file have the command line's syntax.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin

from weft.base.errors import OptionError
from weft.base.suggest import did_you_mean
from weft.cli.options import SWITCH, flag, hints_of, is_switch, kind

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

FILE_OPTION = "config"
FILE_HELP = "YAML file with options, such as `max-length: 32768`; the command line and WEFT_* variables take precedence"
# Weft has some hundred options.
MOST_FILE_BYTES = 1 << 16
# A file is copied and committed more easily than its author expects: it names the files of keys.
SECRETS = {"api_key": "api-key-file", "admin_key": "admin-key-file"}
# Two ways to say the same: a source that gives one of them overrides both.
ALTERNATIVES = (
    {"api_key", "api_key_file"},
    {"admin_key", "admin_key_file"},
    {"replica", "replicas_file"},
)
# Options whose values have names, which a file may write as keys.
BY_NAME = ("models", "alias")
WORDS: Mapping[str, bool] = {"on": True, "true": True, "yes": True, "1": True}
WORDS = {**WORDS, "off": False, "false": False, "no": False, "0": False}
# Kubernetes sets WEFT_PORT=tcp://10.0.0.1:80 in the pods beside a service that is named weft.
SERVICE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


class FileValue(NamedTuple):
    """What a file says of an option: one text, or several."""

    texts: tuple[str, ...]
    is_list: bool
    place: str  # file and line


@dataclass(slots=True)
class GivenOptions:
    """Values by option, how each was given (`--port`, `WEFT_PORT`, `weft.yaml:3: port`), and warnings."""

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[tuple[str, str, Any]]) -> None:
        """Add a source of lower precedence than those before."""
        before = set(self.values)
        for option, name, value in found:
            if option not in before and not any(option in each and each & before for each in ALTERNATIVES):
                self.values[option], self.names[option] = value, name


def variable(option: str) -> str:
    """
    >>> variable("max_length")
    'WEFT_MAX_LENGTH'
    """
    return f"WEFT_{option.upper()}"


def collect(
    options: type, given: Mapping[str, Any], environment: Mapping[str, str], known: Collection[str]
) -> GivenOptions:
    """Return a command's options from all sources. `known` are the options of all commands, which share a file."""
    found = GivenOptions()
    given = {name: value for name, value in given.items() if value is not None}
    path = given.pop(FILE_OPTION, None) or environment.get(variable(FILE_OPTION))
    found.add((name, flag(name), tuple(value) if isinstance(value, list) else value) for name, value in given.items())
    found.add(from_environment(options, environment, found.notes))
    if path:
        found.add(from_file(options, read_file(path, known)))
    return found


def with_keys(options: T, environment: Mapping[str, str]) -> T:
    """Return options with the keys of the environment where they name none: for programs without a command line.

    `serve` and `route` have them from `collect`.
    """
    given = {name: value for each in ALTERNATIVES for name in each if (value := getattr(options, name, None))}
    keys = {variable(name): environment.get(variable(name), "") for name in SECRETS}
    return replace(options, **collect(type(options), given, keys, ()).values)


def settable(options: type) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the name, type and choices of all options; a command's arguments, such as prompts, are none."""
    hints = hints_of(options)
    for each in fields(options):
        if each.metadata.get("positional") != "*":
            yield each.name, hints[each.name], each.metadata["choices"]


def from_environment(options: type, environment: Mapping[str, str], notes: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the options that variables set. Other variables may have names that begin with WEFT_."""
    for option, hint, choices in settable(options):
        name = variable(option)
        text = environment.get(name)
        if not text:
            continue
        if hint is int and SERVICE.fullmatch(text):
            notes.append(f"{name}={text} is ignored: Kubernetes sets it for a service; set enableServiceLinks: false")
            continue
        yield option, name, parse(name, text.split(",") if get_origin(hint) is tuple else [text], hint, choices)


def from_file(options: type, said: Mapping[str, FileValue]) -> Iterator[tuple[str, str, Any]]:
    for option, hint, choices in settable(options):
        if option not in said:
            continue
        found = said[option]
        name = f"{found.place}: {option.replace('_', '-')}"
        if found.is_list and get_origin(hint) is not tuple:
            raise OptionError(f"{name} must be one value, got a list of {len(found.texts)}")
        yield option, name, parse(name, found.texts, hint, choices)


def parse(name: str, texts: Iterable[str], hint: Any, choices: tuple[str, ...]) -> Any:
    """Return the value of an option; `name` says in errors where it was given."""
    texts = [text.strip() for text in texts]
    if get_origin(hint) is tuple:
        return tuple(text for text in texts if text)
    [text] = texts
    if hint is bool or is_switch(hint):
        words: Mapping[str, Any] = WORDS if hint is bool else {**WORDS, **SWITCH}
        if text.lower() not in words:
            raise OptionError(f"{name} must be one of {', '.join(SWITCH if hint is not bool else WORDS)}, got {text!r}")
        return words[text.lower()]
    try:
        value = kind(hint)(text)
    except ValueError:
        whole = int in (hint, *get_args(hint))
        raise OptionError(f"{name} must be a {'whole ' if whole else ''}number, got {text!r}") from None
    if choices and value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
    return value


def read_file(path: str, known: Collection[str]) -> dict[str, FileValue]:
    """Return what a file says, by option. Raises with its name and line if that cannot be an option of Weft."""
    import yaml

    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise OptionError(f"cannot read the config file {path}: {error.strerror}") from None
    if len(content) > MOST_FILE_BYTES:
        raise OptionError(f"the config file {path} must be at most {MOST_FILE_BYTES} bytes long")
    try:
        root = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise OptionError(f"{path}:{line}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{path}: is not YAML: {str(error).splitlines()[0][:200]}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise OptionError(f"{path}:1: must be a mapping of options, such as `port: 8080`")
    found: dict[str, FileValue] = {}
    for key, value in root.value:
        place = f"{path}:{key.start_mark.line + 1}"
        name = checked_key(place, str(key.value) if isinstance(key, yaml.ScalarNode) else "", known, found)
        if isinstance(value, yaml.ScalarNode):
            texts: tuple[str, ...] = (value.value,)
            is_list = False
            # `disk:` and `disk: null` leave the option as it is.
            if value.tag == "tag:yaml.org,2002:null":
                continue
        elif isinstance(value, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in value.value):
            texts, is_list = tuple(str(each.value) for each in value.value), True
        elif isinstance(value, yaml.MappingNode) and name in BY_NAME and value.value:
            texts, is_list = tuple(named_values(place, str(key.value), value)), True
        else:
            raise OptionError(f"{place}: {key.value} must be a value or a list of values")
        found[name] = FileValue(texts, is_list, place)
    return found


def named_values(place: str, key: str, node: Any) -> Iterator[str]:
    """Yield NAME=VALUE for a mapping of values, and NAME=PATH,OPTION=VALUE for one of mappings that have a path."""
    import yaml

    for name, value in node.value:
        own = [(name, value)]
        if isinstance(value, yaml.MappingNode):
            own = sorted(value.value, key=lambda each: each[0].value != "path")
            if not own or own[0][0].value != "path":
                raise OptionError(f"{place}: {key}: {name.value} must have a path, such as `path: ./checkpoint`")
        if not all(isinstance(each, yaml.ScalarNode) and "," not in each.value for pair in own for each in pair):
            raise OptionError(f"{place}: {key}: {name.value} must have values without commas")
        texts = [f"{option.value}={text.value}" for option, text in own]
        texts[0] = f"{name.value}={own[0][1].value}"
        yield ",".join(texts)


def checked_key(place: str, key: str, known: Collection[str], before: Collection[str]) -> str:
    """Return the option that a key names."""
    name = key.replace("-", "_")
    if name in SECRETS:
        raise OptionError(f"{place}: {key} must not stand in a config file; name a file with {SECRETS[name]}")
    if name not in known:
        hint = did_you_mean(key, [each.replace("_", "-") for each in known])
        raise OptionError(f"{place}: unknown option {key[:80]!r}{hint}")
    if name in before:
        raise OptionError(f"{place}: {key} is given twice")
    return name
