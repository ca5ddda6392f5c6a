"""File descriptors run out: clients that send requests still get in, and the server logs it."""

from __future__ import annotations

import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.fences import ROOT
from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import SECONDS, serving, wait_for_log, with_descriptors
from tests.support.servers.wire_server import LOOPS, get, receive_until, rest_of
from weft.server.http.connections import descriptors_for_connections, raise_descriptor_limit

BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n"
LAST = get("/", "1.1", "Connection: close")
FEW = 64


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


@pytest.mark.thorough
def test_seventy_clients_that_drip_do_not_lock_others_out_of_sixty_four_descriptors():
    with serving("--api-key", "secret", descriptors=FEW) as served, ExitStack() as stack:
        port = int(served.url.rpartition(":")[2])
        dripping = [stack.enter_context(connect(port)) for _ in range(70)]
        for wire in dripping:
            with suppress(ConnectionError):
                wire.sendall(BODY)
                receive_until(wire, b"\r\n")
        for wire in dripping:
            with suppress(ConnectionError):
                wire.sendall(b"x")
        assert served.call("/v1/models", key="secret")[0] == 200
        assert "connections are in use" in served.errors.read_text()
        assert "Traceback" not in served.errors.read_text()


@contextmanager
def crowded(loop: str, folder: Path) -> Iterator[tuple[int, Path, subprocess.Popen[str]]]:
    """A server that runs out of descriptors before it is at its bound: its port, its log and its process."""
    command = with_descriptors(FEW, [sys.executable, "-m", "tests.support.servers.crowded_server", loop])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        with process:
            assert process.stdout is not None
            yield int(process.stdout.readline()), Path(log.name), process
            process.communicate("", SECONDS)


@pytest.mark.parametrize("loop", LOOPS)
def test_without_a_free_descriptor_waiting_clients_make_room_and_the_log_says_so(loop, tmp_path):
    with crowded(loop, tmp_path) as (port, log, _), ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(connect(port)).sendall(b"GET / HTTP/1.1\r\n")
        with connect(port) as wire:
            wire.sendall(LAST)
            assert b" 200 " in rest_of(wire)
    told = log.read_text()
    assert "cannot accept connections: Too many open files" in told
    # Not once for every client.
    assert told.count("Too many open files") < 10
    assert "Traceback" not in told


@pytest.mark.parametrize("loop", LOOPS)
def test_accepting_goes_on_when_a_descriptor_is_free_again(loop, tmp_path):
    with crowded(loop, tmp_path) as (port, log, process), ExitStack() as stack:
        # Requests under way cannot make room: only their clients can.
        busy = []
        for _ in range(FEW):
            busy.append(stack.enter_context(connect(port)))
            busy[-1].sendall(get("/endless"))
            wait_until(lambda: answered(busy[-1]) or "Too many open files" in log.read_text() or process.poll())
            if not answered(busy[-1]):
                break
        wait_for_log(process, log, "Too many open files")
        with connect(port) as waiting:
            waiting.sendall(LAST)
            for wire in busy:
                wire.close()
            assert b" 200 " in rest_of(waiting)
    assert len(busy) > 10
    assert "Traceback" not in log.read_text()


def answered(wire: socket.socket) -> bool:
    return bool(select.select([wire], [], [], 0)[0])


def test_the_limit_of_descriptors_is_raised_as_far_as_allowed_and_some_are_kept_back(monkeypatch):
    # Those of this process change whenever garbage is collected.
    monkeypatch.setattr("weft.server.http.connections.os.listdir", lambda folder: ["0", "1", "2"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        few = descriptors_for_connections()
        assert 1 <= few < 256
        raise_descriptor_limit()
        raised, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (raised, hard) == (min(before[1], 1 << 20), before[1])
        assert descriptors_for_connections() - few == raised - 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
