"""GPU kernels that keep states in fewer bits: codes match the definition, and states are rounded at every border.

Under the interpreter a kernel has the bits of the same kernel over float32 whose rows end at every border, where the
definition rounds its states. Compiled for a GPU, the two may add in another order.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import GPU_ROWS
from tests.support.kernels.plans import Row, make_plan
from tests.support.kernels.small_states import RULES, Twins
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import Store
from weft.kernels.cuda import gated_delta, ssd
from weft.kernels.cuda.launch import arguments
from weft.kernels.cuda.recurrent import closing
from weft.kernels.cuda.recurrent.closing import encoded, scaled
from weft.kernels.states import LEAST, decoded
from weft.kernels.states import encoded as defined
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

STORED = ("int8", "bfloat16")
REAL = [
    ("ssd", (8, 80, 128, 2)),
    ("ssd", (4, 64, 256, 1)),
    ("gated_delta", (4, 128, 8, 128)),
    ("channel_delta", (4, 128, 128)),
]


@pytest.fixture
def no_short_rows(monkeypatch):
    """No kernels of their own for rows of a few tokens, which add in another order."""
    for module in (gated_delta, ssd):
        monkeypatch.setattr(module, "short_tokens", lambda *step: 0)


# Codes ---------------------------------------------------------------------------------------------------------------


@triton.jit
def encode(values, codes, scales, read, LINES: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = tl.arange(0, LINES)[:, None] * WIDTH + column[None, :]
    found, scale = encoded(tl.load(values + inside), BLOCKS)
    tl.store(codes + inside, found.to(tl.int8))
    tl.store(scales + tl.arange(0, BLOCKS)[:, None] * WIDTH + column[None, :], scale)
    tl.store(read + inside, scaled(found, scale))


def check_codes(lines: int, device: str, columns: int = 64) -> None:
    torch.manual_seed(lines)
    state = torch.randn(lines, columns) * torch.randn(1, columns).exp() ** 8
    # Between two codes: a scale of 1, and of a power of two.
    state[:, 0], state[0, 0] = torch.arange(lines) - lines / 2 + 0.5, 127.0
    state[:, 1] = state[:, 0] / 64
    state[:, 2], state[1, 3], state[2, 4] = 0.0, torch.nan, torch.inf
    state[:, 5] = LEAST * torch.randn(lines) * 100
    state[:, 6] = 2.0**-140 * torch.randn(lines)
    blocks = max(1, lines // 32)
    codes, scales = torch.empty(lines, columns, dtype=torch.int8), torch.empty(blocks, columns, dtype=torch.bfloat16)
    placed = [each.to(device) for each in (state, codes, scales, torch.empty_like(state))]
    encode[(1,)](*placed, lines, columns, blocks)
    _, codes, scales, read = (each.cpu() for each in placed)
    expected_codes, expected_scales = defined(state)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales.nan_to_num(7.0), expected_scales.nan_to_num(7.0))
    assert torch.equal(read.nan_to_num(7.0), decoded(codes, scales).nan_to_num(7.0))


@pytest.mark.parametrize("lines", [16, 32, 64, 128, 256])
def test_codes_are_those_of_the_definition(lines):
    check_codes(lines, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("lines", [16, 32, 64, 128, 256])
def test_codes_on_a_gpu_are_those_of_the_definition(lines):
    check_codes(lines, "cuda")


# Rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_short_rows")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_is_that_of_float32_cut_and_rounded_at_every_border(rule, stored):
    Twins(RULES[rule](), GPU_ROWS, stored, [40]).run([40])


@pytest.mark.kernels
@pytest.mark.usefixtures("no_short_rows")
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", RULES)
def test_rows_of_any_length_are_those_of_float32_cut_and_rounded_at_every_border(rule, stored, room):
    Twins(RULES[rule](), GPU_ROWS, stored, [52, 40, 33], room=room).run([1, 3, 5, 16, 40])
    Twins(RULES[rule](), GPU_ROWS, stored, [36, 18], room=room).run([1])


@pytest.mark.kernels
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", ["gated_delta", "ssd"])
def test_short_rows_are_those_of_float32_cut_and_rounded_at_every_border(rule, stored, many, monkeypatch):
    """Up to the end of a cell, from there on, beyond it; closed where they are read, or apart."""
    if many:
        monkeypatch.setattr(gated_delta, "MANY_ROWS", 0)
    rows = Twins(RULES[rule](), GPU_ROWS, stored, [40, 37, 26], room=7, tolerance=2e-4)
    rows.step([(0, 12), (1, 14), (2, 10)])
    rows.step([(0, 4), (1, 7), (2, 3)])
    rows.step([(0, 5), (1, 2), (2, 4)])
    rows.run([1, 4, 6])


@pytest.mark.kernels
@pytest.mark.usefixtures("no_short_rows")
@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("ssd", (3, 30, 37, 1)),
        ("ssd", (2, 16, 128, 1)),
        ("gated_delta", (1, 70, 2, 81)),
        ("channel_delta", (1, 67, 33)),
    ],
)
def test_states_of_several_sizes(rule, sizes):
    Twins(RULES[rule](*sizes), GPU_ROWS, "int8", [40, 18]).run([1, 16, 24])


@pytest.mark.gpu
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("rule", "sizes"), REAL)
def test_rows_at_real_sizes_on_a_gpu(rule, sizes, stored, dtype, room):
    """Sums are taken in another order, so a code may differ by one."""
    rows = Twins(
        RULES[rule](*sizes), GPU_ROWS, stored, [300, 200, 140, 64], cell=64, room=room, dtype=dtype,
        tolerance=0.1 if dtype == torch.bfloat16 else 0.02, device="cuda",
    )  # fmt: skip
    rows.step([(0, 130), (1, 60), (2, 126), (3, 1)])
    rows.step([(0, 4), (1, 4), (2, 4), (3, 5)])
    rows.run([1, 1, 2, 5, 64, 65, 130])


# Planted bugs --------------------------------------------------------------------------------------------------------


@triton.jit
def capture_unrounded(state, state_stride, slot, inside, values, real, scales=None, ACROSS: tl.constexpr = False):
    closing.capture(state, state_stride, slot, inside, values, real, scales, ACROSS)
    return values


@triton.jit
def walk_unrounded(
    state, state_stride, slot, values, column, LINES: tl.constexpr, WIDTH: tl.constexpr, scales=None
):  # fmt: skip
    closing.capture_halves(state, state_stride, slot, values, column, LINES, WIDTH, scales)
    return values


def leave_borders_inside_a_prompt_unrounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(import_module("weft.kernels.cuda.ssd.extend"), "capture", capture_unrounded)
    for name in ("gated_delta.walk", "channel_delta.extend"):
        patch.setattr(import_module(f"weft.kernels.cuda.{name}"), "capture_halves", walk_unrounded)


def let_short_rows_cross_a_border(patch: pytest.MonkeyPatch) -> None:
    for module in (arguments, ssd):
        patch.setattr(module, "is_rounded", lambda view: False)


PLANTS = {
    leave_borders_inside_a_prompt_unrounded: ("gated_delta", "ssd", "channel_delta"),
    let_short_rows_cross_a_border: ("gated_delta", "ssd"),
}


@pytest.mark.parametrize(("plant", "rule"), [(plant, rule) for plant, rules in PLANTS.items() for rule in rules])
def test_a_planted_bug_is_caught(plant, rule, monkeypatch):
    sizes = {"ssd": (2, 4, 16, 1), "gated_delta": (1, 16, 1, 4), "channel_delta": (1, 16, 4)}[rule]
    lengths = [3, 3] if plant is let_short_rows_cross_a_border else [6]

    def run() -> None:
        rows = Twins(RULES[rule](*sizes), GPU_ROWS, "bfloat16", [6], cell=4, room=3, tolerance=2e-4)
        for length in lengths:
            rows.step([(0, length)])

    run()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()


# Compiled ------------------------------------------------------------------------------------------------------------


def launch(rule: str, sizes: tuple[int, ...], stored: str, dtype: torch.dtype, rows: list[Row], room: int = 0) -> None:
    made = RULES[rule](*sizes)
    name = str(dtype).removeprefix("torch.")
    spec = MemorySpec((made.memory(GPU_ROWS, stored, name),), draft_room=room)
    view = Store(spec, 2 * max(spec.state_bytes, spec.tail_bytes)).views[0]
    batch = build_batch(make_plan(rows), spec, torch.zeros(1, dtype=torch.int64), "cpu", GPU_ROWS)
    inputs = tuple(torch.empty_like(each) for each in made.inputs(batch.tokens, dtype))
    made.call(inputs, batch, view)


MIXED = [Row(70, 71, 0), Row(0, 80)]


def launch_int8() -> None:
    launch("gated_delta", (16, 128, 32, 128), "int8", torch.bfloat16, MIXED)
    launch("ssd", (128, 80, 128, 8), "int8", torch.bfloat16, MIXED)
    launch("channel_delta", (32, 128, 128), "int8", torch.bfloat16, MIXED)


def launch_drafts() -> None:
    for stored in STORED:
        for rows in ([Row(70, 74, 0), Row(0, 3)], [Row(70, 74, 0)] * gated_delta.MANY_ROWS):
            launch("gated_delta", (16, 128, 32, 128), stored, torch.bfloat16, rows, room=7)
        launch("ssd", (128, 80, 128, 8), stored, torch.bfloat16, [Row(70, 74, 0), Row(0, 3)], room=7)


def launch_bfloat16() -> None:
    launch("gated_delta", (16, 128, 32, 128), "bfloat16", torch.bfloat16, MIXED)
    launch("ssd", (128, 80, 128, 8), "bfloat16", torch.bfloat16, MIXED)
    launch("channel_delta", (32, 128, 128), "bfloat16", torch.bfloat16, MIXED)


def launch_other_sizes() -> None:
    launch("gated_delta", (4, 192, 8, 96), "int8", torch.bfloat16, MIXED)
    launch("gated_delta", (16, 128, 32, 128), "int8", torch.float32, MIXED)
    launch("gated_delta", (16, 128, 32, 128), "int8", torch.bfloat16, [Row(70, 71, 0)] * 40)
    launch("ssd", (24, 128, 256, 1), "int8", torch.bfloat16, MIXED)
    launch("ssd", (8, 16, 24, 2), "int8", torch.float32, MIXED)
    launch("channel_delta", (2, 32, 32), "int8", torch.float32, MIXED)


@pytest.mark.kernels
@pytest.mark.parametrize("launched", [launch_int8, launch_bfloat16, launch_drafts])
def test_kernels_compile_for_sm_90(launched):
    assert_compiles(launched)


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_of_other_sizes_compile_for_sm_90():
    assert_compiles(launch_other_sizes)
