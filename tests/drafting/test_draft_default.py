"""Drafts are on by default: answers stay the same, and what was not asked for is never an error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.clocks import Ticks
from tests.support.models import tiny_model
from tests.support.models.mtp_oracle import checkpoint
from weft import LLM, SamplingParams
from weft.base.errors import InvalidOption, ModelError, OptionError
from weft.base.options import Options, draft_tokens
from weft.kernels import choosing
from weft.memory.capacity import least_bytes, longest_alone
from weft.start import exact_costs, loading
from weft.start.exact_costs import Cost

# The second continues the first, and the last repeats itself.
PROMPTS = (
    "Tell me a story about a cat.",
    "Tell me a story about a cat. Once upon a time, there was a little girl",
    "one two three four five six one two three four five six one two three",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_options_give_the_answers_without_drafts(dtype: str) -> None:
    """Of weft-small, to the token, with as many drafts as there can be."""
    # In bfloat16 one at a time: with more tokens than one row verifies, some CPUs multiply in another way.
    together = len(PROMPTS) if dtype == "float32" else 1
    options = Options(dtype=dtype, memory=64 << 20, threads=1, max_length=512)
    with LLM.from_options(replace(options, draft="off"), progress=False) as plain:
        wanted = [answers(plain, temperature, together) for temperature in (0.0, 0.8)]
    with LLM.from_options(options, progress=False, now=Ticks()) as default:
        assert default.config.draft == "suffix"
        for _ in range(2):
            # The second time, the answers are known from the first.
            assert [answers(default, temperature, together) for temperature in (0.0, 0.8)] == wanted
        assert default.engine.planner.drafting.counts.accepted.total() > 50


def answers(llm: LLM, temperature: float, together: int) -> list[list[int]]:
    found = []
    for first in range(0, len(PROMPTS), together):
        params = [SamplingParams(max_tokens=24, temperature=temperature, seed=first + n) for n in range(together)]
        found += llm.generate(list(PROMPTS[first : first + together]), params, use_tqdm=False)
    return [list(result.token_ids) for result in found]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has every library, on which exact answers cost nothing; nothing is run on it."""
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(loading, "device_name", lambda device: "cpu" if device == "cpu" else "a GPU")
    costs = {("a GPU", family): Cost("a model", "today", 0.0, 0.0, 0.0, 0.0) for family in ("qwen3_5_text", "qwen3_5")}
    monkeypatch.setattr(exact_costs, "COSTS", costs)


@pytest.mark.parametrize(
    ("given", "device", "exact", "draft"),
    [
        # Exact answers are decided first, as if drafts cost nothing; then what drafts can be.
        ({}, "cuda", True, "off"),
        ({}, "cpu", False, "suffix"),
        ({"exact": True}, "cuda", True, "off"),
        ({"exact": True}, "cpu", True, "suffix"),
        ({"exact": False}, "cuda", False, "mtp"),
        ({"tensor_parallel": 2}, "cuda", False, "suffix"),
        ({"tensor_parallel": 2}, "cpu", False, "suffix"),
        # What was asked for wins.
        ({"draft": "off"}, "cuda", True, "off"),
        ({"draft": "suffix"}, "cuda", False, "suffix"),
        ({"draft": "mtp"}, "cuda", False, "mtp"),
        ({"draft": "suffix", "exact": True}, "cuda", True, "suffix"),
        ({"draft": "off", "exact": False}, "cpu", False, "off"),
        ({"remote": "s3://bucket"}, "cuda", True, "off"),
    ],
)
def test_drafts_and_exact_answers_are_decided_together(
    given: dict, device: str, exact: bool, draft: str, gpu: None
) -> None:
    folder = checkpoint("qwen3_5").folder
    options = loading.decided(Options(model=str(folder), **given), folder, device, torch.bfloat16)
    assert (options.exact, options.draft) == (exact, draft)
    # No combination that was decided is refused later.
    assert (draft_tokens(options, device) > 0) == (draft != "off")


def test_what_was_asked_for_is_still_refused_where_it_does_not_work(gpu: None) -> None:
    folder = checkpoint("qwen3_5").folder
    options = Options(model=str(folder), draft="mtp", exact=True)
    with pytest.raises(InvalidOption, match="must be suffix or off with exact on a GPU"):
        draft_tokens(loading.decided(options, folder, "cuda", torch.bfloat16), "cuda")
    with pytest.raises(InvalidOption, match="tensor_parallel must be 1 with draft"):
        Options(draft="mtp", tensor_parallel=2)


def test_memory_that_is_too_small_for_drafts_turns_them_off_unless_they_were_asked_for() -> None:
    open_llm = partial(LLM, **tiny_model.OPTIONS, threads=1, max_sequences=1, max_length=64, progress=False)
    with open_llm(draft="off", memory="16MiB") as llm:
        least = least_bytes(llm.engine.ledger.spec)
    with open_llm(memory=least) as llm:
        assert (llm.config.draft, llm.config.draft_tokens, llm.engine.planner.drafting) == ("off", 0, None)
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    with pytest.raises(OptionError, match="this model needs at least"):
        open_llm(draft="suffix", memory=least)


def test_drafts_take_no_memory_from_the_length_that_was_asked_for() -> None:
    open_llm = partial(LLM, **tiny_model.OPTIONS, threads=1, max_sequences=1, progress=False)
    with open_llm(draft="off", memory="16MiB") as llm:
        spec = llm.engine.ledger.spec
    memory = least_bytes(spec)
    while longest_alone(spec, memory) < 4096:
        memory += 4096
    with open_llm(memory=memory, max_length=4096) as llm:
        assert (llm.config.draft, llm.config.max_length) == ("off", 4096)
    with open_llm(memory=memory, max_length=64) as llm:
        assert llm.config.draft == "suffix"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ModelError("does not fit")])
def test_a_head_without_memory_gives_way_to_suffixes_unless_it_was_asked_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(options: Options, *parts: object) -> None:
        if options.draft == "mtp":
            raise error

    monkeypatch.setattr(loading, "load_drafter", load)
    monkeypatch.setattr(loading, "chosen_draft", lambda *_: ("mtp", "there is a head"))
    open_llm = partial(LLM, **tiny_model.OPTIONS, threads=1, progress=False)
    with open_llm() as llm:
        assert llm.config.draft == "suffix"
    with pytest.raises(type(error)):
        open_llm(draft="mtp")


def test_an_error_names_the_least_memory_without_drafts() -> None:
    with pytest.raises(OptionError) as caught:
        LLM(**tiny_model.OPTIONS, memory=4096, progress=False)
    with pytest.raises(OptionError) as without:
        LLM(**tiny_model.OPTIONS, memory=4096, draft="off", progress=False)
    assert str(caught.value) == str(without.value)


def test_a_start_on_a_cpu_does_not_look_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_head", lambda *_: pytest.fail("a head is of no use here"))
    assert loading.chosen_draft(Options(), Path(), "cpu")[0] == "suffix"


def test_engines_with_roles_have_no_head_by_default(gpu: None) -> None:
    """A decode engine has no hidden states of prompts that another engine computed; the form of both is the same."""
    folder = checkpoint("qwen3_5").folder
    options = Options(model=str(folder), exact=False)
    assert loading.decided(options, folder, "cuda", torch.bfloat16, disaggregated=True).draft == "suffix"
    assert loading.decided(options, folder, "cuda", torch.bfloat16).draft == "mtp"


def test_kernels_of_a_drafter_that_fail_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own kernels run, so the model must not fall back to plain operations."""

    def compile_once(model: object, *parts: object, drafter: bool = False) -> None:
        if drafter:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(loading, "compile_once", compile_once)
    monkeypatch.setattr(loading, "device_name", lambda device: "a GPU")
    with LLM(**tiny_model.OPTIONS, threads=1, memory="16MiB", progress=False) as llm:
        model, operations = llm.engine._device.model, llm.engine._device.operations
        with pytest.raises(ModelError, match=r"drafts cannot be computed on a GPU: .*no such instruction"):
            loading.measure(model, model, operations, Options(draft="mtp"))
