"""The project's prose: words that made earlier versions hard to read stay out of documents, messages and docstrings.

A list of words cannot make a text good. It keeps the worst habits from coming back.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.fences import ROOT, module_of, nodes, project_files

# What to write instead.
BANNED = {
    "nobody": "name the component",
    "whoever": "name the component",
    "somebody": "name the component",
    "anybody": "name the component",
    "told": "logged, reported, returned or warned",
    "outcome": "output or result",
    "so many": "up to `n`",
    "calls of tools": "tool calls",
    "is not there": "does not exist, or is missing",
}
# Docstrings that begin so are fragments: begin with a verb, or name the object.
FRAGMENTS = ("Of ", "The same", "As ", "Both ", "For whom", "To be ")

# Studies quote their time.
LAB = ROOT / "docs" / "lab"
PACKAGES = ("weft", "benchmarks")

WIDTH = 120


@cache
def documents() -> dict[str, str]:
    found = [path for path in project_files(".md") if path.parent == ROOT or path.is_relative_to(ROOT / "docs")]
    found = [path for path in found if not path.is_relative_to(LAB)]
    found += project_files(".md", under="benchmarks")
    found += project_files(".json", ".yml", ".conf", ".service", under="deploy")
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


ANY_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})s?\b", re.IGNORECASE)


def banned_words(text: str) -> list[str]:
    """Return the banned words of a text, however its lines are wrapped. Identifiers do not count."""
    flat = " ".join(re.sub(r"^\s*#+", "", text, flags=re.MULTILINE).split())
    if not ANY_BANNED.search(flat):
        return []
    return [word for word in BANNED if re.search(rf"\b{word}s?\b", flat, re.IGNORECASE)]


@cache
def docstrings(source: str) -> list[ast.Constant]:
    return list(find_docstrings(source))


def find_docstrings(source: str) -> Iterator[ast.Constant]:
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def messages(source: str) -> str:
    """Return all string literals that are not docstrings: errors, log lines, help texts."""
    apart = {(each.lineno, each.col_offset) for each in docstrings(source)}
    found = [
        node.value
        for node in nodes(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (node.lineno, node.col_offset) not in apart
    ]
    return "\n\n".join(found)


def comments(source: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string for token in tokens if token.type == tokenize.COMMENT)


def prose(source: str) -> str:
    return "\n\n".join([comments(source), *(str(each.value) for each in docstrings(source))])


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in project_files(".py", under=package)]


@pytest.mark.parametrize("name", sorted(documents()))
def test_documents_use_plain_words(name):
    assert banned_words(documents()[name]) == []


def test_messages_use_plain_words():
    found = {module_of(path): banned_words(messages(path.read_text())) for path in sources()}
    assert {module: words for module, words in found.items() if words} == {}


def test_docstrings_and_comments_use_plain_words():
    found = {module_of(path): banned_words(prose(path.read_text())) for path in sources()}
    assert {module: words for module, words in found.items() if words} == {}


def test_docstrings_begin_with_a_verb_or_an_object():
    found = [
        f"{module_of(path)}:{each.lineno}: {str(each.value)[:40]}"
        for path in sources()
        for each in docstrings(path.read_text())
        if str(each.value).strip().startswith(FRAGMENTS)
    ]
    assert found == []


def test_banned_words_are_seen_wherever_they_stand():
    for word in BANNED:
        assert banned_words(f"This line is wrapped inside of {word.replace(' ', chr(10))} by chance.") == [word]
    assert banned_words("`an_expert_takes_only_so_many_tokens`, untold, a nobody_knows") == []
    source = '"""Nobody."""\n# Whoever reads\nraise ValueError(f"{x} is told")\n'
    assert banned_words(messages(source)) == ["told"]
    assert banned_words(prose(source)) == ["nobody", "whoever"]
    assert banned_words(comments("# that is\n# so\n# many\n")) == ["so many"]


def test_the_fence_covers_all_packages_and_exempts_only_the_lab():
    modules = {module_of(path) for path in sources()}
    assert {"weft.engine.loop", "benchmarks.cpu", "benchmarks.peers.work"} <= modules
    assert {"README.md", "docs/tour.md", "benchmarks/traces/README.md"} <= set(documents())
    assert LAB.is_dir()
    assert [name for name in documents() if name.startswith("docs/lab/")] == []


def too_wide(text: str) -> list[str]:
    """Return the lines of prose beyond the width. Tables, code and generated samples are not wrapped."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if len(line) > WIDTH]
    return [line for line in lines if not line.startswith(("|", "    ", "!["))]


@pytest.mark.parametrize("name", sorted(name for name in documents() if name.endswith(".md")))
def test_prose_of_documents_is_wrapped(name):
    assert too_wide(documents()[name]) == []


def test_a_line_that_is_too_wide_is_seen():
    assert too_wide("word " * 30) != []
    assert too_wide("| " + "cell " * 30 + "\n```\n" + "code " * 30 + "\n```\n") == []
