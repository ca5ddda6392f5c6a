"""Pages of codes: what is written can be read back nearly, and attention over them is that over what they hold."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.kernels.coded_pages import KINDS, held, in_codes
from tests.support.kernels.cuda_attention import MIXES, Scene
from tests.support.kernels.operations import CPU, GPU_ROWS, PLAIN, attention
from weft.device.store import AttentionView, Store
from weft.kernels import pages
from weft.kernels.cpu import attention as on_cpu
from weft.kernels.cuda.attention import decode
from weft.kernels.interface import Operations
from weft.kernels.pages import BIAS, LARGEST, decoded, encoded
from weft.memory.spec import AttentionMemory, MemorySpec

OPERATIONS = {"cpu": CPU, "triton": GPU_ROWS}
HEADS = [(6, 2, 16), (4, 4, 32), (5, 1, 24), (8, 4, 80)]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_numbers_are_held_as_exactly_as_codes_can(size):
    torch.manual_seed(size)
    numbers = torch.randn(200, size) * torch.randn(200, 1).exp() ** 8
    largest = numbers.abs().amax(-1, keepdim=True)
    # Below the least normal code of FP8, codes are as far apart as they are there.
    limits = {"fp8": torch.maximum(numbers.abs() / 16, largest * 2.0**-17), "int8": largest / 127}
    for name, kind in KINDS.items():
        codes, exponents = encoded(numbers, kind)
        found = decoded(codes, exponents, torch.float32)
        assert ((found - numbers).abs() <= limits[name]).all()
        assert torch.equal(found, found.bfloat16().float())
        # The largest code lies in the upper half of the range.
        assert (codes.float().abs().amax(-1) > LARGEST[kind] / 2.25).all()
        assert torch.equal(decoded(*encoded(found, kind), torch.float32), found)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_zeros_and_what_is_no_number(kind):
    codes, exponents = encoded(torch.tensor([[0.0, 0.0], [-0.0, torch.nan], [1e-45, 0.0], [3e38, -3e38]]), kind)
    found = decoded(codes, exponents, torch.float32)
    assert torch.equal(found[0], torch.zeros(2))
    assert not found[1, 1].isfinite()
    assert found[2].isfinite().all()
    assert (exponents > 0).all()
    assert (exponents[[0, 2, 3]] < 2 * BIAS).all()
    # Nothing of a head that holds what is no number looks like one.
    for broken in (torch.nan, torch.inf, -torch.inf):
        assert not decoded(*encoded(torch.tensor([0.0, 2.0, broken, -1.0]), kind), torch.float32).isfinite().any()


def test_a_page_takes_a_byte_for_each_number_and_one_for_each_head():
    wide, *narrow = (MemorySpec((AttentionMemory(4, 128, dtype),)).page_bytes for dtype in ("bfloat16", *KINDS))
    assert [each / wide for each in narrow] == 2 * [129 / 256]
    views = Store(MemorySpec((AttentionMemory(2, 16, "fp8"), AttentionMemory(3, 8, "int8"))), 1 << 16).views
    # No two parts of a page share a byte.
    for number, view in enumerate(views):
        for part, tensor in enumerate((view.keys, view.values, view.key_exponents, view.value_exponents)):
            tensor[1].view(torch.uint8).fill_(10 * number + part + 1)
    for number, view in enumerate(views):
        for part, tensor in enumerate((view.keys, view.values, view.key_exponents, view.value_exponents)):
            assert (tensor[1].view(torch.uint8) == 10 * number + part + 1).all()
            assert (tensor[0].view(torch.uint8) == 0).all()


def check(scene: Scene, by: Operations, softcap: float | None = None, sinks: bool = False, kind: str = "fp8") -> None:
    """Attend over pages of codes, and over what they then hold."""
    stored = in_codes(scene.view(), KINDS[kind])
    sink = scene.sinks if sinks else None
    given = (scene.q, scene.k, scene.v, scene.batch(by))
    found = attention(*given, stored, scene.scale, softcap, sink)
    # New keys are read as they were written.
    (keys, _), (values, _) = (encoded(part, KINDS[kind]) for part in (scene.k, scene.v))
    token = 0
    for row, (start, end) in enumerate(scene.rows):
        for position in range(start, end):
            page = scene.plan.window_table if scene.window else scene.plan.page_table
            first = int(scene.plan.window_first[row]) if scene.window else 0
            place = int(page[row, position // scene.cell - first]), position % scene.cell
            assert torch.equal(stored.keys.view(torch.uint8)[place], keys.view(torch.uint8)[token])
            assert torch.equal(stored.values.view(torch.uint8)[place], values.view(torch.uint8)[token])
            token += 1
    wide = held(stored, scene.dtype)
    own_keys, own_values = (decoded(*encoded(x, KINDS[kind]), scene.dtype) for x in given[1:3])
    expected = attention(scene.q, own_keys, own_values, given[3], wide, scene.scale, softcap, sink)
    if by is CPU:
        assert torch.equal(found, expected)
    reference = held(stored, torch.float32)
    wanted = attention(
        scene.q.float(), own_keys.float(), own_values.float(), scene.batch(PLAIN), reference, scene.scale, softcap,
        None if sink is None else sink.float(),
    )  # fmt: skip
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", OPERATIONS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("window", "kind"), [(None, "fp8"), (17, "int8"), (None, "int8"), (17, "fp8")])
def test_attention_over_codes_is_that_over_what_they_hold(by, mix, window, kind):
    check(Scene(MIXES[mix], window, device="cpu"), OPERATIONS[by], 2.0 if window else None, sinks=True, kind=kind)


@pytest.mark.kernels
@pytest.mark.parametrize("by", OPERATIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_may_have_any_number_and_size(by, heads, kind):
    rows = [(40, 41), (3, 4), (0, 18), (30, 45)]
    names = dict(zip(("heads", "kv_heads", "head_dim"), heads))
    check(Scene(rows, device="cpu", **names), OPERATIONS[by], kind=kind)


@pytest.mark.parametrize("by", ["cpu"])
def test_other_dtypes(by):
    for dtype, kind in itertools.product((torch.bfloat16, torch.float16), KINDS.values()):
        scene = Scene(MIXES["decodes and prompts"], device="cpu", dtype=dtype)
        stored = in_codes(scene.view(), kind)
        found = attention(scene.q, scene.k, scene.v, scene.batch(OPERATIONS[by]), stored, scene.scale)
        wide = held(stored, dtype)
        k, v = (decoded(*encoded(x, kind), dtype) for x in (scene.k, scene.v))
        expected = attention(scene.q, k, v, scene.batch(OPERATIONS[by]), wide, scene.scale)
        assert torch.equal(found, expected)


def check_sizes(kind: torch.dtype) -> None:
    """Decodes multiply codes in float16, whatever the sizes of queries and of values are."""
    scene = Scene([(50, 51), (15, 16)], heads=4, head_dim=32, device="cpu", dtype=torch.bfloat16)
    torch.manual_seed(0)
    numbers = scene.store[:, 2].shape[:3]
    scene.store[:, 2] *= (torch.randint(-40, 40, numbers) * (torch.rand(numbers) < 0.5)).float().exp2().unsqueeze(-1)
    scene.store[:, 2, 3] = 0
    found = []
    for power in (2.0**-60, 2.0**60):
        stored = in_codes(scene.view(), kind)
        given = scene.q * power, scene.k, scene.v, scene.batch(GPU_ROWS), stored, scene.scale / power
        found.append(attention(*given, None, scene.sinks))
    assert torch.equal(found[0], found[1])
    k, v = (decoded(*encoded(each, kind), torch.float32) for each in (scene.k, scene.v))
    given = scene.q.float(), k, v, scene.batch(PLAIN), held(stored, torch.float32), scene.scale
    wanted = attention(*given, None, scene.sinks.float())
    assert ((found[0] - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) / 128).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_queries_and_values_may_have_any_size(kind):
    check_sizes(kind)


# Planted bugs --------------------------------------------------------------------------------------------------------


def read_new_keys_before_they_are_rounded(patch: pytest.MonkeyPatch) -> None:
    """As where prompts attend to what was projected, and only later steps to pages."""
    written: dict[int, tuple[torch.Tensor, ...]] = {}

    def put(view: AttentionView, index: tuple[torch.Tensor | int, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        pages.put(view, index, k, v)
        written[id(view)] = (*(torch.as_tensor(each).view(-1) for each in index), k, v)

    def take(view: AttentionView, index: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        found = pages.take(view, index, dtype)
        for page, place, *new in zip(*written[id(view)]):
            for part, own in zip(found, new):
                part[index == page, place] = own.to(dtype)
        return found

    patch.setattr(on_cpu, "put", put)
    patch.setattr(on_cpu, "take", take)


def take_the_power_of_the_largest_head(patch: pytest.MonkeyPatch) -> None:
    def encoded_together(numbers: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        codes, exponents = encoded(numbers, kind)
        return codes, exponents.amax(-1, keepdim=True).expand_as(exponents)

    patch.setattr(pages, "encoded", encoded_together)


@pytest.mark.parametrize("plant", [read_new_keys_before_they_are_rounded, take_the_power_of_the_largest_head])
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(Scene(MIXES["prompts"], device="cpu"), CPU)


def test_weights_that_are_too_large_for_float16_are_noticed(monkeypatch):
    """Without the powers of values in the peak of scores."""
    monkeypatch.setattr(decode, "rise_of", lambda powers: powers * 0)
    with pytest.raises(AssertionError):
        check_sizes(KINDS["fp8"])


def test_queries_that_are_too_large_for_float16_are_noticed(monkeypatch):
    powers_of = decode.in_float16
    monkeypatch.setattr(decode, "in_float16", lambda q: (q.to(decode.tl.float16), powers_of(q)[1] * 0 + 1))
    with pytest.raises(AssertionError):
        check_sizes(KINDS["int8"])
