"""Latent attention equals dense attention with expanded keys and values, by every package."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.latent_attention import MIXES, Scene, error_of
from tests.support.kernels.operations import CPU, PLAIN
from weft.kernels.cpu import attention
from weft.kernels.cpu.paged_reads import SharedRead
from weft.memory.spec import AttentionMemory

each_package = pytest.mark.parametrize("operations", [PLAIN, CPU], ids=["plain", "cpu"])


@each_package
@pytest.mark.parametrize("mix", MIXES)
def test_latent_attention_equals_dense_attention_with_expanded_keys_and_values(mix, operations):
    assert error_of(Scene(MIXES[mix], operations=operations)) < 1e-6


@each_package
@pytest.mark.parametrize(
    "sizes", [{"heads": 1, "latent": 7, "shared_dim": 3}, {"heads": 5, "value_dim": 1, "key_dim": 2}]
)
def test_sizes_may_be_odd(sizes, operations):
    assert error_of(Scene([(40, 41), (3, 4), (0, 18), (30, 45)], operations=operations, **sizes)) < 1e-6


@each_package
def test_a_page_holds_the_latent_and_the_shared_key_of_each_token_and_nothing_else(operations):
    scene = Scene([(10, 20)], operations=operations)
    memory = scene.spec.memories[1]
    assert memory.bytes_per_token == (scene.latent + scene.shared_dim) * 4
    scene.paged()
    written = torch.cat([scene.view.keys[page, :, 0] for page in scene.tables[0]])
    assert torch.equal(written[:20], scene.stored[0])
    assert written[20:].isnan().all()
    assert scene.view.values.data_ptr() == scene.view.keys.data_ptr()
    # The layer before is as it was.
    assert scene.store.views[0].keys.isnan().all()


def test_files_of_models_without_latents_stay_valid():
    """The fingerprint of a model contains this text."""
    stored = "AttentionMemory(kv_heads=2, head_dim=8, dtype='float32', window=None)"
    assert repr(AttentionMemory(2, 8, "float32")) == stored


def test_a_common_beginning_is_read_once_for_all_decodes(monkeypatch):
    planned = []
    plan_reads = attention.plan_reads
    monkeypatch.setattr(attention, "plan_reads", lambda *given: planned.extend(found := plan_reads(*given)) or found)
    assert error_of(Scene([(100, 101), (80, 81), (70, 71)], common=4)) < 1e-6
    assert [type(read) for read in planned] == [SharedRead]


@each_package
def test_the_result_may_be_written_between_other_columns(operations):
    scene = Scene(MIXES["decodes and prompts"], operations=operations)
    wide = torch.full((len(scene.queries), scene.heads * scene.value_dim + 7), torch.nan)
    found = scene.paged(wide[:, 5:-2])
    assert torch.equal(found, wide[:, 5:-2])
    assert wide[:, :5].isnan().all()
    assert wide[:, -2:].isnan().all()
    assert torch.allclose(found.double(), scene.dense(), atol=1e-5)
