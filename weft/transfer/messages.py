"""The messages of a transfer.

A unit, or a piece of one, is a message with its header, followed by its bytes; the receiver has checked the header, and
so the size, before it reads them. If units are pulled, the message has the address of the bytes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from weft.base.errors import WeftError
from weft.base.transfers import Offer
from weft.memory.keys import KEY_BYTES
from weft.memory.kinds import Kind
from weft.wire.messages import Message, Writer, reader

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


class Introduction(Message):
    """Where a receiver can read staged units: the sender's agent, and its description for the receiver's carrier.

    A name stands for one registration of memory; it is never used again.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]


class OfferMessage(Message, tag="offer"):
    """The first message of a sender: what its units are made of, and the keys of the prefix, one after the other."""

    fingerprint: Annotated[bytes, Meta(max_length=32)]
    form: Annotated[str, Meta(max_length=4000)]
    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    unit_bytes: Annotated[dict[str, Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=8)]
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_CELLS)]
    tenant: Annotated[bytes, Meta(max_length=16)]
    group: Annotated[bytes, Meta(max_length=GROUP_BYTES)]
    introduction: Introduction | None = None


class UnitMessage(Message, tag="unit"):
    header: Annotated[bytes, Meta(min_length=256, max_length=256)]
    start: Start


class ReadyMessage(Message, tag="ready"):
    """A piece may be read at this address, until it was taken or the connection has ended."""

    header: Annotated[bytes, Meta(min_length=256, max_length=256)]
    start: Start
    address: Annotated[int, Meta(ge=0, le=1 << 62)]


class FinishMessage(Message, tag="finish"):
    """Everything that was granted has been sent."""


class PulseMessage(Message, tag="pulse"):
    """The sender is alive, and computes."""


class WayMessage(Message, tag="way"):
    """The answer to an offer that comes before the first grant: units are pulled, or a reason why they are not."""

    pulls: bool
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


class GrantMessage(Message, tag="grant"):
    first: Cells
    end: Cells
    point: bool


class TakenMessage(Message, tag="taken"):
    """A piece was read: its memory at the sender may be used again."""

    place: Annotated[int, Meta(ge=0, le=2 * MAX_CELLS)]
    start: Start


class ConfirmMessage(Message, tag="confirm"):
    """All of the prefix is published."""


class RefuseMessage(Message, tag="refuse"):
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


FromSender = OfferMessage | UnitMessage | ReadyMessage | FinishMessage | PulseMessage
FromReceiver = WayMessage | GrantMessage | TakenMessage | ConfirmMessage | RefuseMessage
framed = Writer().frame
read_from_sender = reader(FromSender, "message of a sender")
read_from_receiver = reader(FromReceiver, "message of a receiver")


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
        own = (self.fingerprint, self.form, self.rank, self.ranks, sizes)
        return OfferMessage(*own, b"".join(offer.keys), offer.tenant, offer.group, introduction)

    def accept(self, message: OfferMessage) -> Offer:
        """Return the offer of a message. Raises, with the name of what differs, if its units mean something else."""
        sizes = {kind.value: size for kind, size in self.unit_bytes.items()}
        compared = {
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
