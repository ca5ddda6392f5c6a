"""Rotary embeddings: every variant has the public implementation's frequencies, and turning is a rotation."""

from __future__ import annotations

import math

import pytest
import torch

from weft.base.errors import ModelError
from weft.kernels.cpu.rotary import make_rotation, rotate
from weft.kernels.rotary import RotaryKind, amplitude, frequencies
from weft.models.config import Config

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
SPELLINGS = {
    "default": {"rope_type": "default", "rope_theta": 20000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, not truncated, other ramp": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": YARN | {"attention_factor": 1.7},
    "yarn, two scales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, large theta": YARN | {"rope_theta": 1e6, "factor": 1.0},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_frequencies_and_amplitude_equal_the_public_implementation(name):
    transformers = pytest.importorskip("transformers")
    settings = SPELLINGS[name]
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(settings))
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    kind = Config(SIZES | {"rope_parameters": settings}).rotary()
    torch.testing.assert_close(frequencies(kind), reference.inv_freq, rtol=1e-6, atol=0)
    assert amplitude(kind) == pytest.approx(reference.attention_scaling)


@pytest.mark.parametrize("name", SPELLINGS)
def test_old_and_new_spellings_mean_the_same(name):
    settings = dict(SPELLINGS[name])
    new = Config(SIZES | {"rope_parameters": settings}).rotary()
    theta, kind = settings.pop("rope_theta"), settings.pop("rope_type")
    old = Config(SIZES | {"rope_theta": theta, "rope_scaling": settings | {"type": kind}}).rotary()
    assert old == new


def test_scaling_of_null_is_no_scaling():
    assert Config(SIZES | {"rope_theta": 1e6, "rope_scaling": None}).rotary() == RotaryKind(32, 1e6)


def test_sections_for_several_axes_are_plain_rotation_for_text():
    settings = {"rope_type": "mrope", "rope_theta": 1e7, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}
    kind = Config(SIZES | {"rope_parameters": settings}).rotary(partial=0.25, axes=True)
    assert (kind.variant, kind.theta, kind.size) == ("default", 1e7, 8)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kind", ["", "Moe"])
def test_scales_apply_beside_sections_as_in_the_public_implementation(name, kind):
    transformers = pytest.importorskip("transformers")
    settings = SPELLINGS[name] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    sizes = SIZES | {"head_dim": 32}
    config = getattr(transformers, f"Qwen3_5{kind}TextConfig")(**sizes, rope_parameters=dict(settings))
    package = getattr(transformers.models, f"qwen3_5{'_moe' if kind else ''}")
    module = getattr(package, f"modeling_qwen3_5{'_moe' if kind else ''}")
    reference = getattr(module, f"Qwen3_5{kind}TextRotaryEmbedding")(config)
    found = Config(sizes | {"rope_parameters": settings}).rotary(partial=0.25, axes=True)
    torch.testing.assert_close(frequencies(found), reference.inv_freq, rtol=1e-6, atol=0)
    assert amplitude(found) == pytest.approx(reference.attention_scaling)
    cosine, sine = reference(torch.zeros(1), torch.arange(50)[None])
    turned = make_rotation(torch.arange(50), frequencies(found), amplitude(found), torch.float32)
    torch.testing.assert_close(turned.cosine[:, 0], cosine[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(turned.sine[:, 0, 8:], sine[0, :, 8:], rtol=0, atol=1e-5)


def test_layer_types_have_their_own_rotation():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = Config(SIZES | {"rope_parameters": nested})
    assert config.rotary("full_attention").theta == 1e6
    assert config.rotary("sliding_attention").theta == 1e4


def test_an_unknown_variant_is_an_error_that_names_it():
    with pytest.raises(ModelError, match="spiral"):
        Config(SIZES | {"rope_scaling": {"type": "spiral"}}).rotary()


def test_turning_equals_complex_multiplication():
    kind = RotaryKind(16)
    positions = torch.tensor([0, 1, 77, 5000])
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, make_rotation(positions, frequencies(kind), 1.0, torch.float32))
    angle = positions.double()[:, None, None] * frequencies(kind).double()
    number = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned.double(), torch.cat((number.real, number.imag), -1), rtol=0, atol=1e-3)
    torch.testing.assert_close(turned[0], x[0])


def test_scores_depend_on_distance_alone():
    frequency = frequencies(RotaryKind(16))
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> float:
        turn = [make_rotation(torch.tensor([p]), frequency, 1.0, torch.float32) for p in (query_at, key_at)]
        return float((rotate(q, turn[0]) * rotate(k, turn[1])).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-2)


def test_dimensions_behind_the_rotary_part_pass():
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    rotation = make_rotation(torch.tensor([5, 9]), frequencies(RotaryKind(4)), 1.0, torch.float32)
    turned = rotate(x, rotation)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4], rotation))


def test_amplitude_scales_cosines_and_sines():
    rotation = make_rotation(torch.tensor([0]), frequencies(RotaryKind(4)), math.pi, torch.float32)
    torch.testing.assert_close(rotation.cosine, torch.full((1, 1, 4), math.pi))
