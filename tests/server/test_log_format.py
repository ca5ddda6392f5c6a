"""Every line that a server writes to standard error has one format, whichever process or library it comes from."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys

import pytest

from tests.support.servers.serving import SECONDS, serving
from weft.base.options import Options
from weft.server.settings import Limits, ServerSettings
from weft.server.texts.messages import Failed, Job, framed, read_reply, setup_of
from weft.server.texts.prompt_builder import PromptFacts
from weft.start.launch import LaunchSettings, make_backend
from weft.start.thread_backend import ThreadBackend
from weft.wire.frames import HEADER_BYTES

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: .+|  .*")

MANY_SOURCES = """
import logging, sys, threading, warnings
from weft.base.logs import set_up_logging
set_up_logging("INFO", sys.argv[1])
logging.getLogger("uvicorn.error").error("from uvicorn")
warnings.warn("from a library")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise ValueError("from the main thread")
"""


def lines_of(format: str) -> list[str]:
    found = subprocess.run([sys.executable, "-c", MANY_SOURCES, format], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    return found.stderr.splitlines()


def test_libraries_warnings_and_uncaught_exceptions_are_logged_as_text():
    found = lines_of("text")
    assert [line for line in found if not LINE.fullmatch(line)] == []
    first = [line for line in found if not line.startswith("  ")]
    told = ["from uvicorn", "UserWarning: from a library", "thread worker ends", "the process ends"]
    assert len(first) == len(told)
    assert all(part in line for part, line in zip(told, first))
    assert r"\x0a" not in "".join(first), "a warning is one line"


def test_libraries_warnings_and_uncaught_exceptions_are_logged_as_json():
    found = [json.loads(line) for line in lines_of("json")]
    assert [line["logger"] for line in found] == ["uvicorn.error", "py.warnings", "weft", "weft"]
    assert "ValueError: from the main thread" in found[-1]["traceback"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_text_worker_logs_in_the_servers_format(format):
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "weft.server.text_process", str(theirs.fileno())]
    worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    with ours:
        ours.settimeout(SECONDS)
        ours.sendall(framed(setup_of(None, None, Limits(), False, 20, format)))
        ours.sendall(framed(Job("no such job", PromptFacts("", 0, 0, 0), b"")))
        size = int.from_bytes(ours.recv(HEADER_BYTES, socket.MSG_WAITALL), "big")
        assert isinstance(read_reply(ours.recv(size, socket.MSG_WAITALL)), Failed)
    lines = worker.communicate(timeout=SECONDS)[1].splitlines()
    if format == "json":
        [line] = map(json.loads, lines)
        assert (line["logger"], line["message"]) == ("weft.text", "cannot read a text")
    else:
        assert "ERROR weft.text: cannot read a text" in lines[0]
        assert [line for line in lines if not LINE.fullmatch(line)] == []


@pytest.mark.thorough
def test_all_lines_of_a_server_with_notes_and_warnings_have_one_format():
    """The note is the front's, the warning the engine's. Only the first lines, on standard output, are for people."""
    with serving("--enforce-eager", "--max-length", "40000") as served:
        assert served.call("/health")[0] == 200
        assert served.stop() == 0
        lines = served.errors.read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert any("WARNING weft: --enforce-eager: decode steps" in line for line in lines)
    assert any("WARNING weft: max_length is 40000 but the model was trained" in line for line in lines)
    assert len(served.lines) == 5


@pytest.mark.parametrize(
    ("format", "terminal", "shown"), [("text", True, True), ("text", False, False), ("json", True, False)]
)
def test_a_progress_bar_is_shown_on_a_terminal_with_text_logs_only(monkeypatch, format, terminal, shown):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(ThreadBackend, "from_options", lambda options, progress, **more: progress)
    place = LaunchSettings(in_process=True, log_format=format)
    assert make_backend(Options(), ServerSettings(), place) is shown
