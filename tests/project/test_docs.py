"""Checks what the documents claim: commands, examples, links, and the tests and planted bugs that they name."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

import weft
from tests.support.documents import README, blocks, planted_bugs, unknown, unknown_commands
from tests.support.fences import ROOT, project_files

DOCUMENTS = sorted(path for path in project_files(".md") if path.parent == ROOT or path.is_relative_to(ROOT / "docs"))


def broken_links(text: str, path: Path) -> list[str]:
    """Return links of a document to files or headings that do not exist."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, heading = target.partition("#")
        file = (path.parent / place) if place else path
        if "://" in target or (file.exists() and not heading):
            continue
        inside = text if file == path else file.read_text() if file.exists() else ""
        if heading not in anchors(inside):
            found.append(target)
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert broken_links(path.read_text(), path) == []


def test_a_broken_link_is_seen():
    good = "# Here, and `there`\n[a](design.md) [b](#here-and-there) [c](https://example.com/x#y)"
    text = f"{good} [this](nowhere.md#part) [that](design.md#no-such-part)"
    assert broken_links(text, ROOT / "docs" / "page.md") == ["nowhere.md#part", "design.md#no-such-part"]


def test_behaviours_and_planted_bugs_name_what_exists():
    for name in ("behaviours.md", "lab/planted-bugs.md"):
        assert unknown((ROOT / "docs" / name).read_text()) == []
    assert unknown("`test_docs.py::test_nothing` and `a_bug_that_nobody_planted`") != []


def test_every_behaviour_in_scope_has_a_test_and_a_bug():
    rows = re.findall(r"^\| (S\d+) \|(.*)\|$", (ROOT / "docs" / "behaviours.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"S{n}" for n in range(1, 15)]
    for number, row in rows:
        *_, held, fails = row.split("|")
        assert "::test_" in held, number
        assert "`" in fails, number


def test_every_planted_bug_stands_in_the_table():
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert sorted(bug for bug in planted_bugs() if f"`{bug}`" not in table) == []


def test_the_readmes_example_prints_what_it_says(monkeypatch):
    # What is reused does not depend on the dtype, and CPUs without bfloat16 compute float32 three times as fast.
    monkeypatch.setattr(weft, "LLM", partial(weft.LLM, dtype="float32"))
    [example], [expected] = blocks(README, "python"), blocks(README, "text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert printed.getvalue() == expected


def test_a_build_machine_runs_the_readmes_commands():
    """`.ci/run` takes its two commands from the README by their headings."""
    script = (ROOT / ".ci" / "run").read_text()
    extract = re.search(r"command_of\(\) \{\n(.*?)\n\}", script, re.DOTALL)[1]
    for heading, word in (("Run it", "weft serve"), ("Test it", "pytest")):
        assert f'command_of "{heading}"' in script or f'run_readme "{heading}"' in script
        command = f"command_of() {{ {extract}; }}; command_of '{heading}'"
        found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert found.stdout.strip() in [block.strip() for block in blocks(README, "sh")]
        assert word in found.stdout


def test_every_option_of_the_readme_exists():
    known = (ROOT / "docs" / "cli.md").read_text()
    for option in set(re.findall(r"`(--[a-z-]+)", README)):
        assert f"`{option}" in known or option == "--index-url", option


def test_every_command_of_the_readme_exists():
    assert unknown_commands(README) == []
    wrong = "`weft weave`, `.venv/bin/weft spin X`, `python -m benchmarks.loom`, `pip install '.[wool]'`"
    assert unknown_commands(wrong) == ["weft weave", "weft spin", "benchmarks.loom", "[wool]"]


def test_the_readme_says_what_the_built_in_model_is_and_what_comes_next():
    run, _, rest = README.partition("## Run it")[2].partition("\n## ")
    assert "weft-small" in run
    assert "smoke test" in run
    assert re.search(r"^\.venv/bin/weft serve \w+/\S+$", run, re.MULTILINE), "the next step is a real model"
    assert rest


def test_every_figure_has_the_command_that_makes_it():
    figures = (ROOT / "CONTRIBUTING.md").read_text().partition("## Figures\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| (.*?) \|", figures, re.MULTILINE)) - {"figure in docs/"}
    named = {name for cell in named for name in re.findall(r"`([\w-]+\.svg)`", cell)}
    assert named == {figure.name for figure in (ROOT / "docs").rglob("*.svg")}
