"""Prefixes that travel from a prefill engine to a decode engine: the values that engines and transports exchange.

A prefix is offered by the keys of its cells. Its units are numbered by *place*: the page of cell `i` has place `i`; the
state of the resume point at the end comes after the pages, then its window pages. No sockets, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.base.copies import UnitPiece


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a decode engine receives prefixes. Further ranks of it have ports of their own, in order."""

    host: str
    port: int
    secure: bool = False
    further_ports: tuple[int, ...] = ()


ROLES = ("both", "prefill", "decode")
# How the bytes of prefixes travel: over the connection of their transfer, read by NIXL, or by NIXL if both engines can.
WAYS = ("tcp", "nixl", "auto")


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The role of an engine, and how it sends or receives prefixes.

    A decode engine receives them at `host` and `port` (0: any free port), in host memory of the size `arrivals`; its
    further ranks use the ports after that. With a certificate, connections are encrypted. `reached_at` is the host to
    send them to, if that is not where routers find the engine. `way` is one of `WAYS`.
    """

    role: str
    secret: bytes = field(repr=False)
    arrivals: str | int = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    certfile: str | None = None
    keyfile: str | None = None
    password_file: str | None = None
    reached_at: str | None = None
    way: str = "tcp"


@dataclass(frozen=True, slots=True)
class Offer:
    """A prefix to be sent: the salted keys of its cells, from the root down, and the digest of its tenant.

    With several ranks, each sends its own part; `group` is the same in the offers of all, and of no other prefix.
    """

    keys: tuple[bytes, ...]
    tenant: bytes
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class ReservedUnit:
    """A unit of arrivals, reserved for one place of a prefix, and what its header must say."""

    place: int
    kind: str
    unit: int
    key: bytes
    parent: bytes | None
    position: int


@dataclass(frozen=True, slots=True)
class StagedUnit:
    """A unit in the staging area of a prefill engine, or a piece of one, ready to be sent, and what it is.

    The pieces of a unit are sent in order and without gaps.
    """

    place: int
    kind: str
    unit: int
    key: bytes
    parent: bytes | None
    position: int
    tenant: bytes
    piece: UnitPiece | None = None  # None: all of it


# Events for the sender of a prefix -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver has memory for the pages of cells [first, end), and for the point if `point`."""

    transfer: int
    first: int
    end: int
    point: bool


@dataclass(frozen=True, slots=True)
class UnitsSent:
    """The staging memory of these units, or pieces of units, may be used again."""

    transfer: int
    units: tuple[StagedUnit, ...]


@dataclass(frozen=True, slots=True)
class SendingEnded:
    """A transfer has ended, with an error or because all of it was confirmed. It reads no staged unit any more."""

    transfer: int
    error: str | None


# Events for the receiver ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offered:
    transfer: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class UnitReceived:
    """All of the unit of a place has arrived in its reserved memory, with the right headers and checksums."""

    transfer: int
    place: int


@dataclass(frozen=True, slots=True)
class ReceivingEnded:
    """A transfer has ended, for whatever reason. It writes no reserved unit any more."""

    transfer: int


TransferEvent = Granted | UnitsSent | SendingEnded | Offered | UnitReceived | ReceivingEnded


class Transport(Protocol):
    """Carries prefixes between engines, in threads of its own. The engine's thread makes all calls; none of them waits.

    Every transfer that was opened, or offered, ends with one event. Until then its units belong to the transport. Calls
    for a transfer that has ended are ignored: its last event may not have been polled yet.
    """

    # Called, from any thread, when there is something to poll.
    wake: Callable[[], None]

    @property
    def send_seconds(self) -> float:
        """Time that units took to send, in all."""
        ...

    @property
    def send_bytes_per_second(self) -> float | None:
        """The measured rate of sending, or None if nothing was sent yet."""
        ...

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        """Begin to send a prefix, under a number that no open transfer has."""

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        """Send units that were granted."""

    def finish(self, transfer: int) -> None:
        """Say that everything was sent; the transfer ends when the receiver has confirmed it."""

    def abandon(self, transfer: int) -> None:
        """End a transfer that is being sent."""

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        """Let the sender send the pages of cells [first, end), and the point, into these units."""

    def confirm(self, transfer: int) -> None:
        """Tell the sender that all of the prefix has arrived and is published."""

    def refuse(self, transfer: int, reason: str) -> None:
        """End a transfer that was offered."""

    def poll(self) -> list[TransferEvent]:
        """Return what has happened since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait up to this long for an event."""

    def close(self) -> None:
        """End all transfers and threads."""
