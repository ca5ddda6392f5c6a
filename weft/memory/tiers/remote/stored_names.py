"""Finds the objects at and below a prefix in a remote store, also those that other engines have put.

Names say which cell an object belongs to; the header of a page names the cell above. So all names of the model are
listed, and the headers of the pages are read: 256 bytes each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from weft.memory.kinds import Kind
from weft.memory.tiers.disk.format import ENTRY, decode
from weft.memory.tiers.remote.store import GuardedStore, ObjectMissing, StoreFailed
from weft.memory.tiers.remote.tier import ObjectNames

# Objects of a model that are listed for one prefix. They take about 100 MB and, at 10 ms a header, three minutes.
MOST_LISTED = 1 << 18
READERS = 16


class StoredObject(NamedTuple):
    """An object of a store, as its name describes it. `key` is that of its cell, in hexadecimal."""

    name: str
    tenant: str
    kind: str
    key: str


def list_objects(store: GuardedStore, names: ObjectNames) -> list[StoredObject]:
    """Return the objects of a model; raises `StoreFailed` if there are more than `MOST_LISTED`."""
    found: list[StoredObject] = []
    for part in store.names(names.of_tenant(None)):
        for name in part:
            fields = name.removeprefix(names.of_tenant(None)).split("/")
            # Other names are none of Weft's.
            if len(fields) == 3:
                found.append(StoredObject(name, fields[0], fields[1], fields[2].split("-")[0]))
        if len(found) > MOST_LISTED:
            raise StoreFailed(f"a prefix is not searched for among more than {MOST_LISTED} objects; drop its tenant")
    return found


def names_below(store: GuardedStore, names: ObjectNames, prefix: bytes, closing: Callable[[], bool]) -> list[str]:
    """Return the names of the objects at and below the cells whose keys begin with `prefix`.

    Objects that have lost the page of their own cell, or of one above, are included: what they continue is not known,
    and a request could use them only after it has computed that page again. So are pages with damaged headers.
    """
    found, start = list_objects(store, names), prefix.hex()
    # A path belongs to one tenant. If the cell itself has expired, any tenant may have objects below it.
    tenants = {each.tenant for each in found if each.key.startswith(start)}
    found = [each for each in found if not tenants or each.tenant in tenants]
    pages = [each for each in found if each.kind == Kind.PAGE.value]

    def parent_of(page: StoredObject) -> str | None:
        if closing():
            raise StoreFailed("the engine is closing")
        try:
            header = decode(store.beginning(page.name, ENTRY))
        except ObjectMissing:
            header = None
        if header is None or header.key.hex() != page.key:
            return ""
        return None if header.parent is None else header.parent.hex()

    with ThreadPoolExecutor(READERS, "weft-remote-header") as readers:
        parents = dict(zip((page.key for page in pages), readers.map(parent_of, pages), strict=True))
    below = keys_below(parents, start)
    return [each.name for each in found if each.key in below or each.key not in parents]


def keys_below(parents: dict[str, str | None], start: str) -> set[str]:
    """Return the keys that begin with `start` or lack a parent, and all below them. `parents` has None for a root.

    >>> sorted(keys_below({"a": None, "b": "a", "c": "b", "d": "a", "f": "e"}, "b"))
    ['b', 'c', 'f']
    """
    children: defaultdict[str, list[str]] = defaultdict(list)
    for key, parent in parents.items():
        if parent is not None:
            children[parent].append(key)
    rest = [key for key in parents if key.startswith(start)]
    rest += [key for parent, keys in children.items() if parent not in parents for key in keys]
    below: set[str] = set()
    while rest:
        key = rest.pop()
        if key not in below:
            below.add(key)
            rest += children[key]
    return below
