"""The distribution is called weft-serve: `weft` on the package index is another project's code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fences import ROOT

TEXTS = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".json", ".cfg", ".txt", ".service", ".conf", ".cpp", ".h", ""}
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
STRANGERS = [
    # pip install weft, pip install 'weft==1', uv pip install --upgrade weft
    re.compile(r"pip3? install[^\n|&;]*(?<![\w./-])weft(?![\w./-])"),
    # weft[cuda], weft[cuda,test]
    re.compile(r"(?<![\w./-])weft\[[a-z]"),
    re.compile(r"""(?:version|distribution|metadata|requires|files)\(["']weft["']\)"""),
]


def files() -> Iterator[Path]:
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        ours = not NOT_OURS.intersection(parts) and not any(part.endswith(".egg-info") for part in parts)
        if ours and path.suffix in TEXTS and path.is_file() and path != Path(__file__):
            yield path


def test_nothing_tells_users_to_install_another_projects_package():
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if any(pattern.search(line) for pattern in STRANGERS):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "strange"),
    [
        ("pip install weft", True),
        ("pip install 'weft[cuda]'", True),
        ("pip install -U weft==0.1", True),
        ("needs weft[bench]", True),
        ('version("weft")', True),
        ("pip install weft-serve", False),
        ("pip install 'weft-serve[cuda]'", False),
        (".venv/bin/pip install . && .venv/bin/weft serve", False),
        ("import weft", False),
    ],
)
def test_the_search_finds_what_it_is_for(line, strange):
    assert any(pattern.search(line) for pattern in STRANGERS) == strange


def test_the_command_and_the_import_keep_their_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "weft-serve"
    assert project["scripts"] == {"weft": "weft.cli.main:main"}
