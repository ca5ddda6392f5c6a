"""Clients of other projects, each installed into a folder of its own: Python packages and those of Node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

INSTALL_SECONDS = 600


class Address(Protocol):
    """A server, whether it runs in this process or in one of its own."""

    @property
    def url(self) -> str: ...


def installed(command: list[str], folder: Path) -> None:
    """Run a package manager; skip the test if it cannot reach its index."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} took too long")
    if done.returncode:
        pytest.skip(f"cannot install: {done.stderr.strip()[-300:]}")


def said(command: list[str], served: Address, **variables: str) -> dict[str, Any]:
    environment = {**os.environ, "SERVER": served.url, **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_python(served: Address, folder: Path, package: str, script: str) -> dict[str, Any]:
    # Most of their modules are never imported.
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder)]
    installed([*pip, package], folder)
    return said([sys.executable, "-c", script], served, PYTHONPATH=str(folder))


def in_node(served: Address, folder: Path, packages: str, script: str) -> dict[str, Any]:
    installed(["npm", "install", "--silent", *packages.split()], folder)
    path = folder / "ask.mjs"
    path.write_text(script)
    return said(["node", str(path)], served)
