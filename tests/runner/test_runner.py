"""The runner between engine and model: what it asks of the model, what it gives back, and that it never waits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels.operations import CPU
from tests.support.models import tiny_model
from weft.base.config import EngineConfig
from weft.base.cores import available_cores, quota_cores
from weft.base.sampling import SamplingParams
from weft.device.upload import upload
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.models.weights import load_model
from weft.runner import batching
from weft.runner.runner import Runner, WaitingFlight, fly

MEMORY_BYTES = 16 << 20
SEATS = 4


@pytest.fixture(scope="module")
def model():
    return load_model(tiny_model.FOLDER, torch.float32, weights="dummy", seed=1)[0]


class Watched(Runner):
    """Records plans, flights and the logits that the model was asked for."""

    def __init__(self, model) -> None:
        super().__init__(model, MemorySpec(model.memories(CPU)), MEMORY_BYTES, SEATS, threads=1)
        self.plans, self.landings, self.logits = [], [], []
        original = type(model).logits

        def logits(hidden, batch):
            found = original(model, hidden, batch)
            self.logits.append(found.clone())
            return found

        # Instance attributes hide methods; the model itself stays as it was.
        object.__setattr__(model, "logits", logits)

    def launch(self, plan):
        self.plans.append(plan)
        return super().launch(plan)

    def land(self, flight):
        self.landings.append(super().land(flight))
        return self.landings[-1]


@pytest.fixture
def runner(model):
    yield Watched(model)
    del model.__dict__["logits"]


def answers(runner: Runner, requests: list[Request], **settings) -> list[list[int]]:
    config = {"memory_bytes": MEMORY_BYTES, "max_sequences": SEATS, "max_tokens_per_step": 96, **settings}
    engine = Engine(runner.spec, runner, EngineConfig(**config))
    numbers = [engine.add(request) for request in requests]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for output in engine.step():
            if output.token is not None:
                found[output.sequence].append(output.token)
    return [found[number] for number in numbers]


def request(prompt: list[int], **params) -> Request:
    return Request(np.array(prompt, np.int32), SamplingParams(**params))


PROMPTS = [[3, 1, 4, 1, 5], list(range(100, 250)), [7] * 70]


def test_logits_are_computed_only_where_a_token_is_sampled_or_scored(runner):
    answers(runner, [request(prompt, max_tokens=3, temperature=0.0) for prompt in PROMPTS])
    asked = [len(plan.sampled) for plan in runner.plans if len(plan.sampled)]
    assert [len(logits) for logits in runner.logits] == asked
    assert any(len(plan.tokens) > len(plan.sampled) for plan in runner.plans)


def test_a_prompt_that_samples_nothing_needs_no_logits(runner):
    assert answers(runner, [request(PROMPTS[1], max_tokens=0)]) == [[]]
    assert runner.logits == []


def test_landings_bring_narrow_arrays_in_the_order_of_the_plan(runner):
    wishes = {"max_tokens": 2, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}
    answers(runner, [request(prompt, **wishes) for prompt in PROMPTS])
    for plan, landing in zip(runner.plans, runner.landings, strict=True):
        assert landing.tokens.shape == plan.sampled.shape
        assert landing.tokens.dtype == np.int32
        if len(plan.sampled):
            assert landing.sampled_scores.top_token.shape == (len(plan.sampled), 3)
            np.testing.assert_array_equal(landing.sampled_scores.top_token[:, 0], landing.tokens)
            np.testing.assert_array_equal(landing.sampled_scores.top_logprob[:, 0], landing.sampled_scores.chosen)
        if len(plan.score_index):
            assert landing.prompt_scores.chosen.shape == plan.score_index.shape
            assert landing.prompt_scores.top_logprob.shape == (len(plan.score_index), 2)


@pytest.mark.parametrize("depth", [0, 1])
def test_penalties_count_the_token_that_only_the_board_knows(runner, depth):
    """Greedy tokens of one penalised sequence, against the plain definition on the logits that the model gave."""
    prompt = [3, 1, 4, 1, 5]
    wishes = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    tokens = answers(runner, [request(prompt, max_tokens=12, temperature=0.0, **wishes)], depth=depth)[0]
    for place, token in enumerate(tokens):
        logits = runner.logits[place][0].double().numpy().copy()
        seen = prompt + tokens[:place]
        for each in set(seen):
            logits[each] = logits[each] / 1.3 if logits[each] > 0 else logits[each] * 1.3
        for each in set(tokens[:place]):
            logits[each] -= 0.4 + 0.7 * tokens[:place].count(each)
        assert token == int(logits.argmax())
    assert any(plan.from_board.any() for plan in runner.plans)


class Waits(TorchDispatchMode):
    """Remembers operations that make the host wait for the device's values."""

    FORBIDDEN = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        name = function.overloadpacket.__name__
        if name in self.FORBIDDEN or (name == "index" and any(_is_mask(index) for index in args[1])):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def test_nothing_in_a_launch_waits_for_the_device(runner):
    """Prefill, decode, resumed prefixes, captures, every way of sampling, log-probabilities."""
    wishes = [
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "min_tokens": 2, "logit_bias": {5: 2.0}},
    ]
    requests = [request(p, max_tokens=6, **w) for p, w in zip(PROMPTS, wishes)]
    with Waits() as waits:
        answers(runner, [*requests, request(PROMPTS[1], max_tokens=2, prompt_logprobs=1)], depth=1)
    assert waits.calls > 1000
    assert waits.found == []


def test_a_step_makes_one_upload(runner, monkeypatch):
    sent = []
    monkeypatch.setattr(
        batching, "upload", lambda arrays, *more, **named: sent.append(1) or upload(arrays, *more, **named)
    )
    wishes = {"top_p": 0.9, "repetition_penalty": 1.1, "prompt_logprobs": 1, "logprobs": 1}
    answers(runner, [request(prompt, max_tokens=4, **wishes) for prompt in PROMPTS])
    assert len(sent) == len(runner.plans)


def test_poisoned_units_are_filled_with_nan_before_the_step(runner):
    answers(runner, [request([1, 2, 3], max_tokens=1)])
    # Far behind what the step itself writes.
    last = MEMORY_BYTES // runner.store.unit_bytes[Kind.PAGE] - 1
    runner.launch(replace(runner.plans[0], poison=((str(Kind.PAGE), last),)))
    assert bool((runner.store.unit(Kind.PAGE, last) == 0xFF).all())
    assert not bool((runner.store.unit(Kind.PAGE, last - 1) == 0xFF).any())


def test_threads_follow_the_cores_that_we_may_use(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "no number")
    assert available_cores() >= 1
    for text, cores in (("max 100000", None), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert quota_cores(tmp_path / "cpu.max") == cores
    assert quota_cores(tmp_path / "absent") is None


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.nbytes)
        return result


def test_scoring_a_prompt_takes_the_same_memory_whatever_its_length(tmp_path):
    """A CPU's allocator keeps what the largest step took, so a step's temporaries must not grow with its prompts."""
    vocabulary, tokens = 1 << 15, 600
    config = json.loads((tiny_model.FOLDER / "config.json").read_text()) | {"vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(tmp_path / "config.json", torch.float32, weights="dummy", seed=1, progress=False)
    runner = Runner(model, MemorySpec(model.memories(CPU)), MEMORY_BYTES, SEATS, threads=1)
    wishes = {"max_tokens": 0, "prompt_logprobs": 20}
    with Largest() as largest:
        answers(runner, [request(list(range(tokens)), **wishes)], max_tokens_per_step=1024)
    assert tokens * vocabulary * 4 > 64 << 20, "the logits of the whole prompt would not be seen"
    assert largest.bytes <= 16 << 20, f"a temporary of {largest.bytes >> 20} MiB"


def test_a_sequence_keeps_its_own_prompt_scores_as_arrays_and_nothing_else(runner):
    """It keeps them until it ends: 164 bytes a token with 20 likeliest ones, where objects took 2,000."""
    engine = Engine(runner.spec, runner, EngineConfig(memory_bytes=MEMORY_BYTES, max_sequences=SEATS))
    numbers = [engine.add(request([7 + i] * 200, max_tokens=0, prompt_logprobs=20)) for i in range(2)]
    while not engine.idle:
        engine.step()
    assert len(runner.plans) == 1, "both prompts must be scored in one step"
    for number in numbers:
        scores = engine.report(number).prompt_scores
        assert len(scores) == len(list(scores)) == 199
        arrays = [
            array for piece in scores.pieces(1 << 20) for array in (piece.chosen, piece.top_token, piece.top_logprob)
        ]
        assert sum(kept_bytes(array) for array in arrays) == 199 * 164


def kept_bytes(array: np.ndarray) -> int:
    """Bytes that live as long as this array does."""
    return array.nbytes if array.base is None else kept_bytes(array.base)


def test_a_step_that_waits_for_masks_has_neither_landed_nor_computed_a_layer(model):
    runner, nothing = Watched(model), torch.zeros(1, dtype=torch.int64)
    waiting = WaitingFlight(None, nothing, nothing, None)
    assert not runner.landed(waiting)
    assert not runner.has_computed(waiting, 0)
    waiting.flight = fly(nothing)
    assert runner.has_computed(waiting, 0)


def test_rows_follow_drafts_in_flight_only_where_the_host_can_read_how_many_were_wrong(model):
    runner = Watched(model)
    assert runner.builds_on_flight(0, 1, 2)
    runner.store.buffer = runner.store.buffer.to("meta")
    assert not runner.builds_on_flight(0, 1, 2)
