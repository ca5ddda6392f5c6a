"""Recounts the owners of the tiers below the device; for tests and the paranoid mode."""

from __future__ import annotations

from collections import Counter

from weft.base.grid import first_window_cell
from weft.memory.cache import Cache
from weft.memory.kinds import Kind
from weft.memory.retention import Retentions
from weft.memory.tiers.link import TierLink
from weft.memory.tiers.tiers import Tiers
from weft.memory.trie import Node, path


def audit_tiers(tiers: Tiers, retentions: Retentions) -> None:
    """Check that every unit below the device has exactly the owners that its trie and the copies in flight imply."""
    for link in tiers.links:
        _audit(link, [each for each in tiers.links if each.upper is link.lower], retentions)


def _audit(link: TierLink, below: list[TierLink], retentions: Retentions) -> None:
    """Check the lower tier of a link; `below` are the links from there on."""
    tier, name = link.lower, link.name
    counted: dict[Kind, Counter[int]] = {kind: Counter() for kind in tier.arena.unit_bytes}
    for node in tier.trie.nodes.values():
        _count_node(tier, node, counted)
    held = [*link.saves.held(lower=True), *link.loads.held(lower=True)]
    held += link.own_units()
    pinned = [*link.saves.lower_pins(), *link.loads.lower_pins(), *link.own_pins(), *retentions.nodes(tier)]
    for each in below:
        held += [*each.saves.held(lower=False), *each.loads.held(lower=False)]
        pinned += each.loads.upper_pins()
    if link.restoring is not None:
        held += link.restoring.held()
    for kind, unit in held:
        counted[kind][unit] += 1
    for kind, owners in tier.arena.owners.items():
        assert counted[kind] == owners, f"owners of {kind} in {name}: {dict(counted[kind])}, recorded {owners}"
    pins = Counter(node.key for node in pinned)
    on_paths = {each.key for node in pinned for each in path(node)}
    for node in tier.trie.nodes.values():
        assert node.pins == pins[node.key], f"a cell in {name} has {node.pins} pins, not {pins[node.key]}"
        assert (node.holders > 0) == (node.key in on_paths), f"a cell in {name} is held without a copy that needs it"
    assert link.demotion.under_way_bytes >= 0
    if not link.busy:
        assert link.demotion.under_way_bytes == 0, "a candidate for eviction was lost on its way down"


def _count_node(tier: Cache, node: Node, counted: dict[Kind, Counter[int]]) -> None:
    spec = tier.spec
    assert node.parent is None or tier.trie.nodes.get(node.parent.key) is node.parent, "a saved cell lost its parent"
    if node.page is not None:
        counted[Kind.PAGE][node.page] += 1
    point = node.resume
    if point is None:
        return
    position = node.depth * spec.cell
    if point.slot is not None:
        counted[Kind.STATE][point.slot] += 1
        written = tier.written_for[point.slot]
        assert written == position, f"the saved checkpoint of position {position} was written for {written}"
    if spec.window:
        needed = node.depth - first_window_cell(position, spec.window, spec.cell)
        assert len(point.window) == needed, f"a saved point keeps {len(point.window)} window pages, needs {needed}"
    for page in point.window:
        counted[Kind.WINDOW][page] += 1
