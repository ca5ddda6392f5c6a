"""Cache hits compared with cold runs, on tiny models."""

from __future__ import annotations

import math

import numpy as np

from tests.support.models.engines import (
    FAMILIES,
    Answer,
    Ask,
    greedy,
    make_engine,
    seeded,
    serve,
    smallest_memory,
    tokens,
)
from weft.engine.request import Request
from weft.memory.kinds import Kind
from weft.memory.misses import Reason

CELL = 64
# Of the divergence of a hit in float32. What was seen is below 1e-13; states rounded to 16 bits would show.
LARGEST = 1e-10
# By name, since the models themselves take seconds to build: `test_hits.py` compares them.
WINDOWED = ["lfm3", "mistral", "phi3", "olmo3", "gemma2", "gemma3", "gpt_oss"]
WITHOUT_STATES = {"granite", "llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo2"}.union(WINDOWED) - {"lfm3"}
HYBRID = [family for family in FAMILIES if family not in WITHOUT_STATES]


def divergence(hit: Answer, cold: Answer) -> float:
    """The k3 estimate of KL over sampled tokens: mean of exp(d) - 1 - d, never negative."""
    assert hit.tokens == cold.tokens
    differences = [c - h for h, c in zip(hit.logprobs, cold.logprobs, strict=True)]
    return sum(math.expm1(d) - d for d in differences) / len(differences)


def cold(family: str, prompt: list[int], count: int = 40) -> Answer:
    return serve(make_engine(family, cache=False), [Ask(prompt, seeded(count, seed=7))])[0]


def check_a_hit_after_prefill_does_not_diverge_from_a_cold_run(family: str) -> None:
    engine, prompt = make_engine(family), tokens(200, 1)
    serve(engine, [Ask(prompt, greedy(1))])
    hit = serve(engine, [Ask(prompt, seeded(40, seed=7))])[0]
    assert hit.report.cached_tokens == 192
    assert divergence(hit, cold(family, prompt)) <= LARGEST


def check_a_hit_after_decode_does_not_diverge_from_a_cold_run(family: str, depth: int) -> None:
    engine, first = make_engine(family, depth=depth), tokens(100, 2)
    answer = serve(engine, [Ask(first, seeded(100, seed=3))])[0]
    second = first + answer.tokens + tokens(10, 3)
    hit = serve(engine, [Ask(second, seeded(40, seed=7))])[0]
    # All of the first turn but its last token was computed; the last full cell of that is reused.
    assert hit.report.cached_tokens == 192
    assert divergence(hit, cold(family, second)) <= LARGEST


def check_no_stranger_shows_through(family: str) -> None:
    """A long stranger fills all memory; then fresh and resumed rows, alone and in a batch, as in a new engine."""
    memory = int(1.5 * smallest_memory(family, 300))
    used, stem = make_engine(family, memory), tokens(130, 4)
    strangers = [Ask(tokens(250, 100 + i), greedy(20)) for i in range(6)]
    serve(used, strangers)
    assert used.ledger.cache.counts.evicted_pages + used.ledger.cache.counts.evicted_points, "memory was never full"
    new = make_engine(family, memory)
    rounds = [
        [Ask(stem, greedy(6))],
        [Ask(tokens(40, 5), greedy(6)), Ask(stem + tokens(9, 6), greedy(6)), Ask(tokens(90, 7), greedy(6))],
        [Ask(stem + tokens(3, 8), greedy(6)), Ask(tokens(1, 9), greedy(6))],
    ]
    for asks in rounds:
        for ours, theirs in zip(serve(used, asks), serve(new, asks), strict=True):
            assert ours.tokens == theirs.tokens
            assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def check_without_regular_snapshots_the_third_branch_still_hits(family: str) -> None:
    engine, stem = make_engine(family, capture_every=8192), tokens(257, 10)
    answers = [serve(engine, [Ask(stem + tokens(100 + 30 * i, 11 + i), greedy(4))])[0] for i in range(3)]
    assert [answer.report.cached_tokens for answer in answers] == [0, 0, 256]


def check_a_declared_point_is_kept_and_hit_by_the_next_request(family: str) -> None:
    prompt = tokens(300, 20)
    declared, undeclared = (make_engine(family, capture_every=8192) for _ in range(2))
    serve(declared, [Ask(prompt, greedy(2), snapshots=(140,))])
    serve(undeclared, [Ask(prompt, greedy(2))])
    follow_up = [Ask(prompt[:150] + tokens(20, 21), greedy(2))]
    assert serve(declared, follow_up)[0].report.cached_tokens == 128
    if declared.ledger.cache.point_bytes:
        assert serve(undeclared, follow_up)[0].report.cached_tokens == 0


def check_window_pages_are_returned_while_the_request_still_runs(family: str) -> None:
    engine = make_engine(family, capture_every=8192, max_tokens_per_step=64)
    spec = engine.ledger.spec
    engine.add(Request(np.array(tokens(400, 22), np.int32), greedy(150)))
    most = 0
    while not engine.idle:
        engine.step()
        live = sum(lease.cells - lease.window_first for lease in engine.ledger.leases.values())
        most = max(most, live)
    # What a query at the last grid position sees, the open cell, and the cell of a chunk being computed.
    assert most <= spec.window_cells + 2
    assert engine.ledger.arena.used(Kind.WINDOW) < 550 // CELL


def check_a_resume_point_keeps_exactly_the_window_that_it_needs(family: str) -> None:
    engine = make_engine(family, capture_every=64)
    window = engine.ledger.spec.window
    serve(engine, [Ask(tokens(400, 23), greedy(2))])
    points = [node.resume for node in engine.ledger.cache.trie.nodes.values() if node.resume]
    assert len(points) == 6
    for point in points:
        position = point.node.depth * CELL
        visible = {p // CELL for p in range(max(0, position - window + 1), position)}
        assert len(point.window) == len(visible)


def check_a_running_sequence_holds_one_slot_shared_until_it_passes_a_cell(family: str) -> None:
    engine, prompt = make_engine(family, capture_every=8192), tokens(130, 24)
    serve(engine, [Ask(prompt, greedy(1))])
    engine.add(Request(np.array(prompt, np.int32), greedy(130)))
    engine.step()
    (lease,) = engine.ledger.leases.values()
    point = next(n.resume for n in engine.ledger.cache.trie.nodes.values() if n.resume and n.depth == 2)
    assert lease.slot == point.slot
    passed = False
    while not engine.idle:
        cached = {n.resume.slot for n in engine.ledger.cache.trie.nodes.values() if n.resume}
        held = set(engine.ledger.arena.owners[Kind.STATE]) - cached - {engine.ledger.snapshots.reserve}
        assert len(held) <= 1
        passed = passed or len(held) == 1
        engine.step()
    assert passed


def check_the_reason_of_every_miss_is_told() -> None:
    engine, prompt = make_engine("qwen3_5", capture_every=8192), tokens(300, 30)

    def reason(*args: object, **kwargs: object) -> Reason:
        return serve(engine, [Ask(*args, **kwargs)])[0].report.miss.reason

    assert reason(tokens(20, 31)) is Reason.BELOW_GRID
    assert reason(prompt) is Reason.NEVER_COMPUTED
    assert reason(prompt) is Reason.NOTHING_MORE
    assert reason(prompt[:200]) is Reason.STATE_NEVER_KEPT
    assert reason(prompt, greedy(2, prompt_logprobs=0)) is Reason.SCORES_WANTED
    engine.ledger.cache.counts.misses.clear()
    # Another tenant is told no more than that it is new; the operator sees why.
    assert reason(prompt, salt=b"another tenant") is Reason.NEVER_COMPUTED
    assert engine.ledger.cache.counts.misses[Reason.OTHER_SALT] == 1
    small = make_engine("qwen3_5", int(1.2 * smallest_memory("qwen3_5", 320)))
    serve(small, [Ask(prompt, greedy(2))])
    for seed in range(32, 40):
        serve(small, [Ask(tokens(310, seed), greedy(2))])
    assert serve(small, [Ask(prompt, greedy(2))])[0].report.miss.reason in (Reason.EVICTED, Reason.STATE_EVICTED)
    off = make_engine("qwen3_5", cache=False)
    assert serve(off, [Ask(prompt)])[0].report.miss.reason is Reason.CACHE_OFF
