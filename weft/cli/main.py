"""`weft COMMAND`: finds the command, parses its options, and turns errors into one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft import __version__
from weft.base.errors import WeftError
from weft.base.options import Options
from weft.cli import doctor, generate, models, serve, simulate
from weft.cli.aliases import BENCHMARK, SERVER, Alias, translate
from weft.cli.bench import command as bench
from weft.cli.bench.options import BenchOptions
from weft.cli.chat import command as chat
from weft.cli.chat.options import ChatOptions
from weft.cli.options import CommandParser, add_options, complaint, read_options

log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns an exit code, or None for 0. `aliases` are accepted flags of other engines.

    `set_up_logs`: from there on, notes and errors are logged instead of printed.
    """

    about: str
    options: type
    run: Callable[[Any], int | None]
    aliases: tuple[Alias, ...] = ()
    set_up_logs: Callable[[Any], None] | None = None


COMMANDS = {
    "serve": Command(serve.ABOUT, serve.ServeOptions, serve.run, SERVER, serve.set_up_logs),
    "chat": Command(chat.ABOUT, ChatOptions, chat.run),
    "generate": Command(generate.ABOUT, generate.GenerateOptions, generate.run),
    "bench": Command(bench.ABOUT, BenchOptions, bench.run, BENCHMARK),
    "simulate": Command(simulate.ABOUT, simulate.SimulateOptions, simulate.run),
    "doctor": Command(doctor.ABOUT, doctor.DoctorOptions, doctor.run, SERVER),
    "models": Command(models.ABOUT, models.ModelsOptions, models.run),
}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="weft", description="Weft serves hybrid language models.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        add_options(commands.add_parser(name, help=command.about, description=command.about + "."), command.options)
    return parser


def parse(given: Sequence[str]) -> Namespace:
    """Parse the arguments; an unknown one is reported by its command, whose help is the useful one."""
    parser = build_parser()
    found, unknown = parser.parse_known_args(given)
    if unknown:
        CommandParser(prog=f"{parser.prog} {found.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and given[0] in COMMANDS else ""
    options: type = Options
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
        chosen: Any = read_options(options, found)
        if command.set_up_logs is not None:
            command.set_up_logs(chosen)
            logged = True
        for note in notes:
            tell(logging.WARNING, note)
        return command.run(chosen) or 0
    except WeftError as error:
        tell(logging.ERROR, complaint(error, options))
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Without this, Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
