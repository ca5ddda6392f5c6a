"""The messages of a transfer: typed, tagged, every field bounded. Decoding runs no code.

A frame is a length of four bytes and one MessagePack message, as everywhere in the fleet. A unit, or a piece of one, is
a message with its header, followed by its bytes; the receiver has checked the header, and so the size, before it reads
them. If units are pulled, the message has the address of the bytes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.base.errors import WeftError
from weft.base.transfers import Offer
from weft.memory.kinds import Kind

VERSION = 3
HEADER_BYTES = 4
KEY_BYTES = 32
GROUP_BYTES = 16
# A prefix of four million tokens.
MAX_CELLS = 1 << 16
# What a carrier says about itself: NIXL's description of an agent with one area has about 500 bytes.
MAX_METADATA_BYTES = 1 << 16
MAX_OFFER_BYTES = KEY_BYTES * MAX_CELLS + MAX_METADATA_BYTES + (1 << 16)
MAX_MESSAGE_BYTES = 1 << 12
MAX_REASON = 1000

Cells = Annotated[int, Meta(ge=0, le=MAX_CELLS)]
# Where a piece begins in its unit.
Start = Annotated[int, Meta(ge=0, le=1 << 40)]


class TransferError(WeftError):
    """A transfer cannot go on: the peer, the connection or a unit is at fault."""


class PeerGone(TransferError):
    """The peer has closed the connection, or cannot be reached any more."""


class TransferMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: the fields in order, after the tag."""


class Introduction(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a receiver can read staged units: the sender's agent, and its description for the receiver's carrier.

    A name stands for one registration of memory; it is never used again.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]


class OfferMessage(TransferMessage, tag="offer"):
    """The first message of a sender: what its units are made of, and the keys of the prefix, one after the other."""

    version: int
    fingerprint: Annotated[bytes, Meta(max_length=32)]
    form: Annotated[str, Meta(max_length=4000)]
    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    unit_bytes: Annotated[dict[str, Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=8)]
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_CELLS)]
    tenant: Annotated[bytes, Meta(max_length=16)]
    group: Annotated[bytes, Meta(max_length=GROUP_BYTES)]
    introduction: Introduction | None = None


class UnitMessage(TransferMessage, tag="unit"):
    header: Annotated[bytes, Meta(min_length=256, max_length=256)]
    start: Start


class ReadyMessage(TransferMessage, tag="ready"):
    """A piece may be read at this address, until it was taken or the connection has ended."""

    header: Annotated[bytes, Meta(min_length=256, max_length=256)]
    start: Start
    address: Annotated[int, Meta(ge=0, le=1 << 62)]


class FinishMessage(TransferMessage, tag="finish"):
    """Everything that was granted has been sent."""


class PulseMessage(TransferMessage, tag="pulse"):
    """The sender is alive, and computes."""


class WayMessage(TransferMessage, tag="way"):
    """The answer to an offer that comes before the first grant: units are pulled, or a reason why they are not."""

    pulls: bool
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


class GrantMessage(TransferMessage, tag="grant"):
    first: Cells
    end: Cells
    point: bool


class TakenMessage(TransferMessage, tag="taken"):
    """A piece was read: its memory at the sender may be used again."""

    place: Annotated[int, Meta(ge=0, le=2 * MAX_CELLS)]
    start: Start


class ConfirmMessage(TransferMessage, tag="confirm"):
    """All of the prefix is published."""


class RefuseMessage(TransferMessage, tag="refuse"):
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


FromSender = OfferMessage | UnitMessage | ReadyMessage | FinishMessage | PulseMessage
FromReceiver = WayMessage | GrantMessage | TakenMessage | ConfirmMessage | RefuseMessage
_from_sender = msgspec.msgpack.Decoder(FromSender)
_from_receiver = msgspec.msgpack.Decoder(FromReceiver)


def framed(message: TransferMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def read_from_sender(body: bytes) -> FromSender:
    try:
        message: FromSender = _from_sender.decode(body)
        return message
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TransferError(f"not a message of a sender: {error}") from None


def read_from_receiver(body: bytes) -> FromReceiver:
    try:
        message: FromReceiver = _from_receiver.decode(body)
        return message
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TransferError(f"not a message of a receiver: {error}") from None


@dataclass(frozen=True, slots=True)
class Contract:
    """What two engines, or two ranks of them, must have in common, so that a unit means the same to both.

    `form` names what the code computes, and for exact answers all that their bits depend on.
    """

    fingerprint: bytes
    unit_bytes: Mapping[Kind, int]
    form: str = ""
    rank: int = 0
    ranks: int = 1

    def offer(self, offer: Offer, introduction: Introduction | None = None) -> OfferMessage:
        sizes = {kind.value: size for kind, size in self.unit_bytes.items()}
        own = (VERSION, self.fingerprint, self.form, self.rank, self.ranks, sizes)
        return OfferMessage(*own, b"".join(offer.keys), offer.tenant, offer.group, introduction)

    def accept(self, message: OfferMessage) -> Offer:
        """Return the offer of a message. Raises, with the name of what differs, if its units mean something else."""
        sizes = {kind.value: size for kind, size in self.unit_bytes.items()}
        compared = {
            "version of the transfer protocol": (message.version, VERSION),
            "number of tensor-parallel ranks": (message.ranks, self.ranks),
            "rank": (message.rank, self.rank),
            "size of units": (message.unit_bytes, sizes),
            "computation": (message.form, self.form),
            "model (configuration, weights, dtypes or layout)": (message.fingerprint, self.fingerprint),
        }
        for name, (theirs, ours) in compared.items():
            if theirs != ours:
                shown = "" if isinstance(ours, bytes) else f": {theirs!r} instead of {ours!r}"
                raise TransferError(f"the prefill engine has another {name}{shown}"[:MAX_REASON])
        if not message.keys or len(message.keys) % KEY_BYTES:
            raise TransferError(f"keys must have {KEY_BYTES} bytes each")
        if len(message.group) != (GROUP_BYTES if self.ranks > 1 else 0):
            raise TransferError(f"the offers of {self.ranks} ranks have no group of {GROUP_BYTES} bytes in common")
        starts = range(0, len(message.keys), KEY_BYTES)
        keys = tuple(message.keys[start : start + KEY_BYTES] for start in starts)
        return Offer(keys, message.tenant, message.group)
