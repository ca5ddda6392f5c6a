"""`./check`, `.ci/run` and CONTRIBUTING.md: every command that they name exists and does what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.dependents import dependent_tests
from tests.support.fences import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
BUILD = (ROOT / ".ci" / "run").read_text()
DOCUMENTS = {"CONTRIBUTING.md": CONTRIBUTING, "README.md": (ROOT / "README.md").read_text(), ".ci/run": BUILD}
STATIC = ["ruff format --check .", "ruff check .", "mypy"]
SITE = ["mkdocs --version", "mkdocs build --strict"]
BROWSER = ["tests.support.browser", "pytest -m browser tests/server/page"]
# An interpreter that records what it is asked to run, and says that all is well (or not).
RECORDER = """#!{python}
import os, pathlib, sys
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[2:]) + "\\n")
if sys.argv[2:] == ["tests.support.dependents", "weft/memory"]:
    print("tests/one.py\\ntests/two.py")
raise SystemExit({status})
"""


def checks_run(folder: Path, *arguments: str, status: int = 0) -> tuple[list[str], int]:
    """Return the commands that `./check` runs for these arguments, and its exit status."""
    log, recorder = folder / "log", folder / "python"
    log.unlink(missing_ok=True)
    recorder.write_text(RECORDER.format(python=sys.executable, log=str(log), status=status))
    recorder.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(recorder)}
    done = subprocess.run([ROOT / "check", *arguments], env=environment, capture_output=True, text=True)
    return log.read_text().splitlines(), done.returncode


def test_static_runs_no_test(tmp_path):
    assert checks_run(tmp_path, "static") == ([*STATIC, *SITE], 0)


def test_fast_runs_listed_tests_that_exist(tmp_path):
    (*static, tests), status = checks_run(tmp_path, "fast")
    assert (static, status) == ([*STATIC, *SITE], 0)
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert {"tests/engine/test_planner.py", "tests/engine/test_properties.py", "tests/engine/test_sameness.py"} <= set(
        files
    )
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_without_a_word_all_tests_run_and_options_reach_pytest(tmp_path):
    assert checks_run(tmp_path) == ([*STATIC, *SITE, "pytest -n 2", *BROWSER], 0)
    assert checks_run(tmp_path, "-k", "attention") == ([*STATIC, *SITE, "pytest -n 2 -k attention"], 0)


def test_of_a_folder_the_tests_that_depend_on_it_run(tmp_path):
    commands, status = checks_run(tmp_path, "weft/memory", "-x")
    asked = ["tests.support.dependents weft/memory", "pytest -n 2 tests/one.py tests/two.py -x"]
    assert (commands, status) == ([*STATIC, *SITE, *asked], 0)
    # Not the whole suite.
    commands, status = checks_run(tmp_path, "weft/none")
    assert (commands[-1], status) == ("tests.support.dependents weft/none", 1)


def test_a_test_depends_on_what_it_imports_and_what_that_imports_or_starts():
    modules = {
        "weft.a.x": "", "weft.b": "from weft.a import x", "weft.c.__main__": "import weft.b", "weft.d": "",
        "tests.test_near": "from weft.a.x import f", "tests.test_far": "import tests.helper",
        "tests.helper": 'run("-m", "weft.c")', "tests.test_other": "import weft.d",
    }  # fmt: skip
    assert dependent_tests(ROOT / "weft" / "a", modules) == ["tests/test_near.py", "tests/test_far.py"]


def test_a_check_that_fails_is_reported_after_all_have_run(tmp_path):
    # A MkDocs that does not even say its version is not installed, and no browser is found.
    commands, status = checks_run(tmp_path, status=1)
    assert (commands, status) == ([*STATIC, SITE[0], "pytest -n 2", BROWSER[0]], 1)


def words_for_check(text: str) -> set[str]:
    return set(re.findall(r"\./check ([a-z]+)\b(?!/)", text))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_words_that_documents_give_to_check_are_its_own(tmp_path, document):
    """A word that `./check` does not know reaches pytest, which takes it for a file."""
    for word in words_for_check(DOCUMENTS[document]):
        commands, _ = checks_run(tmp_path, word)
        assert not any(word in command.split() for command in commands), f"{document}: ./check {word}"


def test_a_word_that_check_does_not_know_is_seen(tmp_path):
    assert words_for_check(BUILD) == {"static"}
    assert {"fast", "static"} <= words_for_check(CONTRIBUTING)
    commands, _ = checks_run(tmp_path, "quick")
    assert commands[-1].split()[-1] == "quick"


def unknown(text: str) -> list[str]:
    """Return files, modules, markers and extras that a text's commands name and that do not exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    files = re.findall(r"(?<![\w/.])((?:tests|docs|weft|training|\.ci)/[\w./-]*\w)", text)
    modules = re.findall(r"python -m ([\w.]+)", text)
    return [
        *(file for file in files if not (ROOT / file).exists()),
        *(module for module in modules if not is_module(module)),
        *(name for name in re.findall(r"pytest -m (\w+)", text) if name not in markers),
        *(name for name in re.findall(r"\.\[(\w+)\]", text) if name not in project["project"]["optional-dependencies"]),
    ]


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package does not exist
        return False


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", ".ci/run"])
def test_commands_name_what_exists(document):
    assert unknown(DOCUMENTS[document]) == []


def test_a_command_that_does_not_exist_is_seen():
    wrong = "`pytest tests/test_none.py`, `python -m weft.none.such`, `pytest -m lazy`, `pip install -e '.[wool]'`"
    assert unknown(wrong) == ["tests/test_none.py", "weft.none.such", "lazy", "wool"]


def test_random_examples_are_the_same_in_every_run():
    import hypothesis

    assert hypothesis.settings.default.derandomize
    assert hypothesis.settings(max_examples=5).derandomize
