"""`weft COMMAND`: finds the command, reads its options, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from weft import __version__
from weft.base.errors import WeftError
from weft.cli import generate
from weft.cli.options import Parser, add_options, read_options

# name -> (what it does, its options, what runs it)
COMMANDS: dict[str, tuple[str, type, Callable[[Any], None]]] = {
    "generate": (generate.ABOUT, generate.GenerateOptions, generate.run),
}


def build_parser() -> Parser:
    parser = Parser(prog="weft", description="Weft serves hybrid language models.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (about, options, _) in COMMANDS.items():
        add_options(commands.add_parser(name, help=about, description=about + "."), options)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    found = vars(build_parser().parse_args(arguments))
    name = found.pop("command")
    _, options, run = COMMANDS[name]
    try:
        run(read_options(options, found))
    except WeftError as error:
        print(f"weft {name}: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read us has enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0
