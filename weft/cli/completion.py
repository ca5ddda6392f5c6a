"""`weft completion`: prints a script that completes commands, options and their values in a shell.

Derived from the options of all commands, so the script has what the parser accepts. Other values complete to files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import InvalidOption
from weft.cli.options import SWITCH, argument, flag, hints_of, is_switch, listed
from weft.cli.sources import FILE_HELP, FILE_OPTION

ABOUT = "print a completion script for bash, zsh or fish"
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `weft completion`."""

    shell: str | None = argument("shell that runs the script; default: the one in SHELL", choices=SHELLS)

    def __post_init__(self) -> None:
        if self.shell is not None and self.shell not in SHELLS:
            raise InvalidOption("shell", f"must be one of {', '.join(SHELLS)}, got {self.shell!r}")


@dataclass(frozen=True, slots=True)
class Completed:
    """An option (its name starts with dashes) or a positional argument of a command, and the values it may have."""

    name: str
    about: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    name: str
    about: str
    options: tuple[Completed, ...]


def completed(name: str, about: str, options: type, takes_file: bool = False) -> CompletedCommand:
    """Return what can follow a command. `takes_file`: among them the name of a file with options."""
    file = (Completed(f"--{FILE_OPTION}", FILE_HELP, True, ()),) if takes_file else ()
    return CompletedCommand(name, about, (*_completed(options), *file))


def _completed(options: type) -> Iterator[Completed]:
    hints = hints_of(options)
    for each in listed(options):
        about, choices = each.metadata["help"], each.metadata["choices"]
        if each.metadata.get("positional"):
            yield Completed(each.name, about, True, choices)
        elif hints[each.name] is bool:
            yield Completed(flag(each.name), about, False, ())
            yield Completed(f"--no-{flag(each.name)[2:]}", f"do not: {about}", False, ())
        else:
            values = tuple(SWITCH) if is_switch(hints[each.name]) else choices
            yield Completed(flag(each.name), about, True, values)
    yield Completed("--help", "show the help of this command", False, ())
    yield Completed("--help-all", "show its help with all options", False, ())


def run(options: CompletionOptions, commands: Mapping[str, CompletedCommand]) -> None:
    shell = options.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise InvalidOption("shell", f"is unknown here; pass one of {', '.join(SHELLS)}")
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](commands))


def bash(commands: Mapping[str, CompletedCommand]) -> str:
    values, flags = [], []
    for command in commands.values():
        dashed = [each for each in command.options if each.name.startswith("-")]
        flags.append(f"        {command.name}) words='{' '.join(each.name for each in dashed)}' ;;")
        for each in command.options:
            if each.choices and each in dashed:
                values.append(f"        '{command.name} {each.name}') words='{' '.join(each.choices)}' ;;")
            elif each.choices:
                # A positional value: proposed wherever no option begins.
                flags[-1] = flags[-1].replace("words='", f"words='{' '.join(each.choices)} ", 1)
    return BASH.format(commands=" ".join(commands), values="\n".join(values), flags="\n".join(flags))


BASH = """\
# Completion of weft for bash, made by `weft completion bash`.
_weft() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=''
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{commands} --help --version' -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} $previous" in
{values}
    esac
    if [ -z "$words" ]; then
        case "${{COMP_WORDS[1]}}" in
{flags}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _weft weft"""


def zsh(commands: Mapping[str, CompletedCommand]) -> str:
    """Return the script of bash, which zsh runs in a mode made for such scripts."""
    setup = "#compdef weft\nautoload -U +X bashcompinit && bashcompinit"
    return f"{setup}\n{bash(commands)}"


def fish(commands: Mapping[str, CompletedCommand]) -> str:
    lines = ["# Completion of weft for fish, made by `weft completion fish`."]
    for command in commands.values():
        about = _quoted(command.about)
        lines.append(f"complete -c weft -f -n __fish_use_subcommand -a {command.name} -d {about}")
        inside = f"complete -c weft -n '__fish_seen_subcommand_from {command.name}'"
        for each in command.options:
            name = f" -l {each.name[2:]}" if each.name.startswith("-") else " -f" if each.choices else ""
            values = f" -x -a {_quoted(' '.join(each.choices))}" if each.choices else " -r" if each.takes_value else ""
            if name:
                lines.append(f"{inside}{name}{values} -d {_quoted(each.about)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    r"""
    >>> print(_quoted("the model's name"))
    'the model\'s name'
    """
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
