"""Who is asking: keys compared in constant time, and the tenant that each key stands for."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from weft.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` parts its prefixes from those of all others; an admin may see and do what concerns all."""

    salt: bytes = b""
    admin: bool = True

    def salted(self, cache_salt: str | None) -> bytes:
        """The salt of a request's prefixes. Tenants' salts have 32 bytes, so no text of one can meet another's."""
        return self.salt + (cache_salt or "").encode()


class Keys:
    """The keys of a server. Without any, everybody is the same tenant."""

    def __init__(self, settings: ServerSettings) -> None:
        admin = settings.admin_key
        single = admin is None and len(settings.api_keys) == 1
        self._known = [(_digest(key), Tenant(_salt(key), single or key == admin)) for key in settings.api_keys]
        if admin is not None and admin not in settings.api_keys:
            self._known.append((_digest(admin), Tenant(_salt(admin), True)))

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Whose request this is; None: nobody's we know. All keys are compared, whichever it is."""
        if not self._known:
            return Tenant()
        presented = _digest_bytes(_presented(headers))
        found = None
        for digest, tenant in self._known:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of `Authorization: Bearer KEY`, or of `X-Api-Key: KEY`, as Anthropic's clients send it."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            return value.strip()
    return b""


def _digest(key: str) -> bytes:
    return _digest_bytes(key.encode())


def _digest_bytes(key: bytes) -> bytes:
    # Digests have one length, so that comparing them does not tell a key's.
    return sha256(key).digest()


def _salt(key: str) -> bytes:
    return sha256(b"weft tenant " + key.encode()).digest()
