"""The gated delta rule's kernels: against the loop over tokens in Triton's interpreter, at real sizes on a GPU."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.gated_delta import naive_delta
from tests.support.kernels.operations import GPU_ROWS, gated_delta, gated_delta_memory, projected_gated_delta
from tests.support.kernels.plans import Capture, Known, Rig, Row, make_plan
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import RecurrentView, Store
from weft.kernels.cuda import gated_delta as cuda_gated_delta
from weft.kernels.cuda.gated_delta import FEW_ROWS, MANY_ROWS
from weft.kernels.cuda.gated_delta import short as gated_delta_short
from weft.kernels.interface import Batch
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Key heads, key dim, value heads, value dim.
SMALL = (1, 6, 2, 5)
REAL = (16, 128, 32, 128)


def random_inputs(tokens: int, sizes, dtype, decay=0.3) -> tuple[Tensor, ...]:
    key_heads, key_dim, value_heads, value_dim = sizes
    q, k = (torch.randn(tokens, key_heads, key_dim).to(dtype) for _ in range(2))
    v, beta = torch.randn(tokens, value_heads, value_dim).to(dtype), torch.rand(tokens, value_heads).to(dtype)
    return q, k, v, (-torch.rand(tokens, value_heads) * decay).to(dtype), beta


def make_memory(sizes, dtype):
    key_heads, key_dim, value_heads, value_dim = sizes
    name = NAMES[dtype]
    return gated_delta_memory(key_heads, key_dim, value_heads, value_dim, 3, 4, name, by=GPU_ROWS)


def make_rig(lengths, sizes=SMALL, dtype=torch.float32, seed=0, decay=0.3, device="cpu", **options) -> Rig:
    torch.manual_seed(seed)
    sequences = []
    for n in lengths:
        inputs = random_inputs(n, sizes, dtype, decay)
        y, states = naive_delta(*inputs)
        sequences.append(Known(inputs, (y,), {"delta": states}))

    def call(inputs, batch, view):
        return (gated_delta(*inputs, batch, view),)

    return Rig(make_memory(sizes, dtype), sequences, call, seed=seed, operations=GPU_ROWS, device=device, **options)


class Bench:
    """One layer's memory at real sizes, and steps through it on whatever rows a test likes."""

    def __init__(self, sizes, dtype, units: int, device: str, room: int = 0) -> None:
        self.spec = MemorySpec((make_memory(sizes, dtype),), draft_room=room)
        bytes_needed = units * max(self.spec.state_bytes, self.spec.tail_bytes)
        # A checkpoint and a tail of the same number would share bytes in one buffer.
        self.stores = [Store(self.spec, bytes_needed, device) for _ in range(2)]
        for store in self.stores:
            store.buffer.fill_(0xFF)
        self.view = RecurrentView(self.stores[0].views[0].state, self.stores[1].views[0].tail)
        self.device = device

    def batch(self, rows: list[Row], captures: list[Capture] = ()) -> Batch:
        board = torch.zeros(1, dtype=torch.int64, device=self.device)
        return build_batch(make_plan(rows, captures), self.spec, board, self.device, GPU_ROWS)


def relative(found: Tensor, answer: Tensor) -> float:
    return float((found.double() - answer.double()).norm() / answer.double().norm())


@pytest.mark.parametrize("room", [0, 3])
def test_packed_rows_of_any_length_equal_the_loop(room):
    rig = make_rig([33, 24, 8, 7, 1], room=room, seed=room)
    rig.run([1, 2, 5, 8, 9, 16, 27])


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [(3, 6, 3, 18), (2, 6, 6, 5)])
def test_several_key_heads_equal_the_loop(sizes):
    rig = make_rig([12, 9], sizes)
    rig.run([1, 3, 9])


@pytest.mark.kernels
def test_full_cells_of_64_equal_the_loop():
    rig = make_rig([200, 128, 64, 5], (1, 16, 2, 16), cell=64, decay=0.05)
    rig.run([1, 7, 64, 65, 128])


@pytest.mark.kernels
def test_cells_of_32_equal_the_loop():
    rig = make_rig([80, 64], (1, 16, 1, 16), cell=32, decay=0.05)
    rig.run([7, 32, 65])


@pytest.mark.kernels
@pytest.mark.parametrize("room", [0, 3])
def test_tails_weighed_some_tokens_at_a_time_equal_the_loop(monkeypatch, room):
    monkeypatch.setattr("weft.kernels.cuda.gated_delta.FEW_ROWS", 0)
    rig = make_rig([100, 20, 3], (1, 16, 2, 16), cell=64, decay=0.05, room=room)
    rig.step([(0, 60), (1, 15), (2, 1)])
    rig.run([1, 1, 1, 16, 40])


def test_padding_beside_rows_of_drafts_has_outputs_of_zero(monkeypatch):
    make_rig([4, 3, 2, 12], cell=16, room=7).step_with_padding(longest=4)
    # A kernel that leaves padding to another one is noticed if it runs alone.
    launch = cuda_gated_delta.launch_short
    monkeypatch.setattr(cuda_gated_delta, "launch_short", lambda *call: launch(*call[:-1], False))
    with pytest.raises(AssertionError):
        make_rig([4, 3, 2, 12], cell=16, room=7).step_with_padding(longest=4)


@pytest.mark.parametrize(("dtype", "many"), [(torch.float32, False), (torch.float16, False), (torch.float32, True)])
def test_short_rows_equal_the_loop_wherever_they_end(monkeypatch, dtype, many):
    if many:
        monkeypatch.setattr(cuda_gated_delta, "MANY_ROWS", 0)
    launched, launch = [], cuda_gated_delta.launch_short
    monkeypatch.setattr(cuda_gated_delta, "launch_short", lambda *call: launched.append(call[4]) or launch(*call))
    # Of three value heads of a key, four are computed.
    rig = make_rig([90, 75, 66, 12], (1, 16, 3 if many else 2, 16), dtype, cell=64, decay=0.05, room=7)
    rig.tolerance = rig.tolerance if dtype == torch.float32 else 2e-2
    rig.step([(0, 60), (1, 57), (2, 64), (3, 1)])
    assert launched == [], "rows are longer on average"
    # To the end of a cell, beyond it, up to a token before it, and from the start of a sequence or of a cell.
    rig.step([(0, 4), (1, 6), (2, 2), (3, 8)])
    rig.step([(0, 8), (1, 2), (3, 3)])
    rig.run([5, 4])
    assert set(launched) == {8}


@pytest.mark.kernels
def test_short_rows_that_end_two_cells_capture_both_states():
    rig = make_rig([20, 20, 20], cell=4, room=7, seed=3)
    rig.step([(0, 3), (1, 3), (2, 2)])
    # Rows 0 and 1 end two cells, row 2 only one.
    rig.step([(0, 7), (1, 8), (2, 4)], {1: 5})
    rig.run_with_drafts(8)


@pytest.mark.kernels
def test_each_of_many_short_rows_that_end_a_cell_is_captured(monkeypatch):
    """Programs look at two rows at a time, and each of two turns closes several rows."""
    monkeypatch.setattr(cuda_gated_delta, "MANY_ROWS", 0)
    monkeypatch.setattr(cuda_gated_delta, "ROWS_PER_CLOSING", 4)
    monkeypatch.setattr(gated_delta_short, "LOOK", tl.constexpr(2))

    def end_cells() -> None:
        rig = make_rig([12] * 7, room=7)
        rig.step([(row, 4) for row in range(7)])
        rig.step([(0, 4), (1, 3), (2, 6), (3, 5), (4, 2), (5, 8), (6, 7)], {3: 4})

    end_cells()
    nothing = defaultdict(lambda: lambda *groups, **constants: None)
    monkeypatch.setattr(cuda_gated_delta, "close_short", nothing)
    with pytest.raises(AssertionError, match="delta at 8"):
        end_cells()


def test_short_rows_are_computed_once(monkeypatch):
    """Without the kernel for short rows nothing is written where the others leave them out."""
    monkeypatch.setattr(cuda_gated_delta, "launch_short", lambda *call: None)
    rig = make_rig([20, 20], cell=16)
    rig.step([(0, 16), (1, 12)])
    with pytest.raises(AssertionError):
        rig.step([(0, 3), (1, 3)])


def test_strong_decay_neither_overflows_nor_leaks():
    rig = make_rig([19, 12], decay=300.0)
    rig.run([1, 5, 12])


def test_equal_keys_are_solved_without_cancellation():
    torch.manual_seed(0)
    q, k, v, g, beta = random_inputs(64, (1, 16, 1, 16), torch.float32)
    k, g, beta = k[:1].expand_as(k).clone(), g * 0, beta * 0 + 1
    y, states = naive_delta(q, k, v, g, beta)
    known = Known((q, k, v, g, beta), (y,), {"delta": states})
    rig = make_rig([], (1, 16, 1, 16), cell=64)
    rig = Rig(rig.spec.memories[0], [known], rig.call, cell=64, operations=GPU_ROWS)
    rig.step([(0, 64)])


def test_rejected_drafts_leave_no_trace():
    rig = make_rig([33, 22], room=5, seed=3)
    rig.step([(0, 14), (1, 1)])
    rig.run_with_drafts(6)


def test_first_row_of_a_sequence_sees_no_earlier_tenant():
    rig = make_rig([20, 12])
    rig.step([(0, 20)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 11)])


def test_half_precision_models_multiply_in_their_dtype():
    rig = make_rig([70, 20], (1, 16, 2, 16), torch.float16, cell=64, decay=0.05)
    rig.tolerance = 2e-2
    rig.run([1, 9, 64])


@pytest.mark.parametrize("lengths", [(1, 1), (1, 11, 20)])
@pytest.mark.parametrize("most", [1.0, 2.0])
def test_gates_computed_inside_equal_those_computed_before(lengths, most):
    torch.manual_seed(0)
    q, k, v, step, strength = random_inputs(sum(lengths), SMALL, torch.float32)
    step = torch.randn_like(step) * 9
    rates, bias = -torch.rand(2), torch.randn(2)
    outputs = []
    for call, gates in (
        (gated_delta, (torch.nn.functional.softplus(step + bias) * rates, most * strength.sigmoid())),
        (partial(projected_gated_delta, most=most), (step, strength, rates, bias)),
    ):
        bench = Bench(SMALL, torch.float32, 8, "cpu")
        batch = bench.batch([Row(0, length, tail=index) for index, length in enumerate(lengths)])
        outputs.append(call(q, k, v, *gates, batch, bench.view))
    torch.testing.assert_close(*outputs)


def states_of_chunks(device: str, sizes, dtype, chunks: list[list[tuple[int, int]]]) -> Tensor:
    """Checkpoints of a sequence of 4 cells at all grid positions, its rows cut as said, with another row beside."""
    torch.manual_seed(0)
    inputs = [x.to(device) for x in random_inputs(256, sizes, dtype, 0.1)]
    bench = Bench(sizes, dtype, 16, device)
    for number, spans in enumerate(chunks):
        rows, captures, packed = [], [], []
        for start, end in spans:
            beside = start == end
            span = (0, end) if beside else (start, end)
            if not beside:
                captures += [Capture(len(rows), p, p // 64) for p in range(64, 257, 64) if start < p <= end]
            rows.append(Row(*span, read_slot=start // 64, tail=8 + number if beside else 0))
            packed.append([x[slice(*span)] for x in inputs])
        batch = bench.batch(rows, captures)
        gated_delta(*(torch.cat(x) for x in zip(*packed)), batch, bench.view)
    return bench.view.state["delta"][1:5].clone()


CHUNKINGS = [
    [[(0, 64), (19, 19)], [(64, 192)], [(77, 77), (192, 256)]],
    [[(3, 3), (0, 192)], [(192, 256), (64, 64), (130, 130)]],
]


@pytest.mark.kernels
def test_checkpoints_have_the_same_bits_wherever_a_prefill_resumed():
    sizes = (1, 16, 2, 16)
    whole = states_of_chunks("cpu", sizes, torch.float32, [[(0, 256)]])
    for chunks in CHUNKINGS:
        assert torch.equal(states_of_chunks("cpu", sizes, torch.float32, chunks), whole)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_packed_rows_at_real_sizes_equal_the_loop(dtype, tolerance):
    for room in (0, 5):
        rig = make_rig([300, 200, 129, 64, 1], (4, 128, 8, 128), dtype, decay=0.1, device="cuda", cell=64, room=room)
        rig.compare = lambda found, answer, what: close(found, answer, tolerance, what)
        rig.run([1, 1, 2, 5, 64, 65, 130])


def close(found: Tensor, answer: Tensor, tolerance: float, what: str) -> None:
    assert relative(found.cpu(), answer) < tolerance, what


@pytest.mark.gpu
@pytest.mark.parametrize("many", [128, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_rows_at_real_sizes_equal_the_loop(monkeypatch, dtype, many):
    monkeypatch.setattr(cuda_gated_delta, "MANY_ROWS", many)
    rig = make_rig([100, 90, 65, 20], (4, 128, 8, 128), dtype, decay=0.1, device="cuda", cell=64, room=7)
    rig.compare = lambda found, answer, what: close(found, answer, 1e-4 if dtype == torch.float32 else 2e-2, what)
    rig.step([(0, 60), (1, 57), (2, 64), (3, 1)])
    rig.run([8, 4, 3])


@pytest.mark.gpu
def test_few_and_many_short_rows_have_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    lengths = (4, 3, 8, 5)
    rows = [Row(124 + number, 124 + number + length, number, number) for number, length in enumerate(lengths)]
    inputs = [x.cuda() for x in random_inputs(sum(lengths), REAL, torch.bfloat16, 0.1)]
    found = []
    for many in (128, 0):
        monkeypatch.setattr(cuda_gated_delta, "MANY_ROWS", many)
        bench = Bench(REAL, torch.bfloat16, 16, "cuda", room=7)
        for store in bench.stores:
            store.buffer.copy_(torch.arange(len(store.buffer), device="cuda") % 61)
        batch = bench.batch(rows, [Capture(number, 128, 8 + number) for number in range(4)])
        found.append([gated_delta(*inputs, batch, bench.view), *(store.buffer for store in bench.stores)])
    assert found[0][0].isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.gpu
@pytest.mark.parametrize("few", [32, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_at_real_sizes_follow_a_prefill(monkeypatch, dtype, few):
    monkeypatch.setattr("weft.kernels.cuda.gated_delta.FEW_ROWS", few)
    rig = make_rig([140, 70, 64], (4, 128, 8, 128), dtype, decay=0.1, device="cuda", cell=64)
    rig.compare = lambda found, answer, what: close(found, answer, 1e-4 if dtype == torch.float32 else 2e-2, what)
    rig.step([(0, 60), (1, 3), (2, 40)])
    rig.run([1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_have_the_same_bits_on_a_gpu_wherever_a_prefill_resumed(dtype):
    whole = states_of_chunks("cuda", REAL, dtype, [[(0, 256)]])
    for chunks in CHUNKINGS:
        assert torch.equal(states_of_chunks("cuda", REAL, dtype, chunks), whole)


@pytest.mark.gpu
def test_a_recorded_decode_serves_other_rows():
    torch.manual_seed(0)
    sizes, dtype = (4, 128, 8, 128), torch.bfloat16
    inputs = [x.cuda() for x in random_inputs(3, sizes, dtype, 0.1)]
    outputs = []
    for recorded in (False, True):
        bench = Bench(sizes, dtype, 16, "cuda")
        prompt = [x.cuda() for x in random_inputs(200, sizes, dtype, 0.1)] if not recorded else prompt
        for number, length in enumerate((70, 63, 67)):
            rows = [Row(0, length, tail=number)]
            captures = [Capture(0, 64, number)] if length > 64 else []
            gated_delta(*(x[:length] for x in prompt), bench.batch(rows, captures), bench.view)
        other = bench.batch([Row(0, 1, tail=9), Row(0, 1, tail=10), Row(0, 1, tail=11)])
        wanted = bench.batch([Row(70, 71, 0, 0), Row(63, 64, 5, 1), Row(67, 68, 2, 2)], [Capture(1, 64, 7)])
        if recorded:
            gated_delta(*inputs, other, bench.view)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = gated_delta(*inputs, other, bench.view)
            for name in ("start", "first", "slot", "tail", "closing"):
                getattr(other, name).copy_(getattr(wanted, name))
            graph.replay()
        else:
            y = gated_delta(*inputs, wanted, bench.view)
        outputs.append((y.clone(), bench.view.state["delta"][7].clone()))
    assert all(torch.equal(*pair) for pair in zip(*outputs))


def launch_step(sizes, dtype, rows: list[Row], projected: bool, room: int = 0) -> None:
    q, k, v, g, beta = (torch.empty_like(x) for x in random_inputs(sum(r.end - r.start for r in rows), sizes, dtype))
    bench = Bench(sizes, dtype, 2, "cpu", room)
    if projected:
        rates = torch.empty(sizes[2])
        projected_gated_delta(q, k, v, g, beta, rates, rates, bench.batch(rows), bench.view)
    else:
        gated_delta(q, k, v, g, beta, bench.batch(rows), bench.view)


def launch_bfloat16() -> None:
    launch_step(REAL, torch.bfloat16, [Row(70, 71, 0), Row(0, 80)], projected=True)


def launch_float32() -> None:
    launch_step((2, 32, 4, 32), torch.float32, [Row(70, 71, 0), Row(0, 80)], projected=False)


def launch_many_rows() -> None:
    launch_step(REAL, torch.bfloat16, [Row(70, 71, 0)] * (FEW_ROWS + 1), projected=True)


def launch_many_rows_float32() -> None:
    launch_step(REAL, torch.float32, [Row(70, 71, 0)] * (FEW_ROWS + 1), projected=True)


def launch_wide_keys() -> None:
    launch_step((4, 192, 8, 96), torch.bfloat16, [Row(70, 71, 0), Row(0, 80)], projected=True)


def launch_drafts() -> None:
    launch_step(REAL, torch.bfloat16, [Row(70, 74, 0), Row(0, 3)], projected=True)


def launch_many_drafts() -> None:
    launch_step(REAL, torch.bfloat16, [Row(70, 74, 0)] * MANY_ROWS, projected=True, room=7)


def launch_drafts_float32() -> None:
    launch_step(REAL, torch.float32, [Row(70, 74, 0), Row(0, 3)], projected=True)
    launch_step(REAL, torch.float32, [Row(70, 74, 0)] * MANY_ROWS, projected=True, room=7)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_bfloat16, launch_many_rows, launch_drafts)


@pytest.mark.kernels
def test_rows_of_any_number_of_drafts_are_solved_in_registers():
    assert_compiles(launch_many_drafts, in_registers=True)


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_of_other_types_and_sizes_compile_for_sm_90():
    assert_compiles(launch_float32, launch_many_rows_float32, launch_wide_keys, launch_drafts_float32)
