"""Recounts the owners of a tier below the device; for tests and the paranoid mode."""

from __future__ import annotations

from collections import Counter

from weft.base.grid import first_window_cell
from weft.memory.kinds import Kind
from weft.memory.tiers.tiers import Tiers
from weft.memory.trie import Node, path


def audit_host(tiers: Tiers) -> None:
    """Check that every unit of host memory has exactly the owners that its trie and the copies in flight imply."""
    host = tiers.lower
    counted: dict[Kind, Counter[int]] = {kind: Counter() for kind in host.arena.unit_bytes}
    for node in host.trie.nodes.values():
        _count_node(tiers, node, counted)
    for kind, unit in (*tiers.saves.held(lower=True), *tiers.loads.held(lower=True)):
        counted[kind][unit] += 1
    for kind, owners in host.arena.owners.items():
        assert counted[kind] == owners, f"owners of {kind} in host memory: {dict(counted[kind])}, recorded {owners}"
    pins = Counter(node.key for node in (*tiers.saves.lower_pins(), *tiers.loads.lower_pins()))
    held = {each.key for node in (*tiers.saves.lower_pins(), *tiers.loads.lower_pins()) for each in path(node)}
    for node in host.trie.nodes.values():
        assert node.pins == pins[node.key], f"a cell in host memory has {node.pins} pins, not {pins[node.key]}"
        assert (node.holders > 0) == (node.key in held), "a cell in host memory is held without a copy that needs it"


def _count_node(tiers: Tiers, node: Node, counted: dict[Kind, Counter[int]]) -> None:
    host, spec = tiers.lower, tiers.lower.spec
    assert node.parent is None or host.trie.nodes.get(node.parent.key) is node.parent, "a saved cell lost its parent"
    if node.page is not None:
        counted[Kind.PAGE][node.page] += 1
    point = node.resume
    if point is None:
        return
    position = node.depth * spec.cell
    if point.slot is not None:
        counted[Kind.STATE][point.slot] += 1
        written = host.written_for[point.slot]
        assert written == position, f"the saved checkpoint of position {position} was written for {written}"
    if spec.window:
        needed = node.depth - first_window_cell(position, spec.window, spec.cell)
        assert len(point.window) == needed, f"a saved point keeps {len(point.window)} window pages, needs {needed}"
    for page in point.window:
        counted[Kind.WINDOW][page] += 1
