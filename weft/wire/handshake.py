"""How a router and a replica prove to each other that they know the same secret, before anything else is read.

The replica sends a nonce; the router answers with its own nonce and a MAC over both; the replica checks it and answers
with a MAC of its own. A MAC also covers the role of its sender and the channel, so that none can be sent back or used
on another channel. On TLS the channel is the replica's certificate: the secret vouches for it, and a party in the
middle, which has another certificate, is noticed. The secret itself is never sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from weft.base.errors import OptionError, WeftError
from weft.base.guarded_files import others_can_read, read_guarded
from weft.wire.frames import HEADER_BYTES

VERSION = 3
NONCE_BYTES = MAC_BYTES = 32
# A handshake message, with room to spare; a larger one is refused before it has arrived.
MAX_BYTES = 256
LEAST_SECRET = 32
PLAIN = b"plain"

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
T = TypeVar("T")


class HandshakeError(WeftError):
    """The peer does not know the secret, or does not speak the protocol."""


class Hello(msgspec.Struct, array_like=True, tag="hello", forbid_unknown_fields=True):
    """The replica's first message."""

    version: int
    nonce: Nonce


class Proof(msgspec.Struct, array_like=True, tag="proof", forbid_unknown_fields=True):
    """The router's answer."""

    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """The replica's answer; frames of the engine protocol follow."""

    mac: Mac


class ReplicaSide:
    """A replica's half. `channel` names the connection's certificate."""

    def __init__(self, secret: bytes, channel: bytes = PLAIN) -> None:
        self._secret, self._channel = secret, channel
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        return _framed(Hello(VERSION, self._nonce))

    def welcome(self, body: bytes) -> bytes:
        """Check a router's proof, and return the last message. Raises `HandshakeError`."""
        proof = _read(body, Proof)
        _compare(proof.mac, _mac(self._secret, b"router", self._channel, self._nonce, proof.nonce))
        return _framed(Welcome(_mac(self._secret, b"replica", self._channel, self._nonce, proof.nonce)))


class RouterSide:
    """A router's half."""

    def __init__(self, secret: bytes, channel: bytes = PLAIN) -> None:
        self._secret, self._channel = secret, channel
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""

    def proof(self, body: bytes) -> bytes:
        """Return the answer to a replica's first message. Raises `HandshakeError`."""
        hello = _read(body, Hello)
        if hello.version != VERSION:
            raise HandshakeError(f"the replica speaks version {hello.version} of the fleet protocol, not {VERSION}")
        self._theirs = hello.nonce
        return _framed(Proof(self._nonce, _mac(self._secret, b"router", self._channel, self._theirs, self._nonce)))

    def check(self, body: bytes) -> None:
        """Check that the replica knows the secret. Raises `HandshakeError`."""
        welcome = _read(body, Welcome)
        _compare(welcome.mac, _mac(self._secret, b"replica", self._channel, self._theirs, self._nonce))


def _mac(secret: bytes, role: bytes, channel: bytes, replica_nonce: bytes, router_nonce: bytes) -> bytes:
    # Every part has a fixed length, so no two lists of parts read the same.
    parts = (b"weft fleet %d" % VERSION, role, channel)
    return hmac.digest(
        secret, b"".join(sha256(part).digest() for part in parts) + replica_nonce + router_nonce, "sha256"
    )


def _compare(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise HandshakeError("the peer does not know the secret of this fleet, or is not at the end of this channel")


def _framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a handshake: {error}") from None


def read_secret(option: str, path: str) -> bytes:
    """Return the secret of a file that no other user can read or change."""
    text = read_guarded(option, path).strip()
    if others_can_read(os.stat(Path(path).expanduser())):
        raise OptionError(f"{option} {path} is refused: other users can read it; run chmod 600")
    if len(text) < LEAST_SECRET or not text.isprintable():
        raise OptionError(
            f"{option} {path} must hold one line of at least {LEAST_SECRET} characters, got {len(text)}; "
            "make one with: openssl rand -hex 32"
        )
    return text.encode()
