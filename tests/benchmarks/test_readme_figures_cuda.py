"""The programs that README's figures come from run on a GPU, with a column for the default and one without drafts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fences import ROOT


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("program", ["serving", "prefill", "decode"])
def test_figures_of_the_readme_can_be_measured(program: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", f"benchmarks.{program}", "lfm2-1.2b", "--quick", "--json", str(report)]
    found = subprocess.run([*command, "--memory", "8GiB"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "draft=off" in report.read_text()
