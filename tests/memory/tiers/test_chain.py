"""Device, host memory and a file: where a prefix lies, and what is loaded from where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models.engines import Ask, serve, tokens
from tests.support.tiers.chain import chain_of_two, chained_engine, missing, save_all
from tests.support.tiers.host_memory import finish


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3", "llama"])
def test_what_host_memory_evicted_is_answered_from_the_file(family: str, tmp_path: Path) -> None:
    engine = chained_engine(family, tmp_path / "tier", depth=1)
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(10)]
    first = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    assert [a.tokens for a in again] == [a.tokens for a in first]
    assert sum(a.report.disk_tokens for a in again) > 256
    assert all(a.report.disk_tokens <= a.report.loaded_tokens <= a.report.cached_tokens for a in again)
    engine.close()
    engine = chained_engine(family, tmp_path / "tier")
    after = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    engine.close()
    assert [a.tokens for a in after] == [a.tokens for a in first]
    assert sum(a.report.disk_tokens for a in after) > 1024


def test_a_lookup_says_where_a_prefix_lies_and_what_bringing_it_costs() -> None:
    engine, _, (prompt, _) = chain_of_two()
    finish(engine, prompt)
    save_all(engine)
    tiers = engine.ledger.tiers
    assert tiers is not None
    host, disk = tiers.links
    host.rates.load_bytes, disk.rates.load_bytes, host.rates.prefill_tokens = 1e6, 1e5, 1e3
    keys = list(engine.ledger.cache.trie.nodes)
    engine.ledger.cache.clear()
    (near,) = tiers.find(keys, 16, missing(16))
    host.lower.clear()
    (far,) = tiers.find(keys, 16, missing(16))
    assert (near.level, far.level) == (0, 1)
    assert near.tokens == far.tokens > 0
    assert near.load_seconds == pytest.approx(near.load_bytes / 1e6)
    # Through both links.
    assert far.load_bytes == 2 * near.load_bytes
    assert far.load_seconds == pytest.approx(near.load_bytes / 1e6 + near.load_bytes / 1e5)
    assert near.compute_seconds == far.compute_seconds == near.tokens / 1e3
    device_only = replace(missing(16), cached=far.tokens)
    assert tiers.find(keys, 16, device_only) == []
    engine.close()


def test_a_file_that_is_too_slow_does_not_hide_what_host_memory_has() -> None:
    engine, _, (prompt, _) = chain_of_two()
    longer = [*prompt, *prompt[:8]]
    finish(engine, prompt)
    save_all(engine)
    finish(engine, longer)
    save_all(engine)
    tiers = engine.ledger.tiers
    assert tiers is not None
    host, disk = tiers.links
    engine.ledger.cache.clear()
    host.lower.clear()
    # Only the shorter one returns to host memory.
    finish(engine, prompt)
    assert host.lower.trie.nodes
    engine.ledger.cache.clear()
    for link in tiers.links:
        link.rates.prefill_tokens = 1e3
    host.rates.load_bytes, disk.rates.load_bytes = 1e12, 1.0
    report = finish(engine, longer)
    assert report.loaded_tokens > 0
    assert report.disk_tokens == 0
    engine.close()


def test_a_state_comes_from_the_file_and_its_pages_from_host_memory() -> None:
    engine, _, (prompt, _) = chain_of_two()
    finish(engine, prompt)
    save_all(engine)
    tiers = engine.ledger.tiers
    assert tiers is not None
    host = tiers.links[0].lower
    engine.ledger.cache.clear()
    for node in list(host.trie.nodes.values()):
        host.drop_point(node)
    pages = len(host.trie)
    assert pages
    read = tiers.links[1].loads.bytes
    report = finish(engine, prompt)
    assert report.disk_tokens > 0
    assert tiers.links[1].loads.bytes - read == host.point_bytes
    engine.close()
