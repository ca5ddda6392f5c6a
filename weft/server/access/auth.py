"""Authentication: keys compared in constant time, and the tenant that each key stands for."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

from weft.base.errors import WeftError
from weft.server.access.keys import Key
from weft.server.access.rates import Account, Clock
from weft.server.access.usage import UsageBook
from weft.server.settings import ServerSettings

log = logging.getLogger("weft.server")


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` separates its prefixes from all others; an admin may see and do what affects all clients.

    The salt is derived from the key alone and identifies the tenant: another name or other limits do not change it.
    """

    salt: bytes = b""
    admin: bool = field(default=True, compare=False)
    name: str | None = field(default=None, compare=False)
    account: Account = field(default_factory=Account, compare=False, repr=False)

    def salted(self, cache_salt: str | None) -> bytes:
        """Return the salt of a request's prefixes. Tenant salts have 32 bytes, so client text cannot imitate one."""
        return self.salt + (cache_salt or "").encode()


class Keys:
    """The server's keys, which may be replaced while it runs. Without keys, every client is the same tenant."""

    def __init__(self, settings: ServerSettings, clock: Clock = time.monotonic, usage: UsageBook | None = None) -> None:
        self._clock = clock
        self.usage = usage or UsageBook(None, time.time)
        self._known: list[tuple[bytes, Tenant]] = []
        self._open = Tenant(account=Account(settings.key_rates, clock, partial(self.usage.note, None)))
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Replace all keys at once. Running requests continue; accounts of kept keys stay."""
        before = {tenant.salt: tenant.account for tenant in self.tenants}
        self._known = [(_digest(key.secret), self._tenant(key, before)) for key in settings.keys]

    def _tenant(self, key: Key, before: dict[bytes, Account]) -> Tenant:
        salt = _salt(key.secret)
        account, note = before.get(salt), partial(self.usage.note, key.name)
        if account is None:
            account = Account(key.rates, self._clock, note)
        else:
            account.change(key.rates, note)
        return Tenant(salt, key.admin, key.name, account)

    @property
    def all_tenants(self) -> list[Tenant]:
        """Return the tenants of all keys, or the only one of a server without keys."""
        return self.tenants or [self._open]

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._known]

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Return the tenant of a request, or None for an unknown key. Always compares all keys."""
        if not self._known:
            return self._open
        presented = _digest_bytes(_presented(headers))
        found = None
        for digest, tenant in self._known:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def reread(keys: Keys, read: Callable[[], ServerSettings]) -> None:
    """Replace the keys by newly read ones; keep the old ones if reading fails."""
    before = {tenant.name for tenant in keys.tenants}
    try:
        keys.replace(read())
    except WeftError as error:
        log.error("keys not reloaded, keeping the old ones: %s", error)
        return
    after = {tenant.name for tenant in keys.tenants}
    added, removed = (", ".join(sorted(map(str, names))) or "none" for names in (after - before, before - after))
    log.info("reloaded the keys: %d in all, added: %s, removed: %s", len(after), added, removed)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of `Authorization: Bearer KEY`, or of `X-Api-Key: KEY`, which Anthropic's clients send."""
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
    # Digests have equal length, so that comparing them does not reveal a key's length.
    return sha256(key).digest()


def _salt(key: str) -> bytes:
    return sha256(b"weft tenant " + key.encode()).digest()
