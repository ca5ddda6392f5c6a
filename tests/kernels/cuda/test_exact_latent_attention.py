"""Latent attention of the exact package: a row has the same bits whatever is computed beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.kernels.latent_attention import Scene, error_of
from tests.support.kernels.operations import GPU_ROWS
from tests.support.models.exact_steps import EXACT
from weft.kernels.cuda.latent_attention import exact as exact_latent_attention
from weft.kernels.cuda.latent_attention.exact import multiply_by_head

gpu = pytest.mark.gpu
PUBLISHED = {"heads": 32, "latent": 512, "shared_dim": 64, "key_dim": 128, "value_dim": 128, "cell": 64}
# Decodes, then prompts that begin on the grid.
CROWD = [(70, 71), (0, 1), (16, 17), (0, 18)]


def of_one_row(scene: Scene, row: int) -> torch.Tensor:
    """The outputs of a step that has only this row, on the scene's pages."""
    lengths = [end - start for start, end in scene.rows]
    first = sum(lengths[:row])
    alone = replace(scene, rows=[scene.rows[row]])
    alone.store, alone.spec, alone.weights = scene.store, scene.spec, scene.weights
    alone.tables, alone.stored = [scene.tables[row]], [scene.stored[row]]
    alone.queries = scene.queries[first : first + lengths[row]]
    return alone.paged()


def differing(scene: Scene) -> list[int]:
    together = scene.paged().split([end - start for start, end in scene.rows])
    return [row for row, mine in enumerate(together) if not torch.equal(mine, of_one_row(scene, row))]


@pytest.mark.kernels
def test_a_row_has_the_same_bits_beside_others(monkeypatch):
    # Triton's interpreter multiplies by a library, whose bits depend on the rows of a tile on some processors.
    monkeypatch.setattr(exact_latent_attention, "MANY_ROWS", exact_latent_attention.FEW_ROWS)
    scene = Scene(CROWD, operations=EXACT)
    assert differing(scene) == []
    assert error_of(scene) < 1e-6


def test_shares_chosen_by_the_batch_would_be_seen():
    """The usual operations share the cells of few rows among more programs."""
    assert differing(Scene([(70, 71)] * 3, operations=GPU_ROWS))


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_heads_are_multiplied_with_their_own_matrices(tokens):
    x, matrices = torch.randn(tokens, 3, 40), torch.randn(3, 40, 24)
    wanted = torch.einsum("thi,hio->tho", x, matrices)
    torch.testing.assert_close(multiply_by_head(x, matrices.transpose(1, 2)), wanted)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_real_sizes_have_the_same_bits_beside_others(dtype):
    rows = [(position, position + 1) for position in (0, 63, 64, 700, 1023, 1024, 2500, *range(5, 400, 13))]
    rows += [(0, 64), (128, 300), (1024, 1500), (0, 7)]
    assert differing(Scene(rows, operations=EXACT, dtype=dtype, device="cuda", **PUBLISHED)) == []


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_of_a_token_has_the_same_bits_for_any_number_of_tokens(dtype):
    x = torch.randn(600, 32, 512, device="cuda").to(dtype)
    matrices = (torch.randn(32, 128, 512, device="cuda") / 20).to(dtype)
    wanted = multiply_by_head(x, matrices)
    for tokens in (1, 2, 16, 17, 64, 65, 300):
        assert torch.equal(multiply_by_head(x[:tokens], matrices), wanted[:tokens])
