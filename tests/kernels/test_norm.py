"""Norms equal their definition, in float32 whatever they are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.operations import ON_CPU
from weft.kernels.cpu import norm as tuned
from weft.kernels.cpu.norm import residual as Residual
from weft.kernels.cpu.norm import rms_norm, rms_norm_heads
from weft.kernels.plain import norm as plain
from weft.models.layers.norm import QueryKeyNorm, RMSNorm
from weft.models.model import sources

EPS = 1e-5


def defined(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 64), (7, 33), (2, 3, 16)])
@pytest.mark.parametrize("package", [plain, tuned])
def test_rms_norm_divides_by_the_root_mean_square(package, shape):
    x, weight = random(*shape) * 3, random(shape[-1], seed=1)
    torch.testing.assert_close(package.rms_norm(x, weight, EPS).double(), defined(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("package", [plain, tuned])
def test_half_precision_inputs_are_normed_in_float32(package, weight_dtype):
    # Squares of these overflow float16 and lose all precision in bfloat16.
    x = (random(4, 256) * 300).to(torch.bfloat16)
    weight = random(256, seed=1).to(weight_dtype)
    normed = package.rms_norm(x, weight, EPS)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), defined(x, weight), rtol=2**-7, atol=1e-3)


def test_heads_are_normed_each_for_itself():
    x, weight = random(5, 6, 16), random(6, 16, seed=1)
    normed = rms_norm_heads(x, weight, EPS)
    for head in range(6):
        torch.testing.assert_close(normed[:, head], rms_norm(x[:, head].contiguous(), weight[head], EPS))


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("package", [plain, tuned])
def test_gated_norm_gates_before_or_after_in_groups(package, gate_first, groups):
    x, gate, weight = random(5, 32), random(5, 32, seed=1), random(32, seed=2)
    gated = x * F.silu(gate) if gate_first else x
    parts = [defined(part, part_weight) for part, part_weight in zip(gated.chunk(groups, -1), weight.chunk(groups))]
    expected = torch.cat(parts, -1)
    if not gate_first:
        expected = expected * F.silu(gate).double()
    ours = package.gated_rms_norm(x, gate, weight, EPS, groups, gate_first)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_gated_norm_takes_the_dtype_of_its_gate():
    x, gate = random(3, 8), random(3, 8, seed=1).to(torch.bfloat16)
    assert tuned.gated_rms_norm(x, gate, torch.ones(8, dtype=torch.bfloat16), EPS).dtype == torch.bfloat16


def test_zero_centred_weights_are_kept_as_one_plus_them():
    norm = RMSNorm(4, EPS, zero_centred=True)
    [source] = sources(norm, "norm.")
    stored = torch.tensor([0.0, 0.001, -0.5, 1.0], dtype=torch.bfloat16)
    torch.testing.assert_close(source.transform(stored), 1 + stored.float())
    assert norm.weight.dtype == torch.float32


def test_query_and_key_norms_are_stored_apart_and_repeated_over_heads():
    norm = QueryKeyNorm(4, 2, 8)
    queries, keys = sources(norm, "layers.0.self_attn.qk_norm.")
    assert (queries.name, keys.name) == ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    assert queries.stored_shape == (8,)
    assert queries.target.shape == (4, 8)
    assert keys.target.shape == (2, 8)


def test_the_residual_stream_adds_in_order_what_blocks_give_it():
    x, first, second = random(3, 8), random(3, 8, seed=1), random(3, 8, seed=2)
    before, after = RMSNorm(8, EPS), RMSNorm(8, EPS)
    before.weight.copy_(random(8, seed=3))
    after.weight.copy_(random(8, seed=4))
    stream = Residual(x)
    torch.testing.assert_close(stream.read(before), before(x, ON_CPU))
    stream.add(first, factor=0.5)
    stream.add(second, norm=after)
    total = x + 0.5 * first + after(second, ON_CPU)
    torch.testing.assert_close(stream.read(before), before(total, ON_CPU))
    torch.testing.assert_close(stream.read(after), after(total, ON_CPU))
