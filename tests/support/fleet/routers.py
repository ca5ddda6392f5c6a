"""Routers as users start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.models import tiny_model


def start_route(arguments: list[str], log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weft", "route", *arguments, "--port", "0", "--model", str(tiny_model.FOLDER)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
