"""The serve path without a compiler, Triton, uvloop and Linux's own calls, as far as their absence can be simulated."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tests.support
from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.servers.serving import serving
from weft.base import file_locks
from weft.base.errors import OptionError
from weft.memory.tiers.disk.block_file import FileBlocks
from weft.server.batches.store import BatchStore
from weft.server.settings import Limits
from weft.server.stored.file import RecordFile

FOLDER = str(Path(tests.support.__path__[0]) / "elsewhere")
PYTHONPATH = os.pathsep.join([FOLDER, str(ROOT)])


def test_the_simulation_takes_away_what_it_says():
    code = (
        "import os, shutil, importlib.util\n"
        "print(hasattr(os, 'sched_getaffinity'), shutil.which('g++'), os.path.exists('/proc/self/maps'))\n"
        "try: open('/proc/cpuinfo')\n"
        "except FileNotFoundError: print('no /proc')\n"
        "for name in ('triton', 'uvloop', 'fcntl', 'resource'):\n"
        "    try: __import__(name); print(name)\n"
        "    except ImportError: print('no', name)\n"
        "import mmap, select, socket\n"
        "print(hasattr(mmap, 'MADV_HUGEPAGE'), hasattr(select, 'epoll'), hasattr(socket, 'SO_REUSEPORT'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    )
    missing = ["no triton", "no uvloop", "no fcntl", "no resource"]
    assert done.stdout.splitlines() == ["False None True", "no /proc", *missing, "False False False"], done.stderr


@pytest.mark.thorough
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
def test_a_pure_python_wheel_serves(tmp_path):
    command = [sys.executable, str(ROOT / "release" / "wheel.py"), "--pure", "--no-isolation", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*-py3-none-any.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    paths = os.pathsep.join([FOLDER, str(installed)])
    # Not the checkout, in which the test runs.
    environment = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(tmp_path)}
    place = "import weft; print(weft.__file__)"
    found = subprocess.check_output([sys.executable, "-c", place], text=True, env=os.environ | environment)
    assert found.startswith(str(installed))
    with serving("--device", "cpu", **environment) as served:
        assert "PyTorch kernels, no C++: no C++ compiler found" in served.lines[1], served.errors.read_text()
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
        status, answer = served.call("/v1/chat/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert served.stop() == 0


def test_without_locks_nothing_is_kept_that_another_server_could_write(tmp_path, monkeypatch):
    monkeypatch.setattr(file_locks, "fcntl", None)
    store = BatchStore(str(tmp_path / "batches"), Limits(), lambda: 0.0)
    with pytest.raises(OptionError, match=r"batch_folder .* this system has no locks on files"), store.claimed():
        pass
    with pytest.raises(OptionError, match="this system has no locks on files"):
        RecordFile(tmp_path / "responses", 1 << 20)
    with pytest.raises(OptionError, match=r"disk .* cannot be locked: this system has no locks on files"):
        FileBlocks(tmp_path / "disk")


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
