"""Messages between the first rank and the others. A plan travels as its numbers; the other end rebuilds it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan
from weft.base.options import Options
from weft.base.plan import Captures, Plan, Sampling, StepDrafts
from weft.base.transfers import (
    Destination,
    Granted,
    Offer,
    Offered,
    ReceivingEnded,
    ReservedUnit,
    SendingEnded,
    StagedUnit,
    TransferEvent,
    TransferSettings,
    Transport,
    UnitReceived,
    UnitsSent,
)
from weft.runner.ranks.meeting import Meeting
from weft.wire.channel import Channel, ChannelClosed
from weft.wire.messages import Message
from weft.wire.versions import RANKS

# A plan has the page tables of all rows and, with grammars, a mask over the vocabulary for each.
MAX_FRAME_BYTES = 1 << 28
KINDS = ("<i4", "<i8", "<f4")
NESTED: dict[str, type[Any]] = {"captures": Captures, "sampling": Sampling, "drafts": StepDrafts}

T = TypeVar("T")


# To a rank -----------------------------------------------------------------------------------------------------------


class LoadPart(Message, tag="load"):
    """The first message to a rank: what to load, and where to meet the others.

    `identify`: compute the identity of the part even without a file.
    """

    options: Options
    rank: int
    ranks: int
    meeting: Meeting
    log_level: int
    identify: bool


class Join(Message, tag="join"):
    """Create the memory and join the group. `draft_room` is that of the memory's specification."""

    config: EngineConfig
    draft_room: int
    threads: int


class BeginPart(Message, tag="begin"):
    """All ranks have joined, and have opened their files."""


class Launch(Message, tag="launch"):
    """Execute a plan, encoded by `encode_plan`."""

    plan: list[Any]


class SupplyMasks(Message, tag="masks"):
    """Sample the last plan, whose waiting samples have these masks, encoded by `encode_array`."""

    masks: dict[str, Any]


class CopyUnits(Message, tag="copy"):
    """Copy this rank's part of units between tiers; `ticket` is the number to report it with."""

    ticket: int
    plan: CopyPlan


class JoinTransfers(Message, tag="transfers"):
    """Send or receive this rank's part of prefixes."""

    settings: TransferSettings


class TransferCall(Message):
    """Base of the calls to a rank's transport."""

    def apply(self, transport: Transport) -> None:
        raise NotImplementedError


class OpenTransfer(TransferCall, tag="open"):
    transfer: int
    destination: Destination
    offer: Offer

    def apply(self, transport: Transport) -> None:
        transport.open(self.transfer, self.destination, self.offer)


class SendUnits(TransferCall, tag="send"):
    transfer: int
    units: Sequence[StagedUnit]

    def apply(self, transport: Transport) -> None:
        transport.send(self.transfer, self.units)


class FinishTransfer(TransferCall, tag="finish"):
    transfer: int

    def apply(self, transport: Transport) -> None:
        transport.finish(self.transfer)


class AbandonTransfer(TransferCall, tag="abandon"):
    transfer: int

    def apply(self, transport: Transport) -> None:
        transport.abandon(self.transfer)


class GrantUnits(TransferCall, tag="grant"):
    transfer: int
    first: int
    end: int
    point: bool
    units: Sequence[ReservedUnit]

    def apply(self, transport: Transport) -> None:
        transport.grant(self.transfer, self.first, self.end, self.point, self.units)


class EndTransfer(TransferCall, tag="end"):
    """Confirm a transfer, or refuse it for a reason."""

    transfer: int
    reason: str | None

    def apply(self, transport: Transport) -> None:
        if self.reason is None:
            transport.confirm(self.transfer)
        else:
            transport.refuse(self.transfer, self.reason)


class CloseTransfers(TransferCall, tag="close"):
    def apply(self, transport: Transport) -> None:
        transport.close()


AnyCall = OpenTransfer | SendUnits | FinishTransfer | AbandonTransfer | GrantUnits | EndTransfer | CloseTransfers
ToRank = LoadPart | Join | BeginPart | Launch | SupplyMasks | CopyUnits | JoinTransfers | AnyCall


# From a rank ---------------------------------------------------------------------------------------------------------


class PartLoaded(Message, tag="loaded"):
    """A rank has loaded its part."""


class PartUnloadable(Message, tag="unloadable"):
    """A rank cannot load its part, or give it memory. `option`: because of an option, not of the model."""

    message: str
    option: bool


class PartJoined(Message, tag="joined"):
    """A rank has joined the group, has begun, or has joined its transfers; `port` is where it receives prefixes."""

    port: int | None = None


class CopyEnded(Message, tag="copied"):
    """The copies of a ticket have taken this long, or failed."""

    ticket: int
    seconds: float
    error: str | None = None


class Happened(Message, tag="happened"):
    """One event of a rank's transport. MessagePack's decoder needs a field for each kind."""

    granted: Granted | None = None
    sent: UnitsSent | None = None
    sending_ended: SendingEnded | None = None
    offered: Offered | None = None
    received: UnitReceived | None = None
    receiving_ended: ReceivingEnded | None = None

    @classmethod
    def of(cls, event: TransferEvent) -> Happened:
        values: dict[str, Any] = {EVENT_FIELDS[type(event)]: event}
        return cls(**values)

    @property
    def event(self) -> TransferEvent:
        found = [value for name in EVENT_FIELDS.values() if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise ChannelClosed(f"a report must have one event, got {len(found)}")
        event: TransferEvent = found[0]
        return event


EVENT_FIELDS: dict[type[Any], str] = {
    Granted: "granted",
    UnitsSent: "sent",
    SendingEnded: "sending_ended",
    Offered: "offered",
    UnitReceived: "received",
    ReceivingEnded: "receiving_ended",
}
Answer = PartLoaded | PartUnloadable | PartJoined
FromRank = Answer | CopyEnded | Happened


def rank_channel(connection: socket.socket) -> Channel:
    return Channel(connection, RANKS, MAX_FRAME_BYTES)


def encode_plan(value: Any) -> list[Any]:
    """Return a plan, or a part of one, as the values of its fields; arrays as kind, shape and bytes."""
    return [_encoded(getattr(value, each.name)) for each in fields(value)]


def encode_array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"kind": value.dtype.str, "shape": value.shape, "data": np.ascontiguousarray(value).tobytes()}


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return encode_array(value)
    if isinstance(value, Captures | Sampling | StepDrafts):
        return encode_plan(value)
    return value.item() if isinstance(value, np.generic) else value


def decode_plan(values: list[Any]) -> Plan:
    return _decoded(Plan, values)


def _decoded(kind: type[T], values: list[Any]) -> T:
    found: dict[str, Any] = {}
    for each, value in zip(fields(kind), values, strict=True):  # type: ignore[arg-type]
        if each.name in NESTED:
            found[each.name] = _decoded(NESTED[each.name], value)
        elif isinstance(value, dict):
            found[each.name] = decode_array(value)
        else:
            found[each.name] = tuple(map(tuple, value)) if isinstance(value, list) else value
    return kind(**found)


def decode_array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    if value["kind"] not in KINDS:
        raise ChannelClosed(f"an array must be one of {', '.join(KINDS)}, got {value['kind']!r}")
    return np.frombuffer(value["data"], value["kind"]).reshape(value["shape"])
