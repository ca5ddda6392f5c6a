"""Units that NIXL reads over UCX: between transports in one process, and out of a process that is stopped or killed.

Skipped without the package nixl (`pip install 'weft-serve[nixl]'`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.servers.held_steps import SECONDS, wait_until
from weft.transfer import nixl_carrier
from weft.transfer.messages import Introduction, TransferError
from weft.transfer.nixl_carrier import NixlCarrier
from weft.transfer.pulling import address_of

pytest.importorskip("nixl")

SIZE = 64 << 20


@pytest.fixture
def carriers():
    made: list[NixlCarrier] = []

    def make(area: np.ndarray) -> NixlCarrier:
        made.append(NixlCarrier(area.data, local=True))
        return made[-1]

    yield make
    for carrier in made:
        carrier.close()


class Outcome:
    """How a read ended."""

    def __init__(self) -> None:
        self.error: str | None = "it has not ended"
        self.ended = threading.Event()

    def __call__(self, error: str | None) -> None:
        self.error = error
        self.ended.set()

    def wait(self) -> str | None:
        assert self.ended.wait(SECONDS)
        return self.error


def read(carrier: NixlCarrier, peer: Introduction, address: int, target: memoryview) -> Outcome:
    outcome = Outcome()
    carrier.read(peer.name, address, target, outcome)
    return outcome


def test_memory_of_a_peer_is_read_into_its_place(carriers):
    source, target = np.arange(SIZE // 64, dtype=np.uint8), np.zeros(SIZE // 64, np.uint8)
    sender, receiver = carriers(source), carriers(target)
    peer = sender.introduce()
    receiver.meet(peer)
    sender.attend()
    first = read(receiver, peer, address_of(source.data[4096:]), target.data[64:4096])
    assert first.wait() is None
    assert (target[64:4096] == source[4096:8128]).all()
    assert not target[:64].any()
    assert not target[4096:].any()


def test_memory_that_was_not_registered_cannot_be_named(carriers):
    source, target, other = (np.ones(1 << 16, np.uint8) for _ in range(3))
    sender, receiver = carriers(source), carriers(target)
    receiver.meet(sender.introduce())
    assert "NOT_FOUND" in str(read(receiver, sender.introduce(), address_of(other.data), target.data).wait())


def test_metadata_of_another_peer_are_refused(carriers):
    source, target = np.ones(4096, np.uint8), np.ones(4096, np.uint8)
    sender, receiver = carriers(source), carriers(target)
    honest = sender.introduce()
    with pytest.raises(TransferError, match="does not accept the peer's metadata"):
        receiver.meet(Introduction("weft-0", b"\xff" * 100))
    with pytest.raises(TransferError, match="another name"):
        receiver.meet(Introduction("weft-1", honest.metadata))
    receiver.meet(honest)
    with pytest.raises(TransferError, match="stands for another one"):
        receiver.meet(Introduction(honest.name, honest.metadata + b" "))


def test_a_retired_introduction_cannot_be_read_and_a_new_one_can(carriers, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = np.full(1 << 16, 5, np.uint8), np.zeros(1 << 16, np.uint8)
    sender, receiver = carriers(source), carriers(target)
    old = sender.introduce()
    receiver.meet(old)
    sender.attend()
    assert read(receiver, old, address_of(source.data), target.data).wait() is None
    assert sender.retire(old.name)
    target[:] = 0
    assert read(receiver, old, address_of(source.data), target.data).wait() is not None
    assert not target.any()
    new = sender.introduce()
    assert new.name != old.name
    receiver.meet(new)
    assert read(receiver, new, address_of(source.data), target.data).wait() is None
    assert (target == 5).all()


PEER = """
import sys
import numpy as np
from weft.transfer.nixl_carrier import NixlCarrier
from weft.transfer.pulling import address_of
area = np.full(int(sys.argv[1]), 7, np.uint8)
carrier = NixlCarrier(area.data, local=True)
carrier.attend()
found = carrier.introduce()
print(found.name, found.metadata.hex(), address_of(area.data), flush=True)
sys.stdin.read()
"""


@contextmanager
def peer_process(tls: str) -> Iterator[tuple[subprocess.Popen[str], Introduction, int]]:
    """A process with memory that may be read, over some of UCX's transports."""
    environment = os.environ | {"UCX_TLS": tls}
    command = [sys.executable, "-c", PEER, str(SIZE)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=os.getcwd()
    )
    try:
        assert process.stdout is not None
        name, metadata, address = process.stdout.readline().split()
        yield process, Introduction(name, bytes.fromhex(metadata)), int(address)
    finally:
        process.kill()
        process.communicate()


def test_no_byte_is_written_after_a_read_of_a_stopped_process_was_given_up(carriers, monkeypatch):
    """NIXL itself would write them: neither removing the peer nor releasing the read stops it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_carrier, "PATIENCE_SECONDS", 0.5)
    target = np.zeros(SIZE, np.uint8)
    receiver = carriers(target)
    with peer_process("tcp") as (process, peer, address):
        receiver.meet(peer)
        assert read(receiver, peer, address, target.data[:4096]).wait() is None
        target[:] = 0
        process.send_signal(signal.SIGSTOP)
        given_up = read(receiver, peer, address, target.data)
        assert "has not ended" in str(given_up.wait())
        receiver.attend()
        process.send_signal(signal.SIGCONT)
        # It sends the bytes that it was asked for, or UCX ends it because its peer has gone.
        with peer_process("tcp") as (_, other, elsewhere):
            receiver.meet(other)
            assert read(receiver, other, elsewhere, target.data[:4096]).wait() is None
        assert (target[:4096] == 7).all()
        assert not target[4096:].any()


def listening() -> set[str]:
    """The addresses at which this process accepts connections."""
    ours = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)}
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}


def test_engines_on_one_machine_open_no_ports(carriers):
    before = listening()
    carrier = carriers(np.zeros(4096, np.uint8))
    assert listening() == before
    assert not carrier.retire(carrier.introduce().name), "shared memory can be read without this process"


def test_a_retired_agent_is_closed_whatever_it_was_reading(carriers, monkeypatch):
    """Its ports are closed with it: nothing, such as the handle of a read, keeps it open."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    before, target = listening(), np.zeros(SIZE, np.uint8)
    receiver = carriers(target)
    opened = listening() - before
    with peer_process("tcp") as (process, peer, address):
        receiver.meet(peer)
        assert read(receiver, peer, address, target.data[:4096]).wait() is None
        process.send_signal(signal.SIGSTOP)
        under_way = read(receiver, peer, address, target.data)
        assert receiver.retire(receiver.introduce().name)
        assert under_way.wait() is not None
        assert opened
        assert not opened & listening()


@pytest.mark.parametrize("tls", ["tcp", "sm,tcp"])
def test_reads_of_a_process_that_is_killed_end(carriers, monkeypatch, tls):
    monkeypatch.setenv("UCX_TLS", tls)
    target = np.zeros(SIZE, np.uint8)
    receiver = carriers(target)
    with peer_process(tls) as (process, peer, address):
        receiver.meet(peer)
        assert read(receiver, peer, address, target.data[:4096]).wait() is None
        process.send_signal(signal.SIGSTOP)
        under_way = read(receiver, peer, address, target.data)
        process.kill()
        # Over shared memory it may have ended before.
        error = under_way.wait()
        assert error is not None or (target == 7).all()
        wait_until(lambda: read(receiver, peer, address, target.data[:4096]).wait() is not None)


def test_a_closed_carrier_ends_its_reads(carriers, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    target = np.zeros(SIZE, np.uint8)
    receiver = carriers(target)
    with peer_process("tcp") as (process, peer, address):
        receiver.meet(peer)
        assert read(receiver, peer, address, target.data[:4096]).wait() is None
        process.send_signal(signal.SIGSTOP)
        under_way = read(receiver, peer, address, target.data)
        receiver.close()
        assert under_way.wait() == nixl_carrier.CLOSED
        assert read(receiver, peer, address, target.data).wait() == nixl_carrier.CLOSED
