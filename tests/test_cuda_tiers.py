"""Host memory below a GPU: what the device evicted is loaded beside the steps, and answers stay the same."""

from __future__ import annotations

import pytest

from tests.cuda_engines import SETTINGS, for_each, make, tiny
from tests.engines import Answer, Ask, serve, smallest_memory, tokens

pytestmark = pytest.mark.gpu

HOST_BYTES = 256 << 20
TOLERANCE = 2e-3


@pytest.mark.parametrize("paranoid", [True, False])
@pytest.mark.parametrize("family", for_each(("falcon_h1", "qwen3_next", "lfm2", "gemma3", "llama"), "tiny {} float32"))
def test_a_prefix_that_the_gpu_evicted_is_answered_from_host_memory(family: str, paranoid: bool) -> None:
    llm = tiny(family, "float32")
    runner, spec = llm.engine._device, llm.engine.ledger.spec
    if not runner.tiers:
        runner.add_host_memory(HOST_BYTES)
    rows = SETTINGS["max_sequences"]
    memory = smallest_memory(family, 420, rows, spec)
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(6)]
    alone = [serve(make(llm, cache=False), [Ask(prompt)])[0] for prompt in prompts]
    engine = make(llm, memory, host_bytes=HOST_BYTES, paranoid=paranoid, max_length=420)
    first = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    together = serve(engine, [Ask(prompt, step=number) for number, prompt in enumerate(prompts)])
    for answers in (first, again, together):
        for answer, expected in zip(answers, alone, strict=True):
            assert_alike(answer, expected)
    assert sum(a.report.loaded_tokens for a in again) > 256


def assert_alike(answer: Answer, expected: Answer) -> None:
    """The same tokens with about the same log-probabilities, up to a token that two are about equally likely for."""
    assert len(answer.tokens) == len(expected.tokens)
    for token, other, a, b in zip(answer.tokens, expected.tokens, answer.logprobs, expected.logprobs, strict=True):
        assert abs(a - b) < TOLERANCE
        if token != other:
            return
