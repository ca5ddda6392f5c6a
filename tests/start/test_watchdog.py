"""A front whose event loop is blocked ends by itself, and a service manager hears how the front is."""

from __future__ import annotations

import configparser
import os
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.fences import ROOT
from tests.support.servers.serving import SECONDS, serving
from weft.cli.main import parse
from weft.start.watchdog import notify, service_seconds

UNIT = ROOT / "deploy" / "weft.service"
# A call in C that never ends and holds the interpreter lock; and one that waits without it.
HOLDING = "import re; re.match('(a+)+$', 'a' * 100 + 'b')"
WAITING = "import threading; threading.Event().wait()"


def watched(seconds: float, work: str) -> subprocess.CompletedProcess[str]:
    """Run a loop that does this work without answering, under a watch."""
    code = f"""
import asyncio
from weft.start.watchdog import Watchdog

async def main():
    watchdog = Watchdog({seconds})
    watchdog.start()
    await asyncio.sleep(0)
    {work}

asyncio.run(main())
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)


def test_a_blocked_loop_ends_the_process_with_code_1_and_a_log_line():
    found = watched(0.5, WAITING)
    assert found.returncode == 1
    assert "the event loop has been blocked for 0.5 s" in found.stderr
    assert "in main" in found.stderr, "where it hangs"


def test_a_loop_that_is_blocked_by_the_interpreter_lock_ends_the_process_too():
    found = watched(0.5, HOLDING)
    assert found.returncode == 1
    assert "Timeout" in found.stderr
    assert "in main" in found.stderr


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_watch_that_is_off_or_was_stopped_ends_nothing(seconds):
    stop = "watchdog.stop()" if seconds else "pass"
    assert watched(seconds, f"{stop}; import time; time.sleep(1.3)").returncode == 0


class Manager:
    """The socket of a service manager. It is read all the time: a full one loses what is sent."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._heard: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        while state := self._socket.recv(1000).decode():
            self._heard.put(state)

    def hear(self) -> str:
        return self._heard.get(timeout=SECONDS)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.address)
        self._reading.join()
        self._socket.close()


@pytest.mark.thorough
def test_a_service_manager_hears_that_the_server_is_ready_lives_and_stops(tmp_path):
    with (
        closing(Manager(tmp_path)) as manager,
        serving("--front-timeout", "0", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="2000000") as served,
    ):
        heard = [manager.hear() for _ in range(4)]
        assert sorted(set(heard)) == ["READY=1", "WATCHDOG=1"]
        assert heard.count("READY=1") == 1
        assert served.stop() == 0
        while (state := manager.hear()) != "STOPPING=1":
            assert state == "WATCHDOG=1"


def test_without_a_service_manager_nothing_is_sent(monkeypatch, tmp_path):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    notify("READY=1")
    assert service_seconds() == 0
    for address in ("", "relative", str(tmp_path / "nobody"), "@weft-nobody"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert service_seconds() == 3
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert service_seconds() == 0


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(UNIT.read_text())
    return found


def test_the_unit_starts_a_server_that_exists_and_notifies():
    service = unit()["Service"]
    assert (service["Type"], service["NotifyAccess"], service["KillMode"]) == ("notify", "main", "mixed")
    assert int(service["WatchdogSec"]) > 0
    command = shlex.split(service["ExecStart"].replace("\\\n", " "))
    assert Path(command[0]).name == "weft"
    assert parse(command[1:]).command == "serve"
    assert {"NoNewPrivileges", "ProtectSystem", "PrivateTmp", "RestrictAddressFamilies"} <= set(service)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path):
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/srv/weft/bin/weft", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert not [line for line in found.stderr.splitlines() if UNIT.name in line], found.stderr
