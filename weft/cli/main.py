"""`weft COMMAND`: finds the command, parses its options, and turns errors into one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft import __version__
from weft.base.aliases import BENCHMARK, SERVER, Alias, translate
from weft.base.errors import WeftError
from weft.base.options import Options
from weft.base.suggest import did_you_mean
from weft.cli import batch, cache, completion, config, convert, doctor, generate, models, pull, route, serve, simulate
from weft.cli.bench import command as bench
from weft.cli.bench.options import BenchOptions
from weft.cli.chat import command as chat
from weft.cli.chat.options import ChatOptions
from weft.cli.groups import EXAMPLES, GROUPS, is_common
from weft.cli.options import CommandParser, add_options, complaint, own_names, read_options, usage
from weft.cli.sources import FILE_HELP, FILE_OPTION, GivenOptions, collect, settable
from weft.cli.trace import command as trace

log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns an exit code, or None for 0. `aliases` are accepted flags of other engines.

    `set_up_logs`: from there on, notes and errors are logged instead of printed. `takes_file`: options also come from
    WEFT_* variables and a file. `explains`: `run` also gets where they came from.
    """

    about: str
    options: type
    run: Callable[..., int | None]
    aliases: tuple[Alias, ...] = ()
    set_up_logs: Callable[[Any], None] | None = None
    takes_file: bool = False
    explains: bool = False


COMMANDS = {
    "serve": Command(serve.ABOUT, serve.ServeOptions, serve.run, SERVER, serve.set_up_logs, takes_file=True),
    "route": Command(route.ABOUT, route.RouteOptions, route.run, (), route.set_up_logs, takes_file=True),
    "chat": Command(chat.ABOUT, ChatOptions, chat.run, takes_file=True),
    "generate": Command(generate.ABOUT, generate.GenerateOptions, generate.run, takes_file=True),
    "batch": Command(batch.ABOUT, batch.BatchOptions, batch.run, takes_file=True),
    "bench": Command(bench.ABOUT, BenchOptions, bench.run, BENCHMARK, takes_file=True),
    "simulate": Command(simulate.ABOUT, simulate.SimulateOptions, simulate.run),
    "doctor": Command(doctor.ABOUT, doctor.DoctorOptions, doctor.run, SERVER, takes_file=True),
    "config": Command(config.ABOUT, config.ConfigOptions, config.run, SERVER, takes_file=True, explains=True),
    "models": Command(models.ABOUT, models.ModelsOptions, models.run),
    "pull": Command(pull.ABOUT, pull.PullOptions, pull.run),
    "convert": Command(convert.ABOUT, convert.ConvertOptions, convert.run),
    "cache": Command(cache.ABOUT, cache.CacheOptions, cache.run),
    "trace": Command(trace.ABOUT, trace.TraceOptions, trace.run, takes_file=True),
}


COMMANDS["completion"] = Command(
    completion.ABOUT,
    completion.CompletionOptions,
    lambda options: completion.run(
        options,
        {
            name: completion.completed(name, each.about, each.options, each.takes_file)
            for name, each in COMMANDS.items()
        },
    ),
)


FIRST_STEPS = """\
first steps:
  weft chat                            talk to the built-in model
  weft models                          see which models to try next
  weft serve lfm2:1.2b                 download one of them, and serve it
  weft COMMAND --help                  see examples and options"""


ALL = "--help-all"


def build_parser(everything: bool = True) -> CommandParser:
    """Return the parser of all commands. Without `everything`, help shows only the options that most people need."""
    parser = CommandParser(prog="weft", description="Weft serves hybrid language models.", epilog=FIRST_STEPS)
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        examples = "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES.get(name, ()))])
        own = own_names(command.options)
        hidden = {each.name for each in fields(command.options) if not is_common(name, each.name, each.name in own)}
        if hidden and not everything:
            examples += f"\n\n{len(hidden)} more options: weft {name} {ALL}"
        line = usage(f"weft {name}", command.options)
        about = f"{command.about[0].upper()}{command.about[1:]}."
        added = commands.add_parser(name, usage=line, help=command.about, description=about, epilog=examples)
        added.add_argument(ALL, action="help", help="show this help with all options" if hidden else SUPPRESS)
        if command.takes_file:
            added.add_argument(f"--{FILE_OPTION}", metavar="FILE", default=SUPPRESS, help=FILE_HELP)
        add_options(added, command.options, GROUPS.get(name), frozenset() if everything else hidden)
    return parser


def parse(given: Sequence[str]) -> Namespace:
    """Parse the arguments; an unknown one is reported by its command, whose help is the useful one."""
    parser = build_parser(ALL in given)
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(f"unknown command {given[0]}{did_you_mean(given[0], COMMANDS)}")
    found, unknown = parser.parse_known_args(given)
    if unknown:
        dashed = next((each for each in unknown if each.startswith("-")), None)
        wrong = f"unknown argument {unknown[0]}" if dashed is None else unknown_option(dashed, COMMANDS[found.command])
        CommandParser(prog=f"{parser.prog} {found.command}").error(wrong)
    return found


def collected(command: Command, given: Mapping[str, Any]) -> GivenOptions:
    """Return a command's options from all their sources."""
    if not command.takes_file:
        return collect(command.options, given, {}, ())
    known = {option for other in COMMANDS.values() if other.takes_file for option, _, _ in settable(other.options)}
    return collect(command.options, given, os.environ, known)


def unknown_option(given: str, command: Command) -> str:
    """Return a complaint, with the option that may have been meant: one of Weft's, or of another engine's."""
    name = given.partition("=")[0]
    own = completion.completed("", "", command.options, command.takes_file).options
    known = [each.name for each in own if each.name.startswith("-")]
    known += [flag for alias in command.aliases for flag in alias.names]
    return f"unknown option {name}{did_you_mean(name, known)}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and given[0] in COMMANDS else ""
    options: type = Options
    names: Mapping[str, str] = {}
    logged = False

    def tell(level: int, text: str) -> None:
        if logged:
            log.log(level, "%s", text)
        else:
            print(f"weft {name}: {text}", file=sys.stderr)

    try:
        aliases = COMMANDS[name].aliases if name else ()
        translated, notes = translate(given, aliases)
        found = vars(parse(translated))
        name = found.pop("command")
        command = COMMANDS[name]
        options = command.options
        sources = collected(command, found)
        names = sources.names
        chosen: Any = read_options(options, sources.values)
        if command.set_up_logs is not None:
            command.set_up_logs(chosen)
            logged = True
        for note in [*notes, *sources.notes]:
            tell(logging.WARNING, note)
        return command.run(chosen, *([names] if command.explains else [])) or 0
    except WeftError as error:
        tell(logging.ERROR, complaint(error, options, names))
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Without this, Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
