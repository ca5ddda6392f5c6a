"""Exact mode on a CPU: logits have the same bits, whatever is cached, batched, chunked, preempted or evicted."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.models import tiny_model
from tests.support.models.engines import FAMILIES, Ask, greedy, serve, tokens
from tests.support.models.exact_traffic import (
    Served,
    alone,
    check_long_traffic,
    check_traffic,
    exact_engine,
    exact_model,
)
from tests.support.servers.http_server import serving
from weft import LLM, SamplingParams
from weft.cli.exact_test import ExactTest, exact_complaints
from weft.cli.main import main
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.kernels.plain.sampling import digest
from weft.memory.keys import PrefixIdentity
from weft.memory.spec import MemorySpec
from weft.runner.eager import UsualNumerics
from weft.runner.exact import ExactCells, canonical_passes
from weft.server.settings import ServerSettings
from weft.start.assembling import numerics_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Tokens of traffic per family and data type in the slow test, and the first seed. `tests/support/models/exact_fuzz.py`
# spreads the seeds over processes.
TOKENS = int(os.environ.get("WEFT_EXACT_TOKENS", "20000"))
FIRST_SEED = int(os.environ.get("WEFT_EXACT_SEED", "2"))
# 0: one or two, in turns.
THREADS = int(os.environ.get("WEFT_EXACT_THREADS", "0"))
SMALL = {"memory": "32MiB", "threads": 1, "max_length": 1024, "max_sequences": 8}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_digest_is_that_of_a_lone_cold_run(family: str) -> None:
    """With drafts if the seed is odd."""
    check_traffic(family, torch.float32, seed=1 + list(FAMILIES).index(family) % 2, count=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_digests_of_long_traffic_are_those_of_lone_cold_runs(family: str, dtype: str) -> None:
    """At least two seeds: without drafts and with them."""
    served, seed = Served(), FIRST_SEED
    while served.tokens < TOKENS or seed < FIRST_SEED + 2:
        served = served.more(check_long_traffic(family, DTYPES[dtype], seed, THREADS or 1 + seed % 2))
        seed += 1
    print(f"{family} in {dtype}: {served}, seeds {FIRST_SEED} to {seed - 1}")


@pytest.mark.parametrize("family", ["lfm2"])
def test_a_step_that_is_computed_whole_shows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: PyTorch's operators see the company."""
    monkeypatch.setattr(ExactCells, "compute", lambda self, *parts: UsualNumerics().compute(*parts))
    with pytest.raises(AssertionError, match="differs at"):
        check_traffic(family, torch.float32, seed=1, count=6)


def test_penalties_and_bad_words_see_inputs_from_the_board_beside_prompts() -> None:
    """A step with a prompt has several passes, and at depth 1 only the device knows the last token of a decode."""
    found = exact_model("lfm2", torch.float32)
    bare = Ask(tokens(20, 1), greedy(24))
    answer = alone(found, bare).tokens
    words = [tuple(answer[place : place + 2]) for place in range(4, 20, 3)]
    asks = [
        # A negative penalty makes the last token likelier.
        Ask(bare.prompt, greedy(24, frequency_penalty=-1.0)),
        Ask(bare.prompt, greedy(24, bad_words=words)),
        *(Ask(tokens(300, step), greedy(1), step=step) for step in (2, 8, 14)),
    ]
    engine = exact_engine(found, depth=1, max_tokens_per_step=66, cache=False)
    assert [each.tokens for each in serve(engine, asks)] == [alone(found, ask, depth=0).tokens for ask in asks]


def test_without_native_kernels_rows_of_one_token_are_computed_one_by_one() -> None:
    found = exact_model("lfm2", torch.float32)
    assert found.chosen.operations.decodes_at_once in (1, 64)
    bare = type(found.chosen.operations)({k: v for k, v in vars(found.chosen.operations).items() if k[:4] != "deco"})
    assert numerics_of(replace(found.chosen, operations=bare)).at_once == 1


def test_exact_engines_of_different_forms_share_no_key() -> None:
    tokens = np.arange(8, dtype=np.int32)
    identities = [PrefixIdentity(4, b"salt", form) for form in (None, "", "2 threads", "4 threads")]
    assert len({key for identity in identities for key in identity.keys(tokens)}) == 8


def named(prompt: int, total: int, form: str | None) -> list[bytes]:
    """Return the keys of a sequence with this many tokens, starting with its prompt."""
    tokens = np.arange(total, dtype=np.int32)
    sequence = Sequence(
        0, Request(tokens[:prompt], SamplingParams(max_tokens=total)), total, 0, PrefixIdentity(4, form=form)
    )
    sequence.generated = tokens[prompt:].tolist()
    sequence.name_cells(total // 4)
    return sequence.keys


def test_a_cell_that_an_answer_ends_has_another_key_than_one_of_a_prompt() -> None:
    """Also if it begins with a part of the prompt: its last tokens were computed one at a time."""
    whole = named(12, 12, "exact")
    for prompt in range(1, 12):
        found, full = named(prompt, 12, "exact"), prompt // 4
        assert found[:full] == whole[:full]
        assert not set(found[full:]) & set(whole), f"a prompt of {prompt} tokens"
    # Where decoding began changes the bits of a cell, too.
    assert len({named(prompt, 12, "exact")[1] for prompt in range(4, 9)}) == 5
    assert named(5, 12, None) == named(12, 12, None), "without exact mode, all that counts is the text"


# digests --------------------------------------------------------------------------------------------------------------


def test_a_digest_depends_on_every_bit_and_not_on_company() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(3))
    found = digest(logits)
    assert torch.equal(digest(logits[2:3]), found[2:3])
    assert len(set(found.tolist())) == 5
    for column in (0, 17, 999):
        changed = logits.clone()
        changed.view(torch.int32)[:, column] ^= 1
        assert not (digest(changed) == found).any()
    assert not (digest(logits.flip(-1)) == found).any()


def test_exact_answers_have_equal_digests_cold_and_after_a_hit() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logits_digest=True)
    prompt = np.random.default_rng(0).integers(3, 250, 200).tolist()
    with LLM(**tiny_model.OPTIONS, **SMALL, exact=True) as llm:
        cold, hit = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert hit.cached_tokens == 192
    assert cold.digests == hit.digests
    assert len(set(cold.digests)) == 12
    assert all(len(each) == 16 for each in cold.digests)
    with LLM(**tiny_model.OPTIONS, **SMALL) as llm:
        assert llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)[0].digests is None


def test_the_server_says_that_it_is_exact_and_returns_digests() -> None:
    with serving(ServerSettings(), exact=True, max_sequences=4) as served:
        assert served.client.get("/server_info").json()["exact"] is True
        body = {"text": "Once upon a time", "logits_digest": True, "sampling_params": {"max_new_tokens": 3}}
        first, second = (served.post("/generate", body)["meta_info"]["logits_digests"] for _ in range(2))
        assert len(first) == 3
        assert first[0] == second[0]
        asked = {"prompt": "Once", "max_tokens": 2}
        assert served.post("/v1/completions", asked)["system_fingerprint"].endswith("-exact")


# doctor ---------------------------------------------------------------------------------------------------------------


def test_doctor_compares_digests(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*tiny_model.ARGUMENTS, "--memory", "32MiB", "--threads", "1", "--max-length", "1024", "--exact"]
    assert main(["doctor", *arguments]) == 0
    text = capsys.readouterr().out
    for name in ("prefill-hit", "second turn", "in company", "in chunks"):
        assert f"{name}:" in text
    assert text.count("equal, ") == 4


@pytest.mark.thorough
def test_doctor_cuts_a_prompt_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**tiny_model.OPTIONS, **SMALL, max_tokens_per_step=512, exact=True) as llm:
        plans, launch = [], llm.engine._device.launch
        monkeypatch.setattr(llm.engine._device, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
        found = ExactTest(llm).run()["in chunks"]
    assert found.differs is None
    # The first cell of a prompt beside others, and the rest in another step.
    assert any(plan.rows > 1 and ((plan.start == 0) & (plan.end == 64)).any() for plan in plans)


def test_doctor_names_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**tiny_model.OPTIONS, **SMALL, exact=True) as llm:
        second = llm.model.model.layers[1]
        forward = type(second).forward
        calls: list[int] = []

        def drifting(self, stream, rotation, batch, views):
            forward(self, stream, rotation, batch, views)
            # Only after the first runs, which are cold.
            if self is second and batch.rows == 1 and int(batch.start[0]) == 128:
                calls.append(1)
                stream.x = stream.total() * 1.5 if len(calls) % 2 else stream.total()

        monkeypatch.setattr(type(second), "forward", drifting)
        found = ExactTest(llm)._compare([ExactTest(llm)._draw(150)], "a")
        assert found.differs == 0
        assert found.layer == 1
        assert "first after layer 1" in exact_complaints({"prefill-hit": found})[0]


# passes ---------------------------------------------------------------------------------------------------------------


def test_passes_cover_every_token_once_and_never_read_the_slot_that_they_write() -> None:
    found = exact_model("gemma3", torch.float32)
    engine, plans = exact_engine(found, max_tokens_per_step=300), []
    run = engine._device.run
    engine._device.run = lambda plan, *more: (plans.append(plan), run(plan, *more))[1]
    serve(engine, [Ask(tokens(200, 1)), Ask(tokens(129, 2)), Ask(tokens(3, 3), greedy(70))])
    assert any(plan.rows > plan.decode_rows > 0 for plan in plans)
    spec: MemorySpec = found.spec
    for plan in plans:
        passes = list(canonical_passes(plan, spec, 64, (1000, 1001)))
        assert sorted(place for each in passes for place in each.places.tolist()) == [*range(len(plan.tokens))]
        for each in passes:
            part = each.plan
            assert part.tokens.tolist() == plan.tokens[each.places].tolist()
            assert part.rows == 1 or part.decode_rows == part.rows
            assert (part.start // spec.cell == (part.end - 1) // spec.cell).all()
            read = {int(s) for s, start in zip(part.read_slot, part.start, strict=True) if start >= spec.cell}
            assert not read.intersection(part.captures.slot.tolist())
