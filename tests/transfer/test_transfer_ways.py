"""Which way units travel: read by NIXL, or over TCP with a reason in the log. Real connections, fake carriers."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.tiers.pulled import begin, pair
from tests.support.transfer.tcp import OFFER, SECRET, End
from weft.base.errors import InvalidOption
from weft.base.transfers import ReceivingEnded, SendingEnded, TransferSettings, UnitReceived
from weft.memory.kinds import Kind
from weft.start.disaggregated import carriage_of

__all__ = ["pair"]


def carried(sender: End, receiver: End) -> None:
    """Send a page, and see it arrive."""
    for end in (sender, receiver):
        end.events.clear()
    receiver.memory[Kind.PAGE][:] = 0
    number = begin(sender, receiver, pages=1)
    receiver.await_event(UnitReceived)
    assert (receiver.memory[Kind.PAGE][4] == 10).all()
    receiver.transport.confirm(number)
    assert sender.await_event(SendingEnded) == SendingEnded(1, None)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [line.split("over TCP: ")[1] for line in found if "travel over TCP" in line]


@pytest.mark.parametrize(
    ("missing", "sender_says", "receiver_says"),
    [
        ("sender", "no nixl here", "the prefill engine does not offer NIXL"),
        ("receiver", "the decode engine does not pull: no nixl here", "no nixl here"),
    ],
)
def test_auto_uses_tcp_if_one_side_has_no_nixl_and_logs_why_once(pair, caplog, missing, sender_says, receiver_says):
    caplog.set_level(logging.INFO, "weft")
    sender, receiver = pair(held=False, way="auto")
    without = (sender if missing == "sender" else receiver).transport.carriage
    without.carrier, without.missing = None, "no nixl here"
    carried(sender, receiver)
    carried(sender, receiver)
    assert receiver.carrier.log == []
    assert sorted(reasons(caplog)) == sorted([sender_says, receiver_says])


def test_auto_pulls_if_both_sides_can(pair):
    sender, receiver = pair(held=False, way="auto")
    carried(sender, receiver)
    assert receiver.carrier.log == ["read"]


@pytest.mark.parametrize("strict", ["sender", "receiver"])
def test_nixl_alone_is_refused_by_name_if_one_side_has_none(pair, strict):
    sender, receiver = pair()
    other = (receiver if strict == "sender" else sender).transport.carriage
    other.asked, other.carrier = "auto", None
    sender.transport.open(1, receiver.place, OFFER)
    assert "--transfer is nixl" in sender.await_event(SendingEnded).error


def test_auto_uses_tcp_for_a_peer_whose_reads_have_failed(pair, caplog):
    caplog.set_level(logging.INFO, "weft")
    sender, receiver = pair(way="auto")
    begin(sender, receiver, pages=1)
    wait_until(lambda: receiver.carrier.reading == 1)
    receiver.carrier.finish("the network is unreachable")
    assert sender.await_event(SendingEnded).error is not None
    receiver.await_event(ReceivingEnded)
    carried(sender, receiver)
    assert "an earlier read has failed: the network is unreachable" in reasons(caplog)


def test_an_engine_without_the_package_starts_only_if_nixl_is_not_a_must(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "weft")
    monkeypatch.setitem(sys.modules, "nixl", None)
    area = memoryview(bytearray(4096))
    with pytest.raises(InvalidOption, match=r"is nixl, but the package nixl cannot be imported.*weft-serve\[nixl\]"):
        carriage_of(TransferSettings("decode", SECRET, way="nixl"), area)
    assert carriage_of(TransferSettings("decode", SECRET, way="auto"), area).carrier is None
    assert len(reasons(caplog)) == 1
    assert carriage_of(TransferSettings("decode", SECRET), area).asked == "tcp"


def test_auto_does_not_pull_beside_an_encrypted_connection(pair):
    sender, _ = pair(way="auto")
    sender.transport.carriage.introduce(encrypted=False)
    with pytest.raises(Exception, match="encrypted"):
        sender.transport.carriage.introduce(encrypted=True)
    replace(sender.transport.carriage, asked="nixl").introduce(encrypted=True)
