"""Traffic of models from GGUF files: hits, drafts, preemptions, batches and the disk change no bit of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.engines import TINY
from tests.support.models.exact_traffic import DRAFTS, ExactModel, compare_traffic
from tests.support.models.gguf_files import convert, names_of
from tests.support.models.mtp_oracle import checkpoint as mtp_checkpoint
from tests.support.models.oracle import Oracle, random_tokens
from weft import LLM, SamplingParams
from weft.cli.main import main
from weft.kernels.choosing import choose
from weft.memory.spec import MemorySpec
from weft.models.weights import load_model

WIDE = {"hidden_size": 256, "intermediate_size": 256}
# Inputs of the output projection of Qwen3.5 are in another order.
MODELS = {
    "qwen3_5": WIDE | {"linear_value_head_dim": 64},
    "lfm2_moe": WIDE | {"moe_intermediate_size": 256},
    "granite_moe_hybrid": WIDE | {"shared_intermediate_size": 256, "mamba_n_heads": 16, "mamba_d_head": 32},
}
TYPES = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q2_K", "IQ4_XS")
SETTINGS = {"memory": "32MiB", "threads": 1, "max_length": 512, "progress": False, "dtype": "float32"}


def file_of(family: str, folder: Path) -> Path:
    checkpoint = Oracle(TINY[family].variant(**MODELS[family])).save(folder / family)
    return convert(checkpoint, folder / "small.gguf", names_of(TYPES))


@pytest.mark.parametrize("family", MODELS)
def test_every_digest_is_that_of_a_lone_cold_run(family, tmp_path):
    dtype = torch.float32
    model, _ = load_model(file_of(family, tmp_path), dtype, progress=False, exact=True, activations="auto")
    chosen = choose("cpu", dtype, model.memories, exact=True, activations="auto")
    spec = MemorySpec(model.memories(chosen.operations), draft_room=DRAFTS)
    compare_traffic(ExactModel(model, spec, chosen), family, seed=1, count=3, drafts=True)


def answer(place: Path, prompt: list[int], **options: object) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(place), **{**SETTINGS, **options}) as llm:
        [found] = llm.generate(prompt, params, use_tqdm=False)
    return list(found.token_ids), found.cached_tokens


def test_drafts_of_the_files_own_head_change_no_answer(tmp_path):
    folder, file = mtp_checkpoint("qwen3_5").folder, tmp_path / "model.gguf"
    assert main(["convert", str(folder), str(file)]) == 0
    prompt = random_tokens(70, seed=9)
    expected, _ = answer(folder, prompt, draft="off")
    assert answer(file, prompt, draft="mtp")[0] == expected
    assert answer(file, prompt, draft="off")[0] == expected


@pytest.mark.thorough
def test_states_on_disk_are_found_after_a_restart_by_engines_that_round_alike(tmp_path):
    file, prompt = file_of("qwen3_5", tmp_path), random_tokens(200, seed=9)
    tier = {"disk": str(tmp_path / "tier"), "disk_size": "64MiB"}
    cold, none = answer(file, prompt, **tier)
    again, cached = answer(file, prompt, **tier)
    assert (none, cached, again) == (0, 192, cold)
    wide, cached = answer(file, prompt, activations="wide", **tier)
    assert cached == 0
    assert wide == answer(file, prompt, activations="wide")[0]


@pytest.mark.thorough
def test_ten_turns_compute_what_is_new_and_at_most_a_cell_more(tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    text, computed = random_tokens(130, seed=1), []
    with LLM(str(file_of("qwen3_5", tmp_path)), **SETTINGS) as llm:
        for turn in range(10):
            [found] = llm.generate(text, params, use_tqdm=False)
            computed.append(len(text) - found.cached_tokens)
            text = [*text, *found.token_ids, *random_tokens(20, seed=2 + turn)]
    assert computed[0] == 130
    assert max(computed[1:]) <= 12 + 20 + 64
