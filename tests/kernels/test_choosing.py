"""Who computes what: every package keeps to the interface, the choice has reasons, and any choice answers alike."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

import pytest
import torch

from tests.support.fences import ROOT
from tests.support.kernels.operations import CPU, GPU, NATIVE, PLAIN
from tests.support.models.engines import FAMILIES, TINY, Ask, dummy_model, greedy, model_of, seeded, serve, tokens
from weft.base.config import EngineConfig
from weft.base.errors import OptionError
from weft.engine.loop import Engine
from weft.kernels import choosing
from weft.kernels.choosing import DECODES, GROUPS, UNUSED, assemble, choose, chosen_everywhere
from weft.kernels.interface import Operations
from weft.kernels.native import library
from weft.kernels.native.limits import MOST_SIZE
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.runner import Runner

PACKAGES = ("plain", "cpu", "cuda")
needs_compiler = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


def declared() -> set[str]:
    return {name for name, member in vars(Operations).items() if inspect.isfunction(member) and name[0] != "_"}


def test_every_operation_of_the_interface_belongs_to_one_group():
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == declared()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_package_keeps_to_the_signatures_of_the_interface(package, group):
    module = import_module(f"weft.kernels.{package}.{group}")
    for name in GROUPS[group]:
        wanted = list(inspect.signature(getattr(Operations, name)).parameters.values())[1:]
        found = list(inspect.signature(getattr(module, name)).parameters.values())
        assert [p.name for p in found][: len(wanted)] == [p.name for p in wanted], name
        # What one has more is its own affair, and optional; what may be left out may be left out everywhere.
        assert all(p.default is not p.empty for p in found[len(wanted) :]), name
        for mine, theirs in zip(found, wanted):
            assert theirs.default is theirs.empty or mine.default == theirs.default, f"{name}: {mine.name}"


def test_a_cpu_without_a_compiler_says_so_for_every_operation_that_has_kernels(monkeypatch):
    monkeypatch.setattr(library, "why_not", lambda dtype: "there is no compiler")
    chosen = choose("cpu", torch.float32, lambda operations: ())
    assert chosen.all_by("cpu")
    reasons = {choice.group: choice.reason for choice in chosen.choices}
    assert reasons["ssd"] == reasons["linear"] == "no C++: there is no compiler"
    assert len(chosen.summary()) == 2


@needs_compiler
def test_a_group_that_is_too_large_for_its_kernels_is_left_to_pytorch_alone():
    chosen = choose("cpu", torch.float32, lambda operations: (AttentionMemory(1, MOST_SIZE + 1, "float32"),))
    packages = {choice.group: choice for choice in chosen.choices}
    assert packages["attention"].package == "cpu"
    assert str(MOST_SIZE + 1) in packages["attention"].reason
    assert {packages[group].package for group in DECODES if group != "attention"} == {"native"}


@needs_compiler
def test_a_group_that_no_layer_needs_has_that_as_its_reason():
    reasons = {
        choice.group: choice.reason for choice in choose("cpu", torch.float32, model_of("lfm2").memories).choices
    }
    assert {group for group in DECODES if reasons[group] == UNUSED} == {
        "latent_attention",
        "ssd",
        "gated_delta",
        "channel_delta",
    }
    assert all("compiled by" in reasons[group] for group in ("attention", "causal_conv", "together"))


def test_a_device_without_kernels_of_its_own_gets_the_plain_package_and_a_reason(monkeypatch):
    chosen = choose("mps", torch.float32, lambda operations: ())
    assert chosen.all_by("plain")
    assert "mps" in chosen.choices[0].reason
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    assert "Triton is not installed" in choose("cuda", torch.float32, lambda operations: ()).choices[0].reason


def test_gpus_of_other_makers_and_old_ones_get_the_plain_package_and_a_reason(monkeypatch):
    monkeypatch.setattr(choosing, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    chosen = choose("cuda", torch.bfloat16, lambda operations: ())
    assert chosen.all_by("plain")
    assert "ROCm" in chosen.choices[0].reason
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    chosen = choose("cuda", torch.bfloat16, lambda operations: ())
    assert chosen.all_by("plain")
    assert "a T4 has (7, 5)" in chosen.choices[0].reason


def test_kernels_that_cannot_be_imported_are_a_reason_and_no_end(monkeypatch):
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a GPU")
    assert choose("cuda:0", torch.float32, lambda operations: ()).all_by("cuda")
    load = choosing.import_module

    def broken(name: str):
        if ".cuda." in name:
            raise ImportError("cannot import name 'knobs' from 'triton'")
        return load(name)

    monkeypatch.setattr(choosing, "import_module", broken)
    chosen = choose("cuda", torch.float32, lambda operations: ())
    assert chosen.all_by("plain")
    assert "knobs" in chosen.choices[0].reason


@pytest.mark.parametrize("family", ["kimi_linear", "llama"])
def test_exact_answers_on_a_gpu_are_refused_by_name_where_a_kernel_has_no_exact_form(family, monkeypatch):
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a GPU")
    assert choose("cuda", torch.bfloat16, model_of(family).memories, exact=True).are_recorded
    with pytest.raises(OptionError, match=r"exact answers are not available: .*float32"):
        choose("cuda", torch.float32, model_of(family).memories, exact=True)


def test_operations_of_a_cpu_are_refused_on_other_devices():
    for operations in (CPU, NATIVE):
        choosing.check_device(operations, "cpu")
        with pytest.raises(ValueError, match="cannot run on cuda:0"):
            choosing.check_device(operations, "cuda:0")
    choosing.check_device(PLAIN, "cuda")


def test_kernels_that_failed_are_not_chosen_again():
    chosen = choose("cuda", torch.bfloat16, lambda operations: (), refused="the driver said no")
    assert chosen.all_by("plain")
    assert chosen.summary() == [f"plain PyTorch (the driver said no): {', '.join(GROUPS)}"]


# Whole models --------------------------------------------------------------------------------------------------------

ASKS = [
    Ask(tokens(70, seed=1), greedy(6)),
    Ask(tokens(3, seed=2), seeded(9, seed=3, top_p=0.9, top_k=20)),
    # A hit behind the first cell, beside decodes.
    Ask([*tokens(66, seed=1), *tokens(5, seed=4)], greedy(5), step=3),
]


def answers(family: str, operations: Operations, asks: Sequence[Ask] = ASKS):
    model, memory = model_of(family, operations=operations), 16 << 20
    spec = MemorySpec(model.memories(operations))
    config = EngineConfig(memory_bytes=memory, max_sequences=4, max_tokens_per_step=48, max_length=128, paranoid=True)
    runner = Runner(model, spec, memory, config.max_sequences, threads=1, operations=operations)
    return serve(Engine(spec, runner, config), list(asks))


def assert_alike(found, wanted) -> None:
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
        assert mine.report.cached_tokens == theirs.report.cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_definitions_answer_as_tuned_operations_do(family):
    wanted = answers(family, CPU)
    assert wanted[2].report.cached_tokens == 64
    assert_alike(answers(family, PLAIN), wanted)


@needs_compiler
@pytest.mark.parametrize("plain", ["attention", "ssd", "causal_conv"])
def test_packages_can_be_mixed(plain):
    """Falcon-H1 has all three kinds. Where a group is computed by another package, nothing else notices."""
    packages = {group: "native" if group in DECODES else "cpu" for group in GROUPS}
    mixed = assemble(packages | {plain: "cpu" if plain == "ssd" else "plain"})
    assert_alike(answers("falcon_h1", mixed), answers("falcon_h1", NATIVE))


@pytest.mark.parametrize("family", ["lfm2", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_the_kernels_of_a_gpu_answer_as_tuned_operations_do(family):
    """All of them, on Triton's interpreter: a prompt, decodes of one row and of two, a draw."""
    asks = [Ask(tokens(5, seed=1), greedy(3)), Ask(tokens(2, seed=2), seeded(2, seed=3, top_k=20))]
    assert_alike(answers(family, GPU, asks), answers(family, CPU, asks))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_moe"])
def test_the_kernels_of_a_gpu_answer_as_tuned_operations_do_behind_a_hit(family):
    assert_alike(answers(family, GPU), answers(family, CPU))


@pytest.mark.thorough
def test_the_plain_package_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None
from weft.kernels.choosing import everywhere
everywhere("plain"), everywhere("cpu")
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["falcon_h1", "kimi_linear", "qwen3_next", "gemma3", "lfm2_moe"])
def test_a_gpu_without_kernels_runs_plain_definitions(family):
    """As where Triton is not installed: the same answers as on a CPU."""
    spec, memory = MemorySpec(model_of(family).memories(PLAIN)), 16 << 20
    config = EngineConfig(memory_bytes=memory, max_sequences=4, max_tokens_per_step=48, max_length=128, paranoid=True)
    operations = chosen_everywhere("plain", "Triton is hidden").operations
    runner = Runner(
        dummy_model(TINY[family], operations=PLAIN).to("cuda"),
        spec,
        memory,
        config.max_sequences,
        "cuda",
        1,
        operations,
    )
    assert_alike(serve(Engine(spec, runner, config), ASKS), answers(family, CPU))
