"""Client addresses: which proxies may name them, and the key that counts one client's connections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from weft.base.errors import OptionError

# The name of a Unix socket's peers, which have no address, in `--trusted-proxy`.
UNIX = "unix"
# Proxy chains are short; the client may have written anything further to the left.
MAX_HOPS = 16

# An address as proxies write it: bare, or with a port. An IPv6 address has brackets then. No zone: `fe80::1%eth0` means
# something on one machine only, and a zone may be any text, which must not reach a log line.
_WRITTEN = re.compile(r"([0-9.]+)(?::[0-9]{1,5})?|\[([0-9a-fA-F:.]+)\](?::[0-9]{1,5})?|([0-9a-fA-F:.]+)")

Headers = Iterable[tuple[bytes, bytes]]


class TrustedProxies:
    """Proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted.

    >>> proxies = TrustedProxies(["10.0.0.0/8"])
    >>> headers = [(b"x-forwarded-for", b"6.6.6.6, 9.9.9.9"), (b"x-forwarded-for", b"10.0.0.7")]
    >>> proxies.client("10.1.2.3", headers), proxies.client("8.8.8.8", headers)
    ('9.9.9.9', None)
    """

    def __init__(self, given: Iterable[str]) -> None:
        self._unix = False
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in given:
            if text == UNIX:
                self._unix = True
                continue
            try:
                self._networks.append(ip_network(text))
            except ValueError:
                raise OptionError(
                    f"trusted_proxy must be an address, a network such as 10.0.0.0/8 or {UNIX!r}, got {text!r}"
                ) from None

    def trusts(self, peer: str | None) -> bool:
        """Return whether the peer of a connection is a trusted proxy; None is the peer of a Unix socket."""
        if peer is None:
            return self._unix
        address = parse(peer.partition("%")[0]) if self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client(self, peer: str | None, headers: Headers) -> str | None:
        """Return the address that a trusted proxy vouches for: the rightmost hop that is not itself a trusted proxy.

        None means that the peer is not a trusted proxy, or that it named no client.
        """
        if not self.trusts(peer):
            return None
        forwarded = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        for hop in reversed(forwarded.decode("latin-1").rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            address = parse(hop)
            if address is None:
                return None
            if not any(address in network for network in self._networks):
                return str(address)
        return None

    def scheme(self, peer: str | None, headers: Headers) -> str | None:
        """Return the scheme between the client and a trusted proxy, if the proxy reports it."""
        if self.trusts(peer):
            for name, value in headers:
                if name == b"x-forwarded-proto" and value in (b"http", b"https"):
                    return value.decode()
        return None


def parse(text: str) -> IPv4Address | IPv6Address | None:
    """Return a plain address; an IPv4 address mapped to IPv6 becomes IPv4.

    >>> parse("::ffff:10.0.0.1"), parse("[::1]:80"), parse("unknown"), parse("fe80::1%eth0")
    (IPv4Address('10.0.0.1'), IPv6Address('::1'), None, None)
    """
    written = _WRITTEN.fullmatch(text.strip(" \t"))
    if written is None:
        return None
    try:
        address = ip_address(next(filter(None, written.groups())))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def share_of(address: str | None) -> str | None:
    """Return the key for the limit per address; None for loopback and Unix sockets, which have no limit.

    An IPv6 host can choose any address of a 64-bit network, so the network counts.

    >>> share_of("9.9.9.9"), share_of("2001:db8::1:2"), share_of("127.0.0.2"), share_of("::1"), share_of(None)
    ('9.9.9.9', '2001:db8::/64', None, None, None)
    """
    found = None if address is None else parse(address.partition("%")[0])
    if found is None or found.is_loopback:
        return None
    if isinstance(found, IPv6Address):
        return str(IPv6Network((int(found) >> 64 << 64, 64)))
    return str(found)
