"""Clients of other projects, each installed into a folder of its own: Python packages and those of Node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.http_server import Served

INSTALL_SECONDS = 300


def installed(command: list[str], folder: Path) -> None:
    """Run a package manager; skip the test if it cannot reach its index."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} took too long")
    if done.returncode:
        pytest.skip(f"cannot install: {done.stderr.strip()[-300:]}")


def said(command: list[str], served: Served, **variables: str) -> dict[str, object]:
    environment = {**os.environ, "SERVER": served.url, **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_python(served: Served, folder: Path, package: str, script: str) -> dict[str, object]:
    installed([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), package], folder)
    return said([sys.executable, "-c", script], served, PYTHONPATH=str(folder))
