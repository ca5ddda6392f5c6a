"""Writes docs/cli.md from the options of all commands: `python -m weft.cli.reference > docs/cli.md`."""

from __future__ import annotations

from dataclasses import fields

from weft.base.options import Options
from weft.cli import aliases
from weft.cli.main import COMMANDS, Command
from weft.cli.options import own_names, table

HEAD = """\
# The command line

Written by `python -m weft.cli.reference > docs/cli.md`; a test compares. Errors are one line and exit code 2.
"""

ENGINE = """\
## Options of the engine

These commands take them: {takers}. With underscores they are also the keyword arguments of `weft.LLM`.
"""

FLAGS = """\
## Flags of other engines

`weft serve` and `weft doctor` understand flags of vLLM's and SGLang's servers, so that start scripts need few changes.
Flags that have the same name here (`--host`, `--port`, `--api-key`, `--served-model-name`, ...) are not listed.
"""

BENCH_FLAGS = """\
`weft bench` understands those of their benchmarks.
"""


def reference() -> str:
    parts = [HEAD]
    parts += [section(name, command) for name, command in COMMANDS.items()]
    takers = ", ".join(f"`weft {name}`" for name, command in COMMANDS.items() if issubclass(command.options, Options))
    names = [each.name for each in fields(Options)]
    parts.append("\n".join([ENGINE.format(takers=takers), *table(Options, names), ""]))
    parts.append("\n".join([FLAGS, *aliases.table(aliases.SERVER), ""]))
    parts.append("\n".join([BENCH_FLAGS, *aliases.table(aliases.BENCHMARK), ""]))
    return "\n".join(parts)


def section(name: str, command: Command) -> str:
    lines = [f"## weft {name}", "", f"{command.about[0].upper()}{command.about[1:]}.", ""]
    lines += [*table(command.options, own_names(command.options)), ""]
    if issubclass(command.options, Options):
        lines += ["And the [options of the engine](#options-of-the-engine).", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
