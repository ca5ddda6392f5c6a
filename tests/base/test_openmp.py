"""OpenMP's threads sleep soon on x86 without units for bfloat16: the setting is there before PyTorch can read it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weft.base.openmp import SPINS, shorten_waits

SAY = """
import os, pathlib, sys, types
os.uname = lambda: types.SimpleNamespace(machine="x86_64")
pathlib.Path.read_text = lambda path: "flags : avx2"
import weft
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize("given", [{}, {SPINS: "77"}, {"OMP_WAIT_POLICY": "passive"}])
def test_importing_weft_shortens_waits_unless_the_user_did(given: dict[str, str]) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in (SPINS, "OMP_WAIT_POLICY")}
    expected = dict(given)
    shorten_waits(expected, "x86_64", lambda: False)
    found = subprocess.run([sys.executable, "-c", SAY], env=plain | given, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(expected.get(SPINS))
