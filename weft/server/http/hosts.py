"""The host that a client asks for, in a Host header or a target. Strict, so that no proxy reads it differently.

The grammar is RFC 9110's without what no host name has: escapes (`%41`), commas and other delimiters.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

_WRITTEN = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._~-]{0,253}))(?::([0-9]{0,5}))?")


def host_of(written: str) -> str | None:
    """Return a host in lower case, without its port; None for a text that is no host.

    >>> host_of("Localhost:8000"), host_of("[::1]:80"), host_of("a.b."), host_of("")
    ('localhost', '::1', 'a.b', '')
    >>> host_of("::1"), host_of("[::1"), host_of("[::1]x"), host_of("a:b"), host_of("a@b"), host_of("a:99999")
    (None, None, None, None, None, None)
    """
    found = _WRITTEN.fullmatch(written)
    if found is None or int(found[3] or 0) >= 1 << 16:
        return None
    if found[1] is None:
        return found[2].lower().removesuffix(".")
    try:
        return str(IPv6Address(found[1]))
    except ValueError:
        return None
