"""Norms of a residual stream that are left to whoever reads them, as one row on a GPU does it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compiled import assert_compiles
from tests.test_cuda_short_conv import Case, assert_close
from tests.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda import linear as on_gpu
from weft.kernels.cuda import short_conv
from weft.kernels.cuda.linear_one import one_row
from weft.kernels.cuda.vectors import Vectors
from weft.kernels.linear import activated_linear, linear, unread
from weft.kernels.norm import Change, Reading, add_and_norm, can_wait, whole
from weft.models.layers import residual
from weft.models.layers.norm import RMSNorm
from weft.models.layers.residual import Residual

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-5


def some(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def made(size: int, dtype: torch.dtype = torch.float16, device: str = "cpu", changed: bool = True) -> Reading:
    x, value = (some(1, size, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    scale = 1 + some(size, seed=3, device=device) / 4
    return Reading(x, Change(value, 0.5) if changed else None, scale, EPS)


def computed(reading: Reading) -> tuple[Tensor, Tensor]:
    """The sum and its norm, as a kernel of their own has them."""
    changes = [] if reading.change is None else [reading.change]
    return add_and_norm(reading.x, changes, reading.weight, EPS)


def assert_left(reading: Reading, total: Tensor, normed: Tensor) -> None:
    torch.testing.assert_close(reading.total, total, rtol=0, atol=0)
    torch.testing.assert_close(reading.norm, normed, rtol=2e-3, atol=2e-3)


# A stream ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["nobody", "tensor", "product", "two"])), max_size=6))
def test_a_stream_tells_the_same_whoever_computes_its_norms(blocks):
    """Blocks add so many changes, one of them normed, and what the stream then offers is read in some way or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "can_wait", lambda x, changes: len(changes) <= 1 and not any_normed(changes))
        size, weight = 32, some(5, 32, seed=9)
        norm, own = RMSNorm(size, EPS), RMSNorm(size, EPS)
        norm.weight.copy_(some(size, seed=7))
        own.weight.copy_(some(size, seed=8))
        offered, plain = (Residual(some(1, size, seed=0)) for _ in range(2))
        for number, (changes, reader) in enumerate(blocks):
            for seed in range(changes):
                change = some(1, size, seed=10 * number + seed)
                for stream in (offered, plain):
                    stream.add(change, 0.5, own if seed == 1 else None)
            reading, normed = offered.offer(norm), plain.read(norm)
            if reader == "tensor":
                torch.testing.assert_close(whole(reading), normed)
            if reader in ("product", "two"):
                torch.testing.assert_close(product(reading, weight), F.linear(normed, weight), rtol=1e-4, atol=1e-5)
            if reader == "two":
                torch.testing.assert_close(whole(reading), normed)
        torch.testing.assert_close(offered.read(own), plain.read(own))


def any_normed(changes: list[Change]) -> bool:
    return any(change.weight is not None for change in changes)


def product(x: Tensor | Reading, weight: Tensor) -> Tensor:
    return one_row(x, weight) if isinstance(x, Reading) else F.linear(x, weight)


def test_only_one_row_on_a_gpu_is_left_to_its_readers():
    assert not can_wait(some(1, 8, seed=0), [])


@pytest.mark.gpu
def test_what_a_product_cannot_add_is_added_before():
    x = some(1, 8, seed=0, device="cuda")
    change, weight = Change(x), some(8, seed=1, device="cuda")
    assert can_wait(x, [])
    assert can_wait(x, [change])
    assert not can_wait(x.repeat(2, 1), [])
    assert not can_wait(x, [change, change])
    assert not can_wait(x, [Change(x, 1.0, weight, EPS)]), "a norm of its own"
    assert not can_wait(x, [Change(x.unsqueeze(0))]), "parts to be added up"


# Who computes it -----------------------------------------------------------------------------------------------------


def test_the_first_product_computes_it_if_it_is_small():
    small, narrow, wide = (
        torch.empty(rows, size, dtype=torch.float16, device="meta")
        for rows, size in ((64, 4096), (16384, 2048), (16384, 4096))
    )
    readings = {size: made(size) for size in (2048, 4096)}
    assert on_gpu.can_norm(readings[4096], small)
    assert on_gpu.can_norm(readings[2048], narrow)
    assert not on_gpu.can_norm(readings[4096], wide)


def test_whoever_comes_later_reads_what_the_first_left():
    reading, weight = made(64), some(16, 64, seed=5, dtype=torch.float16)
    total, normed = computed(reading)
    wanted = F.linear(normed.float(), weight.float())
    for _ in range(2):
        torch.testing.assert_close(linear(reading, weight).float(), wanted, rtol=2e-2, atol=2e-2)
        # Whoever computed it anew would find this.
        reading.x = torch.full_like(reading.x, float("nan"))
    gate, up = wanted.chunk(2, -1)
    activated = activated_linear(reading, weight, None, F.silu, 2)
    torch.testing.assert_close(activated.float(), F.silu(gate) * up, rtol=2e-2, atol=2e-2)
    assert unread(reading, weight) is reading.norm
    assert_left(reading, total, normed)
    with pytest.raises(AssertionError):
        reading.leave()


def test_a_large_product_has_it_computed_before(monkeypatch):
    reading, weight = made(64), some(16, 64, seed=5, dtype=torch.float16)
    total, normed = computed(reading)
    monkeypatch.setattr(on_gpu, "NORMING", 0)
    assert torch.equal(unread(reading, weight), normed)
    assert torch.equal(reading.summed(), total)


# Kernels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("by", [None, Vectors(1, 1), Vectors(4, 2)])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 2), (1040, 14), (3000, 6)])
def test_a_product_of_it_is_that_of_the_norm(device, inputs, outputs, by, changed):
    """With more pieces than are loaded at once, too, and with outputs and inputs that fill none."""
    weight = some(outputs, inputs, seed=4, dtype=torch.float16, device=device) / inputs**0.5
    bias = some(outputs, seed=5, dtype=torch.float16, device=device)
    for activation, parts, added in ((None, 1, None), ("relu2", 1, bias), ("silu", 2, bias)):
        reading = made(inputs, device=device, changed=changed)
        total, normed = computed(reading)
        found, wanted = (one_row(x, weight, added, activation, parts, by) for x in (reading, normed))
        torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)
        assert_left(reading, total, normed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 3, 7, 8])
@pytest.mark.parametrize(("inputs", "channels"), [(80, 7), (1040, 5)])
def test_a_short_convolution_of_it_is_that_of_the_norm(device, inputs, channels, first):
    case, reading = Case(1, inputs, channels, 3, device=device, bias=True, first=first), made(inputs, device=device)
    total, normed = computed(reading)
    assert short_conv.suits(reading, case.projection, case.batch.lanes)
    views, outcomes = [case.view(), case.view()], []
    for case.x, view in zip((reading, normed), views):
        outcomes.append(case.together(view))
    assert_close(*outcomes, *views, tolerance=5e-3)
    assert_left(reading, total, normed)


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 32), (2048, 12352), (2880, 32), (4096, 1536)])
def test_a_product_of_real_size_is_that_of_the_norm(inputs, outputs):
    weight = some(outputs, inputs, seed=4, dtype=torch.bfloat16, device="cuda") / inputs**0.5
    for activation, parts in ((None, 1), ("silu", 2)):
        reading = made(inputs, torch.bfloat16, "cuda")
        total, normed = computed(reading)
        found, wanted = (one_row(x, weight, None, activation, parts) for x in (reading, normed))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(reading.total, total, rtol=0, atol=0)
        torch.testing.assert_close(reading.norm, normed, rtol=1e-2, atol=1e-2)


def launch() -> None:
    for inputs, outputs in ((2048, 32), (2048, 3072), (2048, 16384), (2880, 32), (4096, 1536)):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
        one_row(made(inputs, torch.bfloat16), weight)
        one_row(made(inputs, torch.bfloat16, changed=False), weight)
        one_row(made(inputs, torch.bfloat16), weight, torch.empty(outputs, dtype=torch.bfloat16), "silu", 2)
    case = Case(1, 2048, 2048, 3, torch.bfloat16)
    case.x = made(2048, torch.bfloat16)
    case.together(case.view())


def test_kernels_compile_for_sm_90():
    assert_compiles(launch, in_registers=True)
