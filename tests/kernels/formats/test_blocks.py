"""Blocks of GGUF files mean what the public reader says, to the bit, and cuts never change a number."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from weft.kernels.formats.block_types import BLOCK_TYPES, Q4_0, Q4_K, Q8_0
from weft.kernels.formats.blocks import BlockFormat, OtherInputs
from weft.kernels.formats.stored import Stored

TYPES = pytest.mark.parametrize("format", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


def random_bytes(format: BlockFormat, *outer: int, blocks: int = 3) -> Stored:
    """Bytes of a matrix whose scales are numbers."""
    generator = torch.Generator().manual_seed(len(outer) + format.bytes)
    while True:
        found = format.of(torch.randint(0, 256, (*outer, blocks * format.bytes), generator=generator).byte())
        if found.decode().isfinite().all():
            return found


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_block_is_decoded_as_the_public_reader_decodes_it(name):
    gguf = pytest.importorskip("gguf")
    kind, format = gguf.GGMLQuantizationType[name], BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (format.numbers, format.bytes)
    raw = np.random.default_rng(3).integers(0, 256, (64, 5 * format.bytes), dtype=np.uint8)
    # Scales without a number are among random bytes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(raw, kind)
    decoded = format.of(torch.from_numpy(raw)).decode().numpy()
    assert np.array_equal(decoded, expected, equal_nan=True)


@TYPES
def test_cuts_and_orders_of_outputs_are_those_of_the_numbers(format):
    stored = random_bytes(format, 6)
    numbers, index = stored.decode(), torch.tensor([4, 0, 5, 5])
    assert torch.equal(format.rows(stored, index).decode(), numbers[index])
    assert torch.equal(format.cut_rows(stored, 2, 5).decode(), numbers[2:5])
    pair = [format.cut_rows(stored, 0, 2), format.cut_rows(stored, 2, 6)]
    assert torch.equal(format.stacked(pair).decode(), numbers)


@TYPES
def test_cuts_of_inputs_are_at_blocks_or_refused(format):
    stored = random_bytes(format, 6)
    numbers, size = stored.decode(), format.numbers
    cut = format.cut_columns(stored, size, 3 * size)
    assert torch.equal(cut.decode(), numbers[:, size:])
    assert torch.equal(format.abreast([format.cut_columns(stored, 0, size), cut]).decode(), numbers)
    assert format.cut_columns(stored, 16, 16 + size) is None
    assert format.cut_columns(stored, 0, size + 16) is None


@TYPES
def test_experts_are_decoded_one_by_one(format):
    stored = random_bytes(format, 4, 6)
    assert torch.equal(stored.expert(2).decode(), stored.decode()[2])
    assert (stored.outputs, stored.inputs) == (6, 3 * format.numbers)


def test_blocks_of_two_types_are_never_one_matrix():
    parts = [random_bytes(Q4_0, 4), random_bytes(Q8_0, 4)]
    assert Q4_0.stacked(parts) is None
    assert Q8_0.abreast(parts) is None


def test_a_factor_is_refused_unless_it_is_one():
    stored = random_bytes(Q4_K, 4)
    assert Q4_K.scaled(stored, 1.0) is stored
    assert Q4_K.scaled(stored, 0.5) is None
    assert Q4_K.scaled(stored, torch.ones(4)) is None


def test_inputs_in_another_order_are_multiplied_with_activations_in_that_order():
    inner = random_bytes(Q4_K, 5, blocks=2)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    stored, x = OtherInputs.of(inner, order), torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    expected = torch.empty(5, 512)
    expected[:, order] = inner.decode()
    assert torch.equal(stored.decode(), expected)
    assert torch.equal(stored.format.rows(stored, torch.tensor([3, 1])).decode(), expected[[3, 1]])
    assert torch.equal(stored.format.cut_rows(stored, 1, 4).decode(), expected[1:4])
    as_stored = stored.format.as_stored(stored)
    torch.testing.assert_close(
        x[:, order] @ as_stored.decode().T, x @ expected.T, rtol=0, atol=1e-3 * expected.abs().max().item()
    )
    assert stored.format.cut_columns(stored, 0, 256) is None
