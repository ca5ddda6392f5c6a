"""Pages for users are short, name what exists, and explain their words; a figure stands in one page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache

import pytest

from tests.support.documents import README, blocks, unknown, unknown_commands
from tests.support.fences import ROOT, project_files
from weft import builtin

DOCS = ROOT / "docs"
LAB = DOCS / "lab"
MOST_WORDS = 4_000
MOST_WORDS_TOGETHER = 40_000
# Written by programs, wholly or for the most part, or by mkdocstrings.
GENERATED = {"cli.md", "api.md", "metrics.md", "python.md"}
# For those who work on Weft: they may use its own words, after docs/design.md has explained them.
INSIDE = {
    "add-a-model.md", "behaviours.md", "design-serving.md", "design.md", "memory.md", "operations-interface.md",
    "tour.md",
}  # fmt: skip
PRIVATE = ("slab", "lease", "seat", "front")
# Options of other programs that pages name.
FOREIGN_OPTIONS = {
    "--index-url", "--no-deps", "--columns", "--rounds", "--quick", "--build", "--profile", "--from-literal",
    "--cacert", "--resolve", "--data-binary", "--json", "--only", "--rows", "--device", "--models",
}  # fmt: skip


@cache
def pages() -> dict[str, str]:
    """Return the pages of docs/ by their names, without the lab."""
    found = [path for path in project_files(".md", under="docs") if not path.is_relative_to(LAB)]
    return {str(path.relative_to(DOCS)): path.read_text() for path in found}


def written() -> dict[str, str]:
    return {name: text for name, text in pages().items() if name not in GENERATED}


def for_users() -> dict[str, str]:
    return {name: text for name, text in written().items() if name not in INSIDE}


@cache
def files() -> tuple[str, ...]:
    found = project_files(
        ".py", ".cpp", ".h", ".md", ".yaml", ".yml", ".json", ".svg", ".toml", ".conf", ".service", ""
    )
    return tuple(f"/{path.relative_to(ROOT)}" for path in found)


# length ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(written()))
def test_a_page_is_short(name):
    assert len(written()[name].split()) <= MOST_WORDS


def test_all_pages_together_can_be_read_in_an_afternoon():
    assert sum(len(text.split()) for text in written().values()) <= MOST_WORDS_TOGETHER


# what exists ----------------------------------------------------------------------------------------------------------


def unknown_files(text: str) -> list[str]:
    """Return files and folders in code spans that no path of the project ends with."""
    named = re.findall(r"`([\w./-]*\w\.(?:py|cpp|h|yaml|yml|conf|service|svg))(?:::\w+)?`", text)
    named += re.findall(r"`((?:weft|kernels|engine|memory|models|server|runner|tests|benchmarks)/[\w/]*)/`", text)
    return sorted(
        {name for name in named if not any(file.endswith(f"/{name}") or f"/{name}/" in file for file in files())}
    )


@pytest.mark.parametrize("name", sorted(pages()))
def test_files_that_a_page_names_exist(name):
    assert unknown_files(pages()[name]) == []


def test_a_file_that_does_not_exist_is_seen():
    text = "`memory/arena.py`, `arena.py`, `memory/loom.py`, `engine/wool/`, `tests/project/test_docs.py::test_nothing`"
    assert unknown_files(text) == ["engine/wool", "memory/loom.py"]


@pytest.mark.parametrize("name", sorted(pages()))
def test_tests_commands_and_options_that_a_page_names_exist(name):
    text = pages()[name]
    assert [each for each in unknown(text) if "::" in each] == []
    assert unknown_commands(text) == []
    if name not in GENERATED:
        assert unknown_options(text) == []


def unknown_options(text: str) -> list[str]:
    known = set(re.findall(r"`(--[a-z][a-z-]+)", pages()["cli.md"]))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", text))
    return sorted(named - known - FOREIGN_OPTIONS)


def test_an_option_that_does_not_exist_is_seen():
    assert unknown_options("`--memory 4GiB`, `--wool`") == ["--wool"]


def unserved_models(text: str) -> list[str]:
    """Return models that clients of a page call and that no command of the page serves."""
    served = {builtin.NAME, *re.findall(r"weft serve ([\w./:-]+)$", text, re.MULTILINE)}
    return sorted(set(re.findall(r'\bmodel="([^"]+)"', text)) - served)


@pytest.mark.parametrize("name", ["README.md", *sorted(name for name in pages() if name.startswith("quickstarts/"))])
def test_clients_of_a_page_call_the_model_that_it_serves(name):
    """A model from the hub is served under its whole id."""
    assert unserved_models(pages().get(name, README)) == []


def test_a_model_that_is_not_served_is_seen():
    text = 'weft serve owner/name\ncreate(model="owner/name")\ncreate(model="name")'
    assert unserved_models(text) == ["name"]


@pytest.mark.parametrize("name", sorted(written()))
def test_python_of_a_page_can_be_parsed(name):
    for code in (*blocks(written()[name], "py"), *blocks(written()[name], "python")):
        ast.parse(code)


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted([*pages(), "lab/README.md"])


def test_every_study_is_listed():
    listed = re.findall(r"\]\(([^)]+\.md)\)", (LAB / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in LAB.glob("*.md") if path.name != "README.md")


# words ----------------------------------------------------------------------------------------------------------------


def private_words(text: str) -> list[str]:
    """Return Weft's own words in a text. A word in italics is one that the page explains there."""
    found = []
    for word in PRIVATE:
        said = re.findall(rf"(?<![\w-]){word}s?(?![\w-])", re.sub(r"`[^`]*`|```.*?```", "", text, flags=re.DOTALL))
        if said and f"*{word}*" not in text:
            found.append(word)
    return found


@pytest.mark.parametrize("name", sorted(for_users()))
def test_pages_for_users_explain_private_words_or_do_without(name):
    text = for_users()[name]
    assert private_words(text) == []
    if re.search(r"\bcells?\b", text):
        assert re.search(r"\b64\b", text), "a page that speaks of cells says that a cell is 64 tokens"


def test_help_of_metrics_and_options_does_without_private_words():
    for name in ("metrics.md", "cli.md"):
        helps = [row.rsplit("|", 2)[1] for row in re.findall(r"^\| `.*$", pages()[name], re.MULTILINE)]
        assert len(helps) > 50
        assert [text for text in helps if private_words(text.replace("(slabs)", ""))] == []


def test_a_private_word_is_seen():
    assert private_words("Every lease has a seat. `slabs` and --front-timeout do not count.") == ["lease", "seat"]
    assert private_words("The server is called the *front* in logs; a front has threads.") == []


# figures --------------------------------------------------------------------------------------------------------------


def figures(text: str) -> set[str]:
    """Return the figures of the tables that are hardly equal by chance: four significant digits, no powers of two."""
    rows = "\n".join(re.findall(r"^\|.*\|$", re.sub(r"`[^`]*`", "", text), re.MULTILINE))
    found = set(re.findall(r"(?<![\w.,-])(\d{1,3}(?:,\d{3})+|\d+\.\d+|\d{4,})(?![\w.,-])", rows))
    return {figure for figure in found if is_distinctive(figure)}


def is_distinctive(figure: str) -> bool:
    digits = figure.replace(",", "").replace(".", "").strip("0")
    whole = float(figure.replace(",", ""))
    return len(digits) >= 4 and not (whole.is_integer() and int(whole) & (int(whole) - 1) == 0)


def kept_up_to_date() -> dict[str, str]:
    """Return the pages that state figures of today: all but dated studies."""
    lab = {f"lab/{path.name}": path.read_text() for path in LAB.glob("*.md") if not path.name[0].isdigit()}
    return pages() | lab


def repeated(texts: dict[str, str]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return pages that share two distinctive figures of one row. One alone may be equal by chance."""
    rows = [(name, figures(row)) for name, text in texts.items() for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    places = defaultdict(list)
    for name, found in rows:
        for figure in found:
            places[figure].append((name, found))
    return sorted(
        {
            (name, other, tuple(sorted(found & others)))
            for name, found in rows
            for figure in found
            for other, others in places[figure]
            if name < other and len(found & others) > 1
        }
    )


def test_a_row_of_figures_stands_in_one_page():
    assert repeated(kept_up_to_date()) == []


def test_a_repeated_row_is_seen():
    row = "| LFM2 | 46,797 ± 3 | 8,728 (.82) |"
    assert repeated({"a.md": row, "b.md": f"| x | 8,728 | 1 | 46,797 |\n{row}", "c.md": "| x | 46,797 |"}) == [
        ("a.md", "b.md", ("46,797", "8,728"))
    ]


def test_the_readmes_figures_are_those_of_the_lab():
    lab = "\n".join(path.read_text() for path in LAB.glob("*.md") if not path.name[0].isdigit())
    table = README.partition("## Figures")[2].partition("\n## ")[0]
    assert len(figures(table)) >= 5
    assert sorted(figures(table) - figures(lab)) == []


def test_figures_are_told_from_other_numbers():
    assert figures("| a | 46,797 | 0.7345 | 8,192 | 20,000 | `1,234` | 3.05 | v1.2345 |") == {"46,797", "0.7345"}
    assert figures("46,797 outside of a table") == set()


def test_the_readme_begins_with_a_drawing_and_fits_two_screens():
    assert README.splitlines()[2].startswith("![")
    assert README.count("\n## Figures") == 1
    assert len(README.splitlines()) < 160
