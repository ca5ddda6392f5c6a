"""What is noted of a tenant beside its prefixes: a digest, by which they can be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

from msgspec import Meta

TENANT_BYTES = 16
KEY_SALT_BYTES = 32


def tenant_digest(salt: bytes) -> bytes:
    """Return what is noted of a tenant: enough to drop its prefixes, not enough to learn its salt.

    A salt begins with the 32 bytes of an API key's; a request's own `cache_salt` follows, for the same tenant.
    """
    return sha256(b"weft tenant " + salt[:KEY_SALT_BYTES]).digest()[:TENANT_BYTES]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What an operator dropped: a tenant's prefixes, by its digest; those below a key; without either, all."""

    tenant: Annotated[bytes, Meta(max_length=TENANT_BYTES)] | None = None
    prefix: Annotated[bytes, Meta(max_length=32)] | None = None
