"""The outline of a cache: its branches, put together again, are the cells of the trie, whatever was served."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import random_workload, run_workload
from weft.base.config import EngineConfig
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.outline import MOST_BRANCHES, outline
from weft.memory.trie import path
from weft.server.apis.cache_report import Outlines

MEMORY = 1 << 16


def make(memory: int = MEMORY) -> Engine:
    spec = rolling_spec()
    config = EngineConfig(
        memory_bytes=memory, max_sequences=4, max_tokens_per_step=32, max_length=200, paranoid=True, draft="off"
    )
    return Engine(spec, RollingDevice(spec, memory, 4), config)


def answer(engine: Engine, prompt: list[int], retain: tuple[Retain, ...] = ()) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(Request(np.array(prompt, np.int32), params, retain=retain))
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("seed", range(6))
def test_branches_are_the_cells_of_the_trie(seed: int):
    ledger = run_workload(random_workload(seed)).engine.ledger
    found = outline(ledger)["branches"]
    by_name = {branch["name"]: branch for branch in found}
    assert len(by_name) == len(found)
    assert sum(branch["to"] - branch["from"] for branch in found) == len(ledger.cache.trie) * ledger.cell
    for node in ledger.cache.trie.nodes.values():
        if node.children != 1:
            # From the end of its branch, parents lead to the root without a gap.
            branch: Any = by_name[node.key.hex()[:16]]
            assert branch["to"] == node.depth * ledger.cell
            covered = set()
            while True:
                covered |= {point["tokens"] for point in branch["points"]}
                if branch["parent"] is None:
                    break
                assert by_name[branch["parent"]]["to"] == branch["from"]
                branch = by_name[branch["parent"]]
            assert branch["from"] == 0
            assert covered == {each.depth * ledger.cell for each in path(node) if each.resume is not None}
    assert sum(len(branch["points"]) for branch in found) == sum(
        node.resume is not None for node in ledger.cache.trie.nodes.values()
    )


def test_a_branch_says_how_long_it_is_retained():
    engine = make()
    answer(engine, list(range(40)))
    assert [branch["retained"] for branch in outline(engine.ledger)["branches"]] == [None]
    answer(engine, list(range(40)), (Retain(600),))
    [branch] = outline(engine.ledger)["branches"]
    assert 590 <= branch["retained"] <= 600
    assert branch["running"] == 0


def test_of_a_large_cache_the_newest_cells_are_shown():
    engine = make()
    cell = engine.ledger.cell
    draw = np.random.default_rng(3)
    stem = draw.integers(0, 90, 3 * cell).tolist()
    for _ in range(4):
        answer(engine, stem + draw.integers(0, 90, 2 * cell).tolist())
    whole = outline(engine.ledger)
    held = len(engine.ledger.cache.trie)
    assert whole["cells"]["device"] == {"held": held, "shown": held}
    part = outline(engine.ledger, most_cells=4)
    assert part["cells"]["device"] == {"held": held, "shown": 4}
    assert sum(branch["to"] - branch["from"] for branch in part["branches"]) == 4 * cell
    # They say where they begin, and continue a branch that is not shown.
    shown = {branch["name"] for branch in part["branches"]}
    assert any(branch["from"] > 0 and branch["parent"] not in shown for branch in part["branches"])


def test_branches_are_bounded():
    engine = make(1 << 22)
    trie = engine.ledger.cache.trie
    for number in range(MOST_BRANCHES + 50):
        trie.insert(number.to_bytes(32, "big"), None, None, 0)
    assert len(outline(engine.ledger)["branches"]) == MOST_BRANCHES


def test_clients_share_an_outline_for_a_second():
    asked, now = [], [0.0]

    class Backend:
        async def cache_report(self, limit: int) -> dict[str, Any]:
            asked.append(limit)
            await asyncio.sleep(0)
            return {"branches": []}

    async def run() -> None:
        outlines = Outlines(Backend(), lambda: now[0])
        await asyncio.gather(*(outlines.latest() for _ in range(20)))
        assert asked == [0]
        now[0] = 0.9
        await outlines.latest()
        assert asked == [0]
        now[0] = 1.0
        await outlines.latest()
        assert asked == [0, 0]

    asyncio.run(run())
