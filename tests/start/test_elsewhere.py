"""The serve path without a compiler, Triton, uvloop and Linux's own calls, as far as their absence can be simulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.support
from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.servers.serving import serving

FOLDER = str(Path(tests.support.__path__[0]) / "elsewhere")
PYTHONPATH = os.pathsep.join([FOLDER, str(ROOT)])


def test_the_simulation_takes_away_what_it_says():
    code = (
        "import os, shutil, importlib.util\n"
        "print(hasattr(os, 'sched_getaffinity'), shutil.which('g++'), os.path.exists('/proc/self/maps'))\n"
        "try: open('/proc/cpuinfo')\n"
        "except FileNotFoundError: print('no /proc')\n"
        "try: import triton\n"
        "except ImportError: print('no Triton')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    )
    assert done.stdout.split("\n")[:3] == ["False None True", "no /proc", "no Triton"], done.stderr


def test_a_server_answers_with_pytorchs_kernels_and_says_so(tmp_path):
    with serving("--device", "cpu", PYTHONPATH=PYTHONPATH, XDG_CACHE_HOME=str(tmp_path)) as served:
        assert len(served.lines) == 5, served.errors.read_text()
        assert "PyTorch kernels, no C++: no C++ compiler found" in served.lines[1]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
        status, answer = served.call("/v1/chat/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        status, answer = served.call("/v1/completions", {"prompt": "word " * 500, "max_tokens": 4, "stream": True})
        assert status == 200
        assert served.stop() == 0
        assert "Traceback" not in served.errors.read_text()


@pytest.mark.thorough
def test_the_other_commands_run_too(tmp_path):
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "XDG_CACHE_HOME": str(tmp_path)}
    small = [*tiny_model.ARGUMENTS, "--memory", "32MiB", "--max-length", "512"]
    for command in (
        ["models"],
        ["doctor", "--no-self-test", *small],
        ["generate", "Hello", "--max-tokens", "4", *small],
    ):
        done = subprocess.run([sys.executable, "-m", "weft", *command], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
