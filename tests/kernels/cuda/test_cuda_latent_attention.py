"""The kernels of latent attention, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.latent_attention import MIXES, SCALE, Scene, error_of
from tests.support.kernels.operations import GPU_ROWS
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda.latent_attention import LAUNCHES, attend_lines, write_latents

# Sizes of Kimi-Linear-48B-A3B.
PUBLISHED = {"heads": 32, "latent": 512, "shared_dim": 64, "key_dim": 128, "value_dim": 128}


def make_scene(rows, **options):
    return Scene(rows, operations=GPU_ROWS, **options)


@pytest.mark.parametrize("mix", MIXES)
def test_latent_attention_equals_dense_attention_with_expanded_keys_and_values(mix):
    assert error_of(make_scene(MIXES[mix])) < 1e-6


@pytest.mark.parametrize("sizes", [{"heads": 1, "latent": 7, "shared_dim": 3}, {"heads": 20, "latent": 32, "cell": 64}])
def test_sizes_may_be_odd(sizes):
    assert error_of(make_scene([(40, 41), (3, 4), (0, 5), (30, 37)], **sizes)) < 1e-6


@pytest.mark.parametrize(("shares", "lines"), [(1, 16), (2, 64), (12, 16)])
def test_the_number_of_shares_and_lines_changes_nothing(shares, lines):
    scene = make_scene([(150, 151), (0, 1), (16, 17), (90, 95)], heads=5)
    batch, launch = scene.batch(), LAUNCHES[4]._replace(lines=lines)
    write_latents(*scene.new.split([scene.latent, scene.shared_dim], 1), batch, scene.view)
    mixed = torch.full((len(scene.queries), scene.heads, scene.latent), torch.nan)
    for of_decodes in (True, False):
        absorbed = scene.weights.absorb(scene.queries)
        attend_lines(absorbed, mixed, batch, scene.view, SCALE, of_decodes, shares, launch)
    found, reference = scene.weights.expand(mixed).flatten(1), scene.dense()
    assert float((found - reference).norm() / reference.norm()) < 1e-6


def launch_bfloat16() -> None:
    scene = make_scene([(100, 101), (0, 70)], cell=64, dtype=torch.bfloat16, **PUBLISHED)
    latents, batch = torch.empty(71, 512, dtype=torch.bfloat16), scene.batch()
    write_latents(latents, latents[:, :64], batch, scene.view)
    for of_decodes in (True, False):
        queries = torch.empty(71, 32, 576, dtype=torch.bfloat16)
        attend_lines(queries, latents.expand(32, -1, -1).transpose(0, 1), batch, scene.view, SCALE, of_decodes)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [[(5000, 5001)], [(64, 65)] * 40, [(999, 1000), (63, 64), (0, 300), (777, 790)]])
def test_on_a_gpu_latent_attention_equals_dense_attention(rows, dtype, tolerance):
    assert error_of(make_scene(rows, cell=64, dtype=dtype, device="cuda", **PUBLISHED)) < tolerance
