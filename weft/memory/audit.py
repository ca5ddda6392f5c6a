"""Recounts all owners of units, and checks that a plan may read and write what it names.

For tests and the paranoid mode; slow on purpose and independent of the ledger's own bookkeeping.
"""

from __future__ import annotations

from collections import Counter

from weft.base.grid import first_window_cell, floor_to_grid
from weft.base.plan import Plan
from weft.memory.kinds import Kind
from weft.memory.lease import Lease
from weft.memory.ledger import Ledger
from weft.memory.tiers.audit import audit_tiers
from weft.memory.tiers.link import TierLink
from weft.memory.trie import Node, path

Owners = dict[Kind, Counter[int]]


def audit(ledger: Ledger) -> None:
    """Check that every page, window page, slot and tail has exactly the owners that the trie and the leases imply."""
    counted: Owners = {kind: Counter() for kind in ledger.arena.unit_bytes}
    pins: Counter[bytes] = Counter()
    for node in ledger.cache.trie.nodes.values():
        _count_node(ledger, node, counted)
    for lease in ledger.leases.values():
        _count_lease(ledger, lease, counted)
        if lease.node:
            pins[lease.node.key] += 1
    if ledger.snapshots.reserve is not None:
        counted[Kind.STATE][ledger.snapshots.reserve] += 1
    if ledger.tiers is not None:
        audit_tiers(ledger.tiers, ledger.retentions)
        for link in _device_links(ledger):
            for kind, unit in (*link.saves.held(lower=False), *link.loads.held(lower=False)):
                counted[kind][unit] += 1
            pins.update(node.key for node in link.loads.upper_pins())
    for kind, unit in ledger.carried.held():
        counted[kind][unit] += 1
    pins.update(node.key for node in (*ledger.retentions.nodes(ledger.cache), *ledger.carried.pins()))
    if ledger.departures is not None:
        for kind, unit in ledger.departures.held():
            counted[kind][unit] += 1
        pins.update(node.key for node in ledger.departures.pins())
        ledger.departures.audit()
    for kind, owners in ledger.arena.owners.items():
        assert counted[kind] == owners, f"owners of {kind}: counted {dict(counted[kind])}, recorded {owners}"
    for node in ledger.cache.trie.nodes.values():
        assert node.pins == pins[node.key], f"a node of depth {node.depth} has {node.pins} pins, not {pins[node.key]}"
    _check_held(ledger)
    _check_retained(ledger)
    _check_slabs(ledger)


def _device_links(ledger: Ledger) -> list[TierLink]:
    """Return the links whose upper tier is the device."""
    links = () if ledger.tiers is None else ledger.tiers.links
    return [link for link in links if link.upper is ledger.cache]


def _check_held(ledger: Ledger) -> None:
    """Check that the cells that running sequences and retentions protect are those on their paths."""
    ends = [lease.node for lease in ledger.leases.values()]
    for link in _device_links(ledger):
        ends += link.loads.upper_pins()
    ends += [*ledger.retentions.nodes(ledger.cache), *ledger.carried.pins()]
    if ledger.departures is not None:
        ends += ledger.departures.pins()
    held = {node.key for end in ends for node in path(end)}
    found = {node.key for node in ledger.cache.trie.nodes.values() if node.holders}
    assert found == held, f"{len(found)} cells have holders, {len(held)} lie on the paths of leases"
    assert ledger.cache.trie.held == len(held), f"{ledger.cache.trie.held} cells count as held, expected {len(held)}"


def _check_retained(ledger: Ledger) -> None:
    """Check that exactly the retained resume points are marked, and that the counted bytes are those they hold."""
    cells: set[bytes] = set()
    points = 0
    for cache in ledger.caches:
        retained = list(ledger.retentions.nodes(cache))
        marked = {node.key for node in cache.trie.nodes.values() if node.resume is not None and node.resume.retained}
        assert marked == {node.key for node in retained if node.resume is not None}, (
            "other points than the retained are marked"
        )
        assert not cache.point_bytes or len(marked) == len(retained), "a retained resume point is gone"
        cells |= {each.key for node in retained for each in path(node)}
        points += len(marked)
    held = len(cells) * ledger.spec.page_bytes + points * ledger.cache.point_bytes
    assert ledger.retentions.held_bytes == held, (
        f"{ledger.retentions.held_bytes} bytes count as retained, expected {held}"
    )


def _count_node(ledger: Ledger, node: Node, counted: Owners) -> None:
    nodes = ledger.cache.trie.nodes
    assert node.parent is None or nodes.get(node.parent.key) is node.parent, "a node has lost its parent"
    assert node.depth == (node.parent.depth + 1 if node.parent else 1)
    if node.page is not None:
        counted[Kind.PAGE][node.page] += 1
    point = node.resume
    if point is None:
        return
    position = node.depth * ledger.spec.cell
    if point.slot is not None:
        counted[Kind.STATE][point.slot] += 1
        written = ledger.cache.written_for[point.slot]
        assert written == position, f"the checkpoint of position {position} was written for {written}"
    if ledger.spec.window:
        needed = node.depth - first_window_cell(position, ledger.spec.window, ledger.spec.cell)
        assert len(point.window) == needed, f"a resume point keeps {len(point.window)} window pages, needs {needed}"
    counted_window = counted.get(Kind.WINDOW)
    for page in point.window:
        assert counted_window is not None
        counted_window[page] += 1


def _count_lease(ledger: Ledger, lease: Lease, counted: Owners) -> None:
    seat, cell = lease.seat, ledger.spec.cell
    cached, computed, planned = lease.miss.cached, int(ledger.computed[seat]), int(ledger.planned[seat])
    assert cached <= computed <= planned <= lease.cells * cell, f"{cached} <= {computed} <= {planned} does not hold"
    published = max(cached, ledger.publishable(lease, computed)) // cell
    assert lease.published == (published if ledger.enabled else 0)
    if Kind.PAGE in counted:
        counted[Kind.PAGE].update(ledger.page_table[seat, lease.published : lease.cells].tolist())
    if Kind.WINDOW in counted:
        counted[Kind.WINDOW].update(ledger.window_table[seat, lease.window_first : lease.cells].tolist())
    if lease.tail is not None:
        counted[Kind.TAIL][lease.tail] += 1
    # A checkpoint that the sequence leaves is held until its flight has landed.
    held = {lease.slot, *(grant.read_slot for grant in lease.pending)}
    held.update(capture.slot for grant in lease.pending for capture in grant.captures)
    if Kind.STATE in counted:
        counted[Kind.STATE].update(slot for slot in held if slot is not None)
        position = floor_to_grid(planned, cell)
        assert (lease.slot is None) == (position == 0), "a sequence holds a checkpoint iff it has left its first cell"
        assert lease.slot is None or ledger.cache.written_for[lease.slot] == position


def _check_slabs(ledger: Ledger) -> None:
    """Check that units of different kinds never share a slab."""
    arena = ledger.arena
    kind_of: dict[int, Kind] = {}
    for kind, owners in arena.owners.items():
        size = arena.unit_bytes[kind]
        for unit in owners:
            first, last = unit * size // arena.slab_bytes, ((unit + 1) * size - 1) // arena.slab_bytes
            assert first == last < arena.slabs, f"{kind} {unit} crosses a slab"
            assert kind_of.setdefault(first, kind) is kind, f"slab {first} holds {kind_of[first]} and {kind}"
    assert len(kind_of) == arena.used_slabs


def check_plan(plan: Plan, ledger: Ledger) -> None:
    """Check that a plan reads only checkpoints written for its rows' positions, and writes only private units."""
    cell = ledger.spec.cell
    published = {node.page for node in ledger.cache.trie.nodes.values()}
    points = {node.resume.slot for node in ledger.cache.trie.nodes.values() if node.resume}
    written: set[int] = set()
    for row, lowest in enumerate(_lowest(plan)):
        start, end = int(plan.start[row]), int(plan.end[row])
        if Kind.STATE in ledger.arena.unit_bytes:
            _check_slot(ledger, start, int(plan.read_slot[row]))
            if lowest // cell < start // cell:
                _check_slot(ledger, lowest, int(plan.drafts.earlier_slot[row]))
        for depth in range(lowest // cell, -(-end // cell)):
            if Kind.PAGE in ledger.arena.unit_bytes:
                page = int(plan.page_table[row, depth])
                assert page not in published, f"row at {start} writes a published page"
                assert page not in written, f"two rows write page {page}"
                written.add(page)
    _check_captures(plan, ledger, points)


def _lowest(plan: Plan) -> list[int]:
    """Return the earliest start of each row."""
    found: list[int] = (plan.start - plan.drafts.unverified_before if plan.drafts.may_move else plan.start).tolist()
    return found


def _check_slot(ledger: Ledger, start: int, slot: int) -> None:
    if start >= ledger.cell:
        found = ledger.cache.written_for.get(slot)
        assert found == floor_to_grid(start, ledger.cell), f"row at {start} reads a checkpoint written for {found}"


def _check_captures(plan: Plan, ledger: Ledger, points: set[int | None]) -> None:
    cell, lowest = ledger.spec.cell, _lowest(plan)
    captures = plan.captures
    slots = captures.slot.tolist()
    assert len(set(slots)) == len(slots), "two captures share a slot"
    for row, position, slot in zip(captures.row.tolist(), captures.position.tolist(), slots, strict=True):
        assert position % cell == 0
        assert lowest[row] < position <= int(plan.end[row]), "a capture lies outside its row"
        assert slot not in points, "a published checkpoint would be written"
        assert ledger.cache.written_for[slot] == position
