"""Every command that the documentation gives for a figure is one that its program understands."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys

import pytest

from tests.support.fences import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of the lab with a date in their name say what was run then.
PAGES = [page for page in PAGES if not re.match(r"\d{4}-\d\d-\d\d-", page.name)]
COMMAND = re.compile(
    r"python\s+-m\s+(benchmarks[.\w]+)([^`#\n]*(?:\n[^`#\n]+)*)`|^\s*python -m (benchmarks[.\w]+)([^`#\n]*)", re.M
)
PLACEHOLDERS = {"MODEL": "lfm2-1.2b", "CONFIG": "lfm2-1.2b", "FOLDER": ".", "BEFORE": ".", "TREE": "."}


class Parsed(Exception):
    """The program has understood its arguments."""


def commands_in(text: str) -> set[tuple[str, ...]]:
    """Return the commands of benchmarks in a page: in the text, where they may be wrapped, and in code blocks."""
    found = set()
    for match in COMMAND.finditer(text):
        name, given = (match[1], match[2]) if match[1] else (match[3], match[4])
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(given.replace("\n", " ")) if word != "..."]
        found.add((name, *(word.split("|")[0] for word in words)))
    return found


COMMANDS = sorted({command for page in PAGES for command in commands_in(page.read_text())})


def test_commands_are_found_in_the_text_and_in_blocks() -> None:
    page = "Run `python -m benchmarks.decode MODEL\n--quick`; `python -m benchmarks.http`:\n\n"
    page += "    python -m benchmarks.mtp --rows 1  # all\n"
    expected = {("benchmarks.decode", "lfm2-1.2b", "--quick"), ("benchmarks.http",), ("benchmarks.mtp", "--rows", "1")}
    assert commands_in(page) == expected


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_a_figure_is_understood(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", list(command))
    monkeypatch.delitem(sys.modules, command[0], raising=False)
    with pytest.raises((Parsed, SystemExit)) as ended:
        runpy.run_module(command[0], run_name="__main__")
    # A program that is only named may need arguments.
    assert ended.type is Parsed or (len(command) == 1 and ended.value.code == 2)
