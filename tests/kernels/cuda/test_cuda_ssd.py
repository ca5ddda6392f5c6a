"""The state space kernels of a GPU: small and odd on Triton's interpreter, real sizes on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.cuda_ssd import SHORT_LENGTHS, SHORT_STEPS, make_rig
from tests.support.kernels.operations import CPU, GPU_ROWS, ssd, ssd_memory
from tests.support.kernels.plans import Rig, Row, make_plan
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import Store
from weft.kernels.cuda import ssd as cuda_ssd
from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.launch.arguments import short_tokens
from weft.kernels.cuda.ssd import short as ssd_short
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch


def assert_nothing_else_is_written(rig: Rig) -> None:
    """All memory but the captured states and the tails of sequences is as it was."""
    owned = [Store(rig.spec, len(store.buffer)) for store in (rig.states, rig.tails)]
    for store in owned:
        store.buffer.fill_(0xFF)
    for sequence in rig.sequences:
        for slot in sequence.slots.values():
            owned[0].views[0].state["ssm"][slot] = 0.0
        for name in ("input", "B", "dt", "decay"):
            owned[1].views[0].tail[name][sequence.tail] = 0.0
    for store, mine in zip((rig.states, rig.tails), owned, strict=True):
        assert (store.buffer.cpu()[mine.buffer == 0xFF] == 0xFF).all()


@pytest.mark.parametrize(("groups", "room"), [(1, 0), (2, 3)])
def test_packed_rows_of_any_length_equal_the_loop(groups, room):
    rig = make_rig([50, 33, 16, 7, 1], heads=2, groups=groups, room=room, cell=16)
    rig.run([1, 2, 3, 5, 16, 17, 40])


@pytest.mark.kernels
def test_heads_that_blocks_do_not_divide_equal_the_loop():
    # A block of columns may end behind a head, and, of decodes, touch several.
    for head_dim, dtype in ((80, torch.float16), (24, torch.float16), (48, torch.float32)):
        rig = make_rig([40, 20], heads=3, head_dim=head_dim, groups=1, dtype=dtype, cell=16)
        rig.tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        rig.run([1, 20, 30])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("state", "groups", "dtype"), [(24, 1, torch.float32), (24, 2, torch.float16), (5, 2, torch.float32)]
)
def test_states_of_any_size_equal_the_loop_and_touch_nothing_else(state, groups, dtype):
    rig = make_rig([50, 33, 16, 1], heads=2, state=state, groups=groups, dtype=dtype, room=3, cell=16)
    rig.tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    rig.run([1, 2, 5, 16, 17, 40])
    assert_nothing_else_is_written(rig)


def test_time_steps_of_raw_projections_equal_the_reference():
    rig = make_rig([40, 20], heads=2, groups=1, raw=True, limit=(0.01, 6.0), cell=16)
    rig.tolerance = 1e-4
    rig.run([1, 2, 20])


def test_strong_decay_neither_overflows_nor_leaks():
    rig = make_rig([40, 20], heads=2, groups=1, dt_scale=200.0, cell=16)
    rig.tolerance = 1e-4
    rig.run([1, 3, 18])


def test_rejected_drafts_leave_no_trace():
    """A block of columns touches two heads; rows close their cells, and are refused on either side of the end."""
    rig = make_rig([37, 30], heads=4, head_dim=40, state=20, groups=2, raw=True, room=7, cell=16)
    rig.tolerance = 1e-4
    rig.step([(0, 14), (1, 1)])
    rig.run_with_drafts(8)
    assert_nothing_else_is_written(rig)


@pytest.mark.parametrize(
    ("groups", "state", "dtype"), [(1, 16, torch.float32), (2, 24, torch.float16), (1, 136, torch.float32)]
)
def test_short_rows_equal_the_loop_wherever_they_end(groups, state, dtype, monkeypatch):
    launched = []
    monkeypatch.setattr(cuda_ssd, "short_tokens", lambda *call: launched.append(short_tokens(*call)) or launched[-1])
    rig = make_rig([90, 75, 66, 12], heads=2, groups=groups, state=state, dtype=dtype, cell=64, room=7)
    rig.tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    rig.step([(0, 60), (1, 57), (2, 64), (3, 1)])
    assert launched == [0], "rows are longer on average"
    # To the end of a cell, beyond it, up to a token before it, and from the start of a sequence or of a cell.
    rig.step([(0, 4), (1, 6), (2, 2), (3, 8)])
    rig.step([(0, 8), (1, 2), (3, 3)])
    rig.run([5, 4])
    assert set(launched[1:]) == {16}
    assert_nothing_else_is_written(rig)


def test_padding_beside_rows_of_drafts_has_outputs_of_zero(monkeypatch):
    make_rig([4, 3, 2, 20], heads=2, groups=1, cell=16, room=7).step_with_padding(longest=4)
    # A kernel that leaves padding to another one is noticed if it runs alone.
    launch = cuda_ssd.launch_short
    monkeypatch.setattr(cuda_ssd, "launch_short", lambda *call: launch(*call[:-1], False))
    with pytest.raises(AssertionError):
        make_rig([4, 3, 2, 20], heads=2, groups=1, cell=16, room=7).step_with_padding(longest=4)


def test_short_rows_are_computed_once(monkeypatch):
    """Without the kernel for short rows nothing is written where the others leave them out."""
    monkeypatch.setattr(cuda_ssd, "short_kernel", defaultdict(lambda: lambda *group, **sizes: None))
    rig = make_rig([30, 30], heads=2, groups=1, cell=16)
    rig.step([(0, 16), (1, 20)])
    with pytest.raises(AssertionError):
        rig.step([(0, 3), (1, 3)])


def test_short_rows_close_their_cells_where_they_read_them(monkeypatch):
    def close() -> None:
        rig = make_rig([20, 20], heads=2, head_dim=40, groups=1, cell=16, room=7)
        rig.tolerance = 1e-4
        rig.step([(0, 14), (1, 9)])
        rig.step([(0, 4), (1, 4)])

    close()
    monkeypatch.setattr(ssd_short, "close_short", lambda *call: None)
    with pytest.raises(AssertionError):
        close()


def test_a_row_of_nan_stays_alone():
    rig = make_rig([40, 35, 20], heads=2, groups=1, skip=False, cell=16)
    for tensor in (*rig.sequences[0].inputs, *rig.sequences[0].outputs, *rig.sequences[0].states.values()):
        tensor.fill_(float("nan"))
    rig.compare = lambda found, answer, what: torch.testing.assert_close(
        found[~answer.isnan()], answer[~answer.isnan()], rtol=2e-5, atol=2e-5, msg=what
    )
    rig.run([1, 2, 18])


def states_at_the_grid(pieces: Sequence[tuple[int, int]], cell: int = 16, **options: Any) -> Tensor:
    """The states that a sequence leaves if it is read in pieces (in 16ths of a cell), each beside another row."""
    spans = [(start * cell // 16, end * cell // 16) for start, end in pieces]
    rig = make_rig([spans[-1][1], 99], seed=7, cell=cell, **options)
    rig.tolerance = 5e-2
    rig.wanted = lambda start, end: list(range(start - start % cell + cell, end + 1, cell))
    for start, end in spans:
        rig.step([(0, end - start), (1, 3)])
    slots = rig.sequences[0].slots
    return torch.stack([rig.view.state["ssm"][slots[position]] for position in sorted(slots)])


CUTS = [[(0, 16), (16, 48), (48, 70)], [(0, 5), (5, 7), (7, 36), (36, 70)]]


@pytest.mark.parametrize(("spans", "state"), [(CUTS[0], 24), (CUTS[1], 16)])
def test_states_have_the_same_bits_however_a_prefill_is_cut(spans, state):
    sizes = {"heads": 2, "groups": 1, "head_dim": 20, "state": state}
    assert torch.equal(states_at_the_grid(spans, **sizes), states_at_the_grid([(0, 70)], **sizes))


def compare_with_gating_afterwards(rig: Rig) -> None:
    """Make every step run twice, with a gate that is a slice of a wider product and without, and compare all of it."""
    plain, buffers = rig.call, (rig.states.buffer, rig.tails.buffer)
    generator = torch.Generator().manual_seed(1)

    def both(inputs: tuple[Tensor, ...], batch, view) -> tuple[Tensor, ...]:
        before = [buffer.clone() for buffer in buffers]
        [y] = plain(inputs, batch, view)
        after = [buffer.clone() for buffer in buffers]
        for buffer, kept in zip(buffers, before):
            buffer.copy_(kept)
        flat = y.flatten(1)
        wide = torch.randn(len(y), flat.shape[1] + 7, generator=generator) * 4
        gate = wide.to(y.device, y.dtype)[:, 3:-4]
        gated = activate("silu", gate, flat) if rig.operations is GPU_ROWS else CPU.gated_product(gate, flat, F.silu)
        [found] = plain(inputs, batch, view, gate)
        assert torch.equal(found, gated.view_as(y))
        assert all(map(torch.equal, buffers, after))
        return (y,)

    rig.call = both


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gate_inside_gives_the_bits_of_one_afterwards(dtype):
    for head_dim, operations in ((5, GPU_ROWS), (48, GPU_ROWS), (5, CPU)):
        rig = make_rig(SHORT_LENGTHS, heads=3, head_dim=head_dim, groups=1, dtype=dtype, cell=16, operations=operations)
        rig.tolerance = 2e-5 if dtype == torch.float32 else 5e-2
        compare_with_gating_afterwards(rig)
        for rows in SHORT_STEPS:
            rig.step(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes",
    [
        (16, 80, 128, 2),
        (8, 64, 128, 1),
        (4, 128, 256, 1),
        (4, 24, 16, 2),
        (8, 16, 24, 2),
        (8, 64, 96, 1),
        (4, 64, 200, 1),
    ],
)
def test_real_sizes_equal_the_loop_on_the_device(dtype, sizes):
    rig = make_rig([200, 150, 64, 33, 1], *sizes, dtype=dtype, device="cuda", cell=64, room=4, raw=True)
    rig.tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    rig.run([1, 1, 2, 7, 64, 65, 128])
    assert_nothing_else_is_written(rig)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(16, 80, 128, 2), (4, 128, 256, 1), (4, 24, 16, 2)])
def test_a_gate_inside_gives_the_bits_of_one_afterwards_on_the_device(dtype, sizes):
    rig = make_rig([200, 150, 64, 33, 1], *sizes, dtype=dtype, device="cuda", cell=64, room=4, raw=True)
    rig.tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    compare_with_gating_afterwards(rig)
    rig.run([1, 1, 2, 7, 64, 65, 128])


@pytest.mark.gpu
@pytest.mark.parametrize("spans", CUTS)
def test_states_have_the_same_bits_on_the_device(spans):
    sizes = {"heads": 8, "groups": 2, "head_dim": 80, "state": 128}
    sizes |= {"dtype": torch.bfloat16, "device": "cuda", "cell": 64}
    assert torch.equal(states_at_the_grid(spans, **sizes), states_at_the_grid([(0, 70)], **sizes))


def launch_few() -> None:
    """Every kernel in both types, with a gate and with a state that is padded."""
    launch(torch.bfloat16, heads=24, head_dim=128, state=256, groups=1, gated=True)
    launch(torch.float32, heads=8, head_dim=16, state=24, groups=2)


def launch_more() -> None:
    launch(torch.bfloat16, heads=128, head_dim=80, state=128, groups=8)
    launch(torch.float32, heads=4, head_dim=24, state=16, groups=2)
    launch(torch.float32, heads=4, head_dim=128, state=256, groups=1)
    launch(torch.bfloat16, heads=8, head_dim=16, state=24, groups=2)
    launch(torch.bfloat16, heads=8, head_dim=64, state=96, groups=2)


def launch_drafts() -> None:
    launch(torch.bfloat16, heads=128, head_dim=80, state=128, groups=8, rows=[Row(70, 74), Row(3, 6)], room=7)


def launch_wide_drafts() -> None:
    launch(torch.bfloat16, heads=128, head_dim=80, state=128, groups=8, rows=[Row(70, 74), Row(3, 6)])
    launch(torch.bfloat16, heads=24, head_dim=128, state=256, groups=1, rows=[Row(70, 74), Row(3, 6)], room=7)
    launch(torch.float32, heads=8, head_dim=16, state=24, groups=2, rows=[Row(70, 74), Row(3, 6)], room=7)


def launch_wide_drafts_in_float32() -> None:
    launch(torch.float32, heads=24, head_dim=128, state=256, groups=1, rows=[Row(70, 74), Row(3, 6)], room=7)


LONG_ROWS = [Row(70, 71), *(Row(70, 71) for _ in range(99)), Row(3, 300)]


def launch(
    dtype: torch.dtype, heads: int, head_dim: int, state: int, groups: int, gated: bool = False,
    rows: Sequence[Row] = LONG_ROWS, room: int = 0,
) -> None:  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    spec = MemorySpec((ssd_memory(heads, head_dim, state, groups, 1, 2, name, by=GPU_ROWS),), draft_room=room)
    view = Store(spec, 2 * max(spec.state_bytes, spec.tail_bytes)).views[0]
    plan = make_plan(list(rows))
    batch = build_batch(plan, spec, torch.zeros(1, dtype=torch.int64), "cpu", GPU_ROWS)
    tokens = batch.tokens
    mixed = torch.empty(tokens, heads * head_dim + 2 * groups * state, dtype=dtype)
    x, B, C = mixed.split_with_sizes([heads * head_dim, groups * state, groups * state], 1)
    A, D, bias = torch.empty(3, heads)
    gate = torch.empty(tokens, heads * head_dim + 8, dtype=dtype)[:, 8:] if gated else None
    ssd(
        x.view(-1, heads, head_dim), torch.empty(tokens, heads, dtype=dtype), A, B.view(-1, groups, state),
        C.view(-1, groups, state), D, batch, view, bias, gate=gate,
    )  # fmt: skip


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_few)
    assert_compiles(launch_drafts, in_registers=True)


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_of_other_sizes_compile_for_sm_90():
    assert_compiles(launch_more, launch_wide_drafts)
    assert_compiles(launch_wide_drafts_in_float32, in_registers=True)
