"""Writes docs/cli.md from the options of all commands: `python -m weft.cli.reference > docs/cli.md`."""

from __future__ import annotations

from weft.cli.main import COMMANDS
from weft.cli.options import table

HEAD = """\
# The command line

Written by `python -m weft.cli.reference > docs/cli.md`; a test compares. The options from `--model` to `--threads` are
also the keyword arguments of `weft.LLM`, with underscores.
"""


def reference() -> str:
    parts = [HEAD]
    for name, (about, options, _) in COMMANDS.items():
        parts.append("\n".join([f"## weft {name}", "", f"{about.capitalize()}.", "", *table(options), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
