"""Whole models on a GPU: the CPU's answers, hits that equal cold runs, nobody's traces, and launches that never wait.

One command runs this and the kernels' tests: `pytest -m gpu`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from random import Random
from statistics import mean

import numpy as np
import pytest
import torch

from tests.support.drafting.drafts_of_models import make_asks
from tests.support.engine.sameness import LONGEST, SCENARIOS, admit_everything, asks
from tests.support.models import cuda_engines, tiny_model
from tests.support.models.cuda_engines import for_each, make, published, tiny
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
from tests.support.models.hybrid_models import HYBRIDS
from weft import LLM
from weft.base.errors import OptionError
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.memory.kinds import Kind
from weft.models import configurations

pytestmark = pytest.mark.gpu

CELL = 64
# In float32, between a CPU and a GPU, and between batches of different shapes on a GPU.
TOLERANCE = 2e-4
# What the divergence of a hit may be in bfloat16. The more experts there are to choose from, the more often two are as
# good as equal: with 256, a cold run in chunks of 64 diverges by 1.0e-3 from one in a whole step, a hit by 1.4e-3.
LARGEST_DIVERGENCE = 1e-3
DIVERGENCE_OF_256_EXPERTS = 4e-3
# Larger ones are those of published models.
SMALL_VOCABULARY = 1000
# Of eight prompts each, that an answer's divergence is measured over.
GROUPS = 4
# Tokens that are closer than this may come in either order.
CLEAR_MARGIN = 2e-3


def is_hybrid(name: str) -> bool:
    """Return whether the model of a packaged configuration has recurrent layers."""
    path = configurations.find(name)
    assert path is not None
    family = json.loads(path.read_text())["model_type"].removesuffix("_text").replace("_", "")
    return family in {each.replace("_", "") for each in HYBRIDS}


MODELS = {f"tiny {family} bfloat16": partial(tiny, family, "bfloat16") for family in FAMILIES}
MODELS |= {name: partial(published, name) for name in configurations.names()}
RECURRENT = [f"tiny {family} bfloat16" for family in HYBRIDS]
RECURRENT += [name for name in configurations.names() if is_hybrid(name)]
# Sizes that tiles, whose sides are powers of two, have to be padded for.
ODD_SIZES = (
    "falcon_h1, state of 24",
    "falcon_h1, wide convolution",
    "falcon_h1, narrow convolution",
    "llama, tied, biases, one kv head, llama3 rope",
    "mistral, window of 17",
    "falcon_h1, biases of both mixers, odd heads",
    "qwen3_next, three value heads per key head, dense layer, tied",
    "qwen3_next, equal heads, width 3, every second layer sparse",
)
each_model = pytest.mark.parametrize("model", for_each(MODELS))
each_family = pytest.mark.parametrize("family", for_each(FAMILIES, "tiny {} float32"))


@pytest.fixture(autouse=True, scope="module")
def _a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# the same answers as on a CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", for_each((*FAMILIES, *ODD_SIZES), "tiny {} float32"))
def test_float32_gives_the_greedy_tokens_of_the_cpu(family: str) -> None:
    """Two prompts, 40 tokens each, unless two tokens are as good as equal."""
    wishes = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
    requests = [Ask(tokens(100, 1), wishes), Ask(tokens(9, 2), wishes)]
    ours = told(make(tiny(family, "float32")), requests)
    theirs = told(make_engine(family), requests)
    for mine, reference in zip(ours, theirs, strict=True):
        for place, ((token, _), (expected, top)) in enumerate(zip(mine, reference, strict=True)):
            if token != expected:
                margin = top[0][1] - top[1][1]
                assert margin < CLEAR_MARGIN, f"token {place} is {token}, not {expected}, which leads by {margin}"
                break


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", for_each(("lfm2", "qwen3_5", "gemma3"), "tiny {} float32"))
def test_penalties_and_bad_words_give_the_tokens_of_the_cpu(family: str, depth: int) -> None:
    """What a choice depends on besides logits: the input token of a recorded step, for instance."""
    requests = make_asks(family, seed=3)
    ours = serve(make(tiny(family, "float32"), depth=depth), requests)
    theirs = serve(make_engine(family, depth=depth), requests)
    alike = [mine.tokens == reference.tokens for mine, reference in zip(ours, theirs, strict=True)]
    # Rounding may decide one draw.
    assert sum(alike) >= len(alike) - 1, alike


def told(engine: Engine, requests: list[Ask]) -> list[list[tuple[int, list[tuple[int, float]]]]]:
    """For each request its tokens, each with the two likeliest at its place."""
    from weft.engine.request import Request

    numbers = [engine.add(Request(torch.tensor(ask.prompt).int().numpy(), ask.params)) for ask in requests]
    found: dict[int, list] = {number: [] for number in numbers}
    while not engine.idle:
        for output in engine.step():
            if output.token is not None:
                found[output.sequence].append((output.token, output.top))
    return [found[number] for number in numbers]


# hits in bfloat16 ---------------------------------------------------------------------------------------------------


def divergences(hits: list[Answer], colds: list[Answer]) -> list[float]:
    """Terms of the k3 estimate of KL: sampled tokens, as far as hit and cold run sampled the same ones before."""
    terms = []
    for hit, cold in zip(hits, colds, strict=True):
        for mine, theirs, h, c in zip(hit.tokens, cold.tokens, hit.logprobs, cold.logprobs, strict=True):
            if mine != theirs:
                break
            terms.append(math.expm1(c - h) - (c - h))
    assert len(terms) > 2 * len(hits), "hits and cold runs part too soon"
    return terms


def sampled(prompts: list[list[int]], likeliest: bool) -> list[Ask]:
    """Random weights make all of a large vocabulary about as likely, and then the last bit decides which token is
    drawn: `likeliest` takes the likeliest one instead, so that hits and cold runs can be compared for longer."""
    warmth = 0.0 if likeliest else 1.0
    wishes = [replace(seeded(8, seed=number), temperature=warmth) for number in range(len(prompts))]
    return [Ask(prompt, wish) for prompt, wish in zip(prompts, wishes, strict=True)]


def divergences_of_hits(llm: LLM, engine: Engine, prompts: list[list[int]]) -> list[float]:
    """`engine` has read the first 192 tokens of every prompt and not the whole; another one has read nothing."""
    asks = sampled(prompts, likeliest=llm.engine._device.model.vocab_size > SMALL_VOCABULARY)
    hits = serve(engine, asks)
    assert {hit.report.cached_tokens for hit in hits} == {3 * CELL}
    return divergences(hits, serve(make(llm, cache=False, paranoid=False), asks))


def largest_divergence(model: str) -> float:
    return DIVERGENCE_OF_256_EXPERTS if model == "kimi-linear-48b-a3b" else LARGEST_DIVERGENCE


@each_model
def test_a_hit_after_prefill_does_not_diverge_in_bfloat16(model: str) -> None:
    llm = MODELS[model]()
    engine, prompts = make(llm), [tokens(200, number) for number in range(16)]
    serve(engine, [Ask(prompt, greedy(1)) for prompt in prompts])
    assert mean(divergences_of_hits(llm, engine, prompts)) <= largest_divergence(model)


@each_model
def test_a_hit_after_decode_does_not_diverge_in_bfloat16(model: str) -> None:
    """Over many prompts: where two experts are as good as equal, rounding sends a token in hundreds to the other one,
    which diverges a thousand times as much as the rest."""
    llm, terms = MODELS[model](), []
    for group in range(GROUPS):
        engine, firsts = make(llm, depth=1), [tokens(100, 1000 * group + 50 + number) for number in range(8)]
        answers = serve(engine, [Ask(first, seeded(100, seed=number)) for number, first in enumerate(firsts)])
        seconds = [first + answer.tokens + tokens(10, 90) for first, answer in zip(firsts, answers, strict=True)]
        terms += divergences_of_hits(llm, engine, seconds)
    assert mean(terms) <= largest_divergence(model)


def checkpoints(engine: Engine) -> dict[int, torch.Tensor]:
    """The bytes of every kept state, by position; of an engine that has read one prompt."""
    nodes = [node for node in engine.ledger.cache.trie.nodes.values() if node.resume]
    store = engine._device.store
    return {node.depth * CELL: store.unit(Kind.STATE, node.resume.slot).clone() for node in nodes}


@pytest.mark.parametrize("model", for_each(RECURRENT))
def test_checkpoints_of_a_resumed_prefill_are_those_of_a_cold_one_to_the_bit(model: str) -> None:
    """In chunks of the same sizes, so that matrix products are the same ones: all else may not depend on the start."""
    llm, prompt = MODELS[model](), tokens(450, 7)
    settings = {"capture_every": CELL, "max_tokens_per_step": 2 * CELL}
    whole, resumed = make(llm, **settings), make(llm, **settings)
    serve(whole, [Ask(prompt, greedy(1))])
    expected = checkpoints(whole)
    serve(resumed, [Ask(prompt[:130], greedy(1))])
    answer = serve(resumed, [Ask(prompt, greedy(1))])[0]
    assert answer.report.cached_tokens == 2 * CELL
    found = checkpoints(resumed)
    assert set(expected) == set(found) == {CELL * n for n in range(1, 8)}
    differing = {position for position in expected if not torch.equal(expected[position], found[position])}
    assert differing == set()


# sameness in float32 ------------------------------------------------------------------------------------------------


@cache
def reference(family: str) -> list[Answer]:
    """Each request alone, in one piece, without a cache."""
    llm = tiny(family, "float32")
    return [serve(make(llm, cache=False, paranoid=False), [replace(ask, step=0)])[0] for ask in asks()]


def check(family: str, requests: list[Ask], answers: list[Answer], order: list[int]) -> None:
    for place, index in enumerate(order):
        expected, answer = reference(family)[index], answers[place]
        aborted = requests[place].abort_after is not None and answer.finish is FinishReason.ABORT
        wanted = expected.tokens[: len(answer.tokens)] if aborted else expected.tokens
        assert answer.tokens == wanted, f"request {index}"
        worst = max((abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs)), default=0.0)
        assert worst <= TOLERANCE, f"request {index}: logprobs differ by {worst}"


@pytest.mark.parametrize("scenario", SCENARIOS)
@each_family
def test_answers_do_not_depend_on_how_they_are_computed(family: str, scenario: str) -> None:
    engine = make(tiny(family, "float32"), **SCENARIOS[scenario])
    check(family, list(asks()), serve(engine, list(asks())), list(range(len(asks()))))
    assert (engine.ledger.cache.counts.tokens_cached > 0) == engine.config.cache


def room(family: str, length: int) -> int:
    return smallest_memory(family, length, spec=tiny(family, "float32").engine.ledger.spec)


@each_family
def test_answers_are_the_same_where_memory_evicts_and_preempts(family: str) -> None:
    evicted = preempted = 0
    for depth, eviction, slack in ((0, "value", 1.0), (1, "lru", 1.3)):
        memory = int(slack * room(family, LONGEST))
        settings = {"depth": depth, "eviction": eviction, "max_tokens_per_step": 100}
        engine = make(tiny(family, "float32"), memory, **settings)
        admit_everything(engine)
        check(family, list(asks()), serve(engine, list(asks())), list(range(len(asks()))))
        evicted += engine.ledger.cache.counts.evicted_pages + engine.ledger.cache.counts.evicted_points
        preempted += engine.planner.preemptions
    assert evicted
    assert preempted


@each_family
def test_aborts_and_the_order_of_arrival_change_nothing_for_the_others(family: str) -> None:
    random = Random(family)
    order = random.sample(range(len(asks())), len(asks()))
    requests = [
        replace(asks()[i], step=random.randint(0, 6), abort_after=random.choice([None, None, 0, 2, 5, 9]))
        for i in order
    ]
    memory = int(1.4 * room(family, LONGEST))
    engine = make(tiny(family, "float32"), memory, depth=1, max_tokens_per_step=64)
    check(family, requests, serve(engine, requests), order)
    assert not engine.ledger.leases


@each_family
def test_no_stranger_shows_through(family: str) -> None:
    """Strangers fill all memory, and what they leave is NaN; the next answers are those of untouched memory."""
    llm, stem = tiny(family, "float32"), tokens(130, 4)
    memory = int(1.5 * room(family, 300))
    used = make(llm, memory)
    rounds = [
        [Ask(stem, greedy(6))],
        [Ask(tokens(40, 5), greedy(6)), Ask(stem + tokens(9, 6), greedy(6)), Ask(tokens(90, 7), greedy(6))],
        [Ask(stem + tokens(3, 8), greedy(6)), Ask(tokens(1, 9), greedy(6))],
    ]
    new = make(llm, memory)
    expected = [serve(new, asked) for asked in rounds]
    # One engine at a time: both work in the same memory.
    serve(used, [Ask(tokens(250, 100 + i), greedy(20)) for i in range(24)])
    assert used.ledger.cache.counts.evicted_pages + used.ledger.cache.counts.evicted_points, "memory was never full"
    for asked, answers in zip(rounds, expected, strict=True):
        for ours, theirs in zip(serve(used, asked), answers, strict=True):
            assert ours.tokens == theirs.tokens
            assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) <= TOLERANCE


def test_more_memory_than_the_gpu_has_is_refused_with_numbers() -> None:
    with pytest.raises(OptionError, match=r"cannot allocate memory of 9999\.0 GiB: [\d.]+ GiB"):
        LLM(**tiny_model.OPTIONS, device="cuda", memory="9999GiB", progress=False)


# launches that never wait -------------------------------------------------------------------------------------------


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_model
def test_no_launch_waits_for_the_device(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes, hits and every way of sampling; landing may wait, launching may not."""
    engine = make(MODELS[model](), max_tokens_per_step=96, depth=1, paranoid=False)
    device, launch = engine._device, engine._device.launch

    def watched(plan):
        with waiting_is_an_error():
            return launch(plan)

    monkeypatch.setattr(device, "launch", watched)
    stem = tokens(130, 0)
    requests = [
        Ask(stem + tokens(40, 1), greedy(20, repetition_penalty=1.2, logit_bias={5: 2.0})),
        Ask(tokens(3, 2), seeded(70, 1, top_p=0.9, top_k=20, min_p=0.01)),
        Ask(stem + tokens(9, 3), seeded(6, 2, min_tokens=2, frequency_penalty=0.2), step=6),
        Ask(tokens(70, 4), greedy(2, prompt_logprobs=1), step=8),
    ]
    answers = serve(engine, requests)
    assert [len(answer.tokens) for answer in answers] == [20, 70, 6, 2]


def test_waiting_would_be_seen() -> None:
    with pytest.raises(RuntimeError), waiting_is_an_error():
        torch.ones(1, device="cuda").item()


def test_published_shapes_keep_every_kind_of_layer() -> None:
    for name in configurations.names():
        file = configurations.find(name)
        assert file is not None
        config = cuda_engines.read_config(file)
        short = cuda_engines.few_layers(config)
        for field in ("layer_types", "hybrid_override_pattern"):
            assert set(config.get(field) or ()) == set(short.get(field) or ())


@each_family
def test_vectors_beside_answers_are_those_of_a_cpu(family: str) -> None:
    llm, stem = tiny(family, "float32"), tokens(130, 1)
    prompts = [(stem + tokens(20, 2), 149), (stem + tokens(9, 3), 0), (tokens(1, 4), 0), (stem + tokens(70, 5), 150)]
    asks = [Ask(prompt, SamplingParams(max_tokens=0, vector_from=first)) for prompt, first in prompts]
    found = serve(make(llm), [Ask(stem, greedy(20)), *asks])[1:]
    for ask, answer in zip(asks, found, strict=True):
        [cold] = serve(make_engine(family, cache=False), [ask])
        assert np.abs(answer.report.vector.mean - cold.report.vector.mean).max() < 1e-3
