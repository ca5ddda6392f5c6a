"""Ctrl-C during offline generation ends what was asked for, and leaves the model and other requests as they were."""

from __future__ import annotations

import signal

import pytest

from tests.support.models import tiny_model
from weft import LLM, SamplingParams
from weft.memory.audit import audit

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3
SETTINGS = tiny_model.OPTIONS | {
    "memory": "32MiB",
    "threads": 1,
    "max_sequences": 8,
    "max_tokens_per_step": 128,
    "max_length": 1024,
}


@pytest.fixture
def llm():
    with LLM(**SETTINGS) as llm:
        yield llm
        assert llm.engine.idle
        assert not llm.engine.ledger.leases
        audit(llm.engine.ledger)


def greedy(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})


@pytest.fixture
def interruptible():
    """Tests that run in the background may inherit ignored interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_generation_and_leaves_the_model_usable(llm, monkeypatch, interruptible):
    expected = llm.generate("Hello", greedy())[0].token_ids
    other = llm.stream("Hello", greedy())
    next(other)
    runner = llm.engine._device
    launch, count = runner.launch, iter(range(100))

    def interrupted(plan):
        if next(count) == 3:
            signal.raise_signal(signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", LONG, "c"], greedy(max_tokens=200))
    assert len(llm.engine.ledger.leases) == 1
    assert [*other][-1].result.token_ids == expected
    assert llm.generate("Hello", greedy())[0].token_ids == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_interrupts_during_a_step_and_during_the_abort_leave_the_model_usable(monkeypatch, interruptible, depth):
    with LLM(**SETTINGS, depth=depth) as llm:
        expected = llm.generate("Hello", greedy())[0].token_ids
        step, steps = llm.engine.step, []

        def interrupted():
            steps.append(len(steps))
            for _ in range(3 if len(steps) >= 4 else 0):
                signal.raise_signal(signal.SIGINT)
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            [*llm.stream("Hello", greedy(max_tokens=200))]
        assert len(steps) > 4, "the abort runs a step"
        monkeypatch.undo()
        assert not llm.engine.ledger.leases
        assert llm.generate("Hello", greedy())[0].token_ids == expected


def test_an_interrupt_while_a_request_is_added_leaves_nothing_running(llm, monkeypatch, interruptible):
    add = llm.engine.add

    def interrupted(request, **more):
        number = add(request, **more)
        signal.raise_signal(signal.SIGINT)
        return number

    monkeypatch.setattr(llm.engine, "add", interrupted)
    for ask in (lambda: llm.generate(["a", "b"], greedy()), lambda: [*llm.stream("a", greedy())]):
        with pytest.raises(KeyboardInterrupt):
            ask()
        assert not llm.engine.ledger.leases
        assert llm.engine.idle
