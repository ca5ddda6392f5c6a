"""Numbers as blocks of GGUF files: what the public tools read from them, and how far it is from the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from weft.kernels.formats.block_types import BLOCK_TYPES, six_bit_scales
from weft.kernels.formats.block_writers import six_bits_packed

# The most that is lost of normal numbers, as a share of their size. Rounding alone loses about as much.
LOST = {"Q8_0": 0.006, "Q4_0": 0.09, "Q4_K": 0.075, "Q5_K": 0.038, "Q6_K": 0.019}


def numbers() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(48, 512, generator=generator) * torch.logspace(-6, 6, 48, 2)[:, None]


@pytest.mark.parametrize("name", LOST)
def test_blocks_are_near_to_the_numbers_for_every_reader(name):
    given = numbers()
    found = BLOCK_TYPES[name].encode(given)
    theirs = quants.dequantize(found.tensors[0].numpy(), GGMLQuantizationType[name])
    assert np.array_equal(found.decode().numpy(), theirs)
    lost = (found.decode() - given).norm(dim=-1) / given.norm(dim=-1)
    assert lost.mean() < LOST[name]
    assert lost.max() < 1.3 * LOST[name]


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_blocks_of_32_are_those_of_the_public_tools(name):
    found = BLOCK_TYPES[name].encode(numbers()).tensors[0].numpy()
    assert np.array_equal(found, quants.quantize(numbers().numpy(), GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-30])
def test_blocks_of_one_number_are_that_number(name, value):
    found = BLOCK_TYPES[name].encode(torch.full((2, 256), value)).decode()
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, torch.full((2, 256), value), rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize("name", LOST)
def test_numbers_of_blocks_become_the_same_blocks_in_any_shape(name):
    given = numbers()
    whole = BLOCK_TYPES[name].encode(given).tensors[0]
    experts = BLOCK_TYPES[name].encode(given.view(4, 12, 512)).tensors[0]
    assert torch.equal(experts.view(48, -1), whole)


def test_scales_and_minima_of_six_bits_are_found_again():
    generator = torch.Generator().manual_seed(5)
    scales, least = (torch.randint(0, 64, (9, 8), generator=generator) for _ in range(2))
    found = six_bit_scales(six_bits_packed(scales, least))
    assert torch.equal(found[0].int(), scales.int())
    assert torch.equal(found[1].int(), least.int())
