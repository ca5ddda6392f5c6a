"""Documents of the project, and the tests, bugs and commands that they name."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from importlib.util import find_spec

from tests.support.fences import ROOT, functions, parse, project_files
from weft.cli.main import COMMANDS

README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@cache
def names_of_tests() -> set[str]:
    found = set()
    for path in project_files(".py", under="tests"):
        # Parsing all tests takes seconds.
        found |= {f"{path.name}::{name}" for name in re.findall(r"^(?:async )?def (\w+)", path.read_text(), re.M)}
    return found


@cache
def planted_bugs() -> set[str]:
    """Functions below a decorator `plant`, and those that take a patch and nothing else."""
    found = set()
    for path in project_files(".py", under="tests"):
        text = path.read_text()
        for name, function in functions(parse(text)) if "planted" in text or "@plant" in text else ():
            alone = ast.unparse(function.args) == "patch: pytest.MonkeyPatch" and not name.startswith("check_")
            if alone or any(ast.unparse(each).split("(")[0] == "plant" for each in function.decorator_list):
                found.add(name)
    return found


def unknown(text: str) -> list[str]:
    """Tests and planted bugs that a text names and that do not exist. A bug's name is a whole sentence."""
    tests = set(re.findall(r"`(test_\w+\.py::\w+)`", text)) - names_of_tests()
    bugs = {name for name in re.findall(r"`([a-z]+(?:_[a-z0-9]+){3,})`", text) if not name.startswith("test_")}
    return sorted(tests | (bugs - planted_bugs()))


def unknown_commands(text: str) -> list[str]:
    """Return commands, modules and extras that a text names and that do not exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    given = " ".join(re.findall(r"`([^`\n]+)`", text) + blocks(text, "sh"))
    wrong = [f"weft {name}" for name in re.findall(r"(?:^|[\s/])weft ([a-z]+)", given) if name not in COMMANDS]
    wrong += [name for name in re.findall(r"python -m (benchmarks\.\w+)", given) if find_spec(name) is None]
    return wrong + [f"[{name}]" for name in re.findall(r"\.\[(\w+)\]", given) if name not in extras]
