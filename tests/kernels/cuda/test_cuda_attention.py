"""Paged attention on `Lanes` equals the reference on the same plan: Triton's kernels and FlashInfer's.

Without a GPU, Triton's interpreter runs the kernels at small odd sizes; what is marked `gpu` runs at real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels.cuda_attention import LAYER, MIXES, REAL, SCALE, Scene
from tests.support.kernels.operations import GPU_ROWS, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cuda import attention as on_gpu
from weft.kernels.cuda.attention import flashinfer
from weft.kernels.cuda.attention import prefill as attention_prefill
from weft.kernels.cuda.attention.decode import DecodeSharing, attend_decodes, attend_drafts, attends_drafts
from weft.kernels.cuda.attention.flashinfer import WrapperShape
from weft.kernels.cuda.attention.prefill import PLAIN_LAUNCH, attend_pieces
from weft.runner.batching import build_batch


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter runs them one by one."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention_prefill, "PLAIN_LAUNCH", PLAIN_LAUNCH._replace(block=64))


def error_of(found: Tensor, reference: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.float() - reference).norm() / reference.norm())


def assert_equal(scene: Scene, tolerance: float = 2e-6, **options) -> None:
    assert error_of(scene.ours(**options), scene.reference(**options)) < tolerance


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize(
    ("mix", "window"),
    [(mix, window) for mix in MIXES for window in (None, 17, 40)]
    + [("decodes and prompts", window) for window in (1, 8, 100, 1000)],
)
def test_attention_equals_the_reference(mix, window):
    assert_equal(Scene(MIXES[mix], window), sinks=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_and_sinks_are_the_references(window, options):
    assert_equal(Scene(MIXES["decodes and prompts"], window), **OPTIONS[options])


@pytest.mark.kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (5, 1, 24), (20, 1, 16), (8, 4, 80)])
def test_heads_of_any_number_and_size(heads, kv_heads, head_dim):
    rows = [(40, 41), (3, 4), (0, 18), (30, 45)]
    assert_equal(Scene(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim))


@pytest.mark.kernels
def test_cells_of_64_tokens():
    assert_equal(Scene([(200, 201), (100, 170)], 70, cell=64), sinks=True)


@pytest.mark.parametrize(
    "sharing", [DecodeSharing(1, 1), DecodeSharing(3, 2), DecodeSharing(5, 1), DecodeSharing(40, 1)]
)
@pytest.mark.parametrize("window", [None, 50])
def test_the_number_of_shares_changes_nothing(sharing, window):
    scene = Scene([(150, 151), (0, 1), (16, 17), (70, 71)], window, heads=3, kv_heads=1)
    batch, view = scene.batch(), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    out = torch.full(scene.q.shape, torch.nan, device=scene.device)
    attend_decodes(scene.q, out, batch, view, scene.scale, None, scene.sinks, sharing)
    assert error_of(out, scene.reference(sinks=True)) < 2e-6


@pytest.mark.parametrize("window", [1, 20])
def test_cells_that_left_the_window_may_still_be_listed(window):
    assert_equal(Scene([(150, 151), (70, 71), (16, 17), (90, 100), (47, 50)], window, spare=50), sinks=True)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("window", [None, 7, 33])
def test_the_size_of_a_block_of_queries_changes_nothing(block, window):
    scene = Scene([(0, 40), (21, 30)], window, heads=3, kv_heads=1)
    batch, view = scene.batch(), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    out = torch.full(scene.q.shape, torch.nan, device=scene.device)
    launch = PLAIN_LAUNCH._replace(block=block)
    attend_pieces(scene.q, out, batch, view, scene.scale, None, None, launch)
    assert error_of(out, scene.reference()) < 2e-6


@pytest.mark.parametrize(
    "sharing", [DecodeSharing(shares, least) for shares, least in ((1, 1), (3, 2), (8, 1), (40, 1))]
)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_rows_of_drafts_read_a_cell_together_and_longer_padding_is_finite(sharing, window):
    scene = Scene([(60, 64), (46, 51), (8, 9), (100, 102), (0, 30)], window, heads=3, kv_heads=1, spare=30)
    batch, view = replace(scene.batch(), decodes=0, longest=5, host=None), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    out = torch.full(scene.q.shape, torch.nan, device=scene.device)
    attend_drafts(scene.q, out, batch, view, scene.scale, None, scene.sinks, sharing)
    assert error_of(out[:12], scene.reference(sinks=True)[:12]) < 2e-6
    assert out.isfinite().all()


@pytest.mark.parametrize("window", [None, 20])
def test_a_last_row_without_tokens_and_pages_beyond_moved_rows_change_nothing(window):
    """A step that its rows fill has no padding; rows that were moved see no longer what lies in their last pages."""
    scene = Scene([(60, 64), (46, 51), (8, 9), (100, 102)], window, heads=7, kv_heads=1)
    batch, view = scene.batch(), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    listed, unseen = batch.pages(window), scene.pages[-1]
    pages = [[*listed.pages[begin:end].tolist(), unseen] for begin, end in pairwise(listed.bounds.tolist())]
    bounds = [0, *accumulate(map(len, pages))]
    moved = replace(
        listed,
        pages=torch.tensor([*chain(*pages)], dtype=torch.int32, device=scene.device),
        bounds=torch.tensor([*bounds, bounds[-1]], dtype=torch.int32, device=scene.device),
        first_position=F.pad(listed.first_position, (0, 1)),
    )
    rows = {name: F.pad(getattr(batch, name), (0, 1)) for name in ("start", "slot", "tail", "closing")}
    rows["first"] = torch.cat([batch.first, batch.first[-1:]])
    paging = {"full" if window is None else "windowed": moved}
    batch = replace(batch, rows=5, decodes=0, longest=5, host=None, derived={}, **rows, **paging)
    for sharing in (DecodeSharing(1, 1), DecodeSharing(5, 1), DecodeSharing(40, 1)):
        out = torch.full(scene.q.shape, torch.nan, device=scene.device)
        attend_drafts(scene.q, out, batch, view, scene.scale, None, scene.sinks, sharing)
        assert error_of(out, scene.reference(sinks=True)) < 2e-6


def test_rows_of_drafts_are_read_together_if_their_queries_fit():
    for heads, head_dim, longest, fits in ((8, 16, 8, True), (9, 16, 8, False), (8, 16, 9, False), (8, 512, 8, False)):
        scene = Scene([(60, 64), (46, 51)], heads=heads, kv_heads=1, head_dim=head_dim)
        batch = replace(scene.batch(), longest=longest, host=None)
        assert attends_drafts(scene.q, batch, scene.view()) == fits
        assert not attends_drafts(scene.q, scene.batch(), scene.view()), "only recorded steps"


@pytest.mark.parametrize(
    ("sharing", "window"),
    [(sharing, window) for sharing in ((1, 1), (3, 1), (2, 2), (8, 1), (5, 4)) for window in (None, 33)]
    + [((3, 1), 7), ((5, 4), 60)],
)
def test_how_many_programs_share_a_prompts_cells_changes_nothing(sharing, window):
    scene = Scene([(150, 151), (0, 40), (21, 30), (100, 125)], window, heads=3, kv_heads=1)
    batch, view = scene.batch(), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    out = torch.full(scene.q.shape, torch.nan, device=scene.device)
    attend_pieces(
        scene.q, out, batch, view, scene.scale, None, scene.sinks,
        sharing=attention_prefill.PrefillSharing(*sharing),
    )  # fmt: skip
    assert error_of(out[1:], scene.reference(sinks=True)[1:]) < 2e-6
    assert not attention_prefill.counters(out.device).any()


def test_new_keys_and_values_are_in_their_pages_and_nothing_else_is_touched():
    scene = Scene([(30, 31), (10, 35)])
    before = scene.store.clone()
    batch, view = scene.batch(), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    table, token = scene.plan.page_table, 0
    for row, (start, end) in enumerate(scene.rows):
        for position in range(start, end):
            place = int(table[row, position // 16]), position % 16
            assert view.keys[place].equal(scene.k[token])
            assert view.values[place].equal(scene.v[token])
            before[place[0], 1:3, place[1]] = scene.store[place[0], 1:3, place[1]]
            token += 1
    torch.testing.assert_close(before, scene.store, equal_nan=True, rtol=0, atol=0)


@pytest.mark.kernels
def test_a_prompts_tokens_come_out_the_same_wherever_its_rows_begin():
    """Bit by bit: what a query sees decides, not how its row was cut or what else is in the batch."""
    whole = Scene([(0, 70)], 33, heads=2, kv_heads=1)
    outputs = whole.ours()
    pieces = whole.plan.window_table[0].tolist()
    for start, end in [(0, 21), (21, 50), (50, 70)]:
        first = whole.first_cell(start)
        pages = pieces[first : -(-end // 16)]
        plan = make_plan([Row(start, end, window_pages=pages, window_first=first)])
        board = torch.zeros(9, dtype=torch.int64, device=whole.device)
        batch = build_batch(plan, whole.spec, board, whole.device, GPU_ROWS)
        parts = (x[start:end] for x in (whole.q, whole.k, whole.v))
        assert attention(*parts, batch, whole.view(), SCALE).equal(outputs[start:end])


SIZES = [(32, 8, 64), (32, 8, 128), (16, 4, 256), (8, 8, 80), (10, 2, 96)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 128, 1000, 5000])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SIZES)
def test_real_sizes_in_bfloat16(heads, kv_heads, head_dim, window, options):
    scene = Scene(REAL, window, heads, kv_heads, head_dim, cell=64, dtype=torch.bfloat16, scale=head_dim**-0.5)
    assert_equal(scene, 6e-3, **OPTIONS[options])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_real_sizes_in_float32(head_dim):
    scene = Scene(REAL, 100, 8, 2, head_dim, cell=64, scale=head_dim**-0.5)
    assert_equal(scene, 1e-5, sinks=True)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 4, 256), (16, 2, 256), (40, 8, 128), (32, 8, 64)])
def test_rows_of_drafts_at_real_sizes_in_bfloat16(heads, kv_heads, head_dim, window):
    rows = [(4000, 4004), (60, 68), (64, 65), (700, 703), (0, 8), (128, 132)] * 6 + [(0, 20)]
    scene = Scene(rows, window, heads, kv_heads, head_dim, cell=64, dtype=torch.bfloat16, scale=head_dim**-0.5)
    batch, view = replace(scene.batch(), decodes=0, longest=8, host=None), scene.view()
    on_gpu.write_pages(scene.k, scene.v, batch, view)
    out = torch.full(scene.q.shape, torch.nan, dtype=scene.dtype, device=scene.device)
    attend_drafts(scene.q, out, batch, view, scene.scale, None, scene.sinks)
    found, wanted = (x.split([end - start for start, end in rows]) for x in (out, scene.reference(sinks=True)))
    assert max([*map(error_of, found, wanted)][:-1]) < 1e-2, "row by row; the last one is padding, and finite"


# FlashInfer compiles a module for each head size, with and without a window, with and without a softcap: a minute each.
QUICK_VARIANTS = ((None, "plain"), (100, "softcap and sinks"))
VARIANTS = [
    pytest.param(window, options, marks=[] if (window, options) in QUICK_VARIANTS else [pytest.mark.slow])
    for window in (None, 100)
    for options in OPTIONS
]


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "options"), VARIANTS)
def test_flashinfer_equals_the_reference(window, options, monkeypatch):
    pytest.importorskip("flashinfer")
    scene = Scene(REAL, window, 32, 8, 128, cell=64, dtype=torch.bfloat16, scale=128**-0.5)
    softcap = OPTIONS[options].get("softcap")
    on_gpu.warm([scene.shape(softcap)])
    flashinfer.finish_compiling()
    assert flashinfer.is_warm(scene.shape(softcap), scene.q.device)
    monkeypatch.setattr(on_gpu, "FLASHINFER_WORK", 0)
    monkeypatch.delattr(on_gpu, "attend_pieces")
    assert_equal(scene, 6e-3, **OPTIONS[options])


@pytest.mark.gpu
def test_a_recorded_step_of_decodes_reads_whatever_stands_in_its_tensors():
    short, long = (Scene([(n, n + 1) for n in lengths], heads=32, kv_heads=8, head_dim=128, cell=64,
                         dtype=torch.bfloat16) for lengths in ([3, 70, 200, 64], [3000, 900, 2500, 0]))  # fmt: skip
    answer = long.ours()
    batch = long.batch()
    recorded_batch, store = long.batch(), long.store
    listed = recorded_batch.full
    # Recorded with the short rows in the long ones' tensors.
    other = short.batch()
    for name in ("first_position", "bounds"):
        getattr(listed, name).copy_(getattr(other.full, name))
    recorded_batch.start.copy_(other.start)
    listed.pages.fill_(0)
    view, q = AttentionView(store[:, 1], store[:, 2], None), long.q.contiguous()
    on_gpu.read_pages(q, recorded_batch, view, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = on_gpu.read_pages(q, recorded_batch, view, SCALE)
    for name in ("first_position", "bounds", "pages"):
        getattr(listed, name).copy_(getattr(batch.full, name))
    recorded_batch.start.copy_(batch.start)
    graph.replay()
    assert out.equal(answer)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    scene = Scene(REAL, 1000, 32, 8, 128, cell=64, dtype=torch.bfloat16)
    scene.ours()
    batch, view = scene.batch(), scene.view()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(scene.q, scene.k, scene.v, batch, view, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("changes", "capability", "installed", "chosen"),
    [
        ({}, (9, 0), True, "fa3"),
        ({}, (9, 0), False, "triton"),
        ({}, (8, 9), True, "fa2"),
        ({}, (10, 0), True, "fa2"),
        ({}, (7, 5), True, "triton"),
        ({"dtype": torch.float32}, (9, 0), True, "triton"),
        ({"head_dim": 80}, (9, 0), True, "triton"),
        ({"head_dim": 256, "window": 1024}, (9, 0), True, "fa3"),
    ],
)
def test_flashinfer_is_chosen_where_it_can(changes, capability, installed, chosen):
    fields = {name: getattr(LAYER, name) for name in LAYER.__slots__} | changes
    assert on_gpu.choose_backend(WrapperShape(**fields), capability, installed) == chosen


def test_a_missing_flashinfer_is_said_once_and_triton_takes_over(monkeypatch, caplog):
    monkeypatch.setattr(flashinfer, "is_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu._say_it_is_missing.cache_clear()
    for _ in range(2):
        on_gpu.warm([LAYER, LAYER])
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer is not installed: attention over prompts uses Triton, which is slower"
    ]
    assert not flashinfer.is_warm(LAYER, torch.device("cpu"))


def test_a_flashinfer_that_fails_is_said_once_and_triton_takes_over(monkeypatch, caplog):
    def fail(*arguments: object) -> None:
        raise RuntimeError("nvcc not found\nninja: build stopped")

    monkeypatch.setattr(flashinfer, "modules", {})
    monkeypatch.setattr(flashinfer, "module_of", lambda *arguments: SimpleNamespace(is_compiled=True))
    monkeypatch.setattr(flashinfer, "new_planner", fail)
    for _ in range(2):
        flashinfer.warm([LAYER, LAYER], "fa3", torch.device("cpu"))
    [record] = caplog.records
    assert "Triton, which is slower. Reason: ninja: build stopped" in record.getMessage()
    assert not flashinfer.is_warm(LAYER, torch.device("cpu"))


def test_a_shape_is_warm_only_with_planners_of_its_own(monkeypatch):
    monkeypatch.setattr(flashinfer, "modules", {})
    monkeypatch.setattr(flashinfer, "planners", {})
    monkeypatch.setattr(flashinfer, "module_of", lambda *arguments: SimpleNamespace(is_compiled=True))
    monkeypatch.setattr(flashinfer, "trial_error", lambda *arguments: None)
    monkeypatch.setattr(flashinfer, "new_planner", lambda *arguments: object())
    here, other = torch.device("cpu"), replace(LAYER, heads=2 * LAYER.heads)
    flashinfer.warm([LAYER], "fa3", here)
    assert other.module == LAYER.module
    assert (flashinfer.is_warm(LAYER, here), flashinfer.is_warm(other, here)) == (True, False)
    flashinfer.warm([other], "fa3", here)
    assert flashinfer.is_warm(other, here)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.kernels.cuda import attention
from weft.kernels.cuda.attention import decode as attention_decode, flashinfer, prefill as attention_prefill
from weft.kernels.cuda.launch.arguments import UPLOADED

def build(kernel, types, constants, warps=4, stages=2):
    names = kernel.arg_names
    constants = {**constants, **{name: None for name in names if name.endswith("_exponents")}}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # Without this loads stay narrow and are not spread over stages.
    wide = [index for index, name in enumerate(names) if name.endswith(("_ptr", "_pages", "stride"))]
    even = {(index,): [["tt.divisibility", 16]] for index in wide}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, even)
    built = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": stages})
    assert built.metadata.shared <= 227 << 10, (kernel.__name__, constants, built.metadata.shared)

def pointers(kernel, half):
    types = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr") or name in UPLOADED}
    types |= {name: half for name in ("q_ptr", "k_ptr", "v_ptr", "key_pages", "value_pages", "out_ptr", "sinks_ptr")}
    types |= {name: "*fp32" for name in ("parts_ptr", "totals_ptr", "total_ptr", "prefix_ptr", "prefix_sums_ptr")}
    return types | {"scale": "fp32", "page_stride": "i64"}

for half, head_dim, window, softcap, sinks in [("*bf16", 64, 128, 0.0, True), ("*bf16", 80, 0, 0.0, False),
                                               ("*bf16", 256, 1024, 30.0, False), ("*fp32", 64, 0, 0.0, False)]:
    block_dim = triton.next_power_of_2(head_dim)
    size, alone = block_dim * (4 if half == "*fp32" else 2), dict(GROUPED=False, CONTINUED=False)
    same = dict(KV_HEADS=8, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, HAS_SINKS=sinks)
    reading = dict(CELL=64, WINDOW=window, SOFTCAP=softcap, PRECISION="ieee" if half == "*fp32" else "tf32")
    kernel = attention_decode._attend_share
    for tokens, lines, launches in ((1, 16, attention_decode.LAUNCHES), (8, 32, attention_decode.DRAFT_LAUNCHES)):
        launch = launches.get(size, attention_decode.PLAIN_LAUNCH)
        build(kernel, pointers(kernel, half), dict(HEADS=32, LINES=lines, TOKENS=tokens, EARLY=True,
              KEYS=launch.keys, WORDS=False, **same, **alone, **reading), launch.warps, launch.stages)
        kept, merge = dict(AT_ONCE=tokens, BORDERS=1, EARLY=1), attention_decode._merge_parts
        build(merge, pointers(merge, half), dict(HEADS=32, TOKENS=tokens, **kept, **same, **alone))
    launch = attention_prefill.LAUNCHES.get(size, attention_prefill.PLAIN_LAUNCH)
    kernel = attention_prefill._attend_block
    for shares in (1, 8):
      build(kernel, pointers(kernel, half), dict(GROUP=4, BLOCK=launch.block, QUERIES=launch.block // 4, PADDED=False,
          BLOCKS=256 // launch.block, SHARES=shares, LEAST_CELLS=16, **same, **reading), launch.warps, launch.stages)
    build(kernel, pointers(kernel, half), dict(GROUP=4, BLOCK=32, QUERIES=8, PADDED=True, BLOCKS=1,
        SHARES=8, LEAST_CELLS=16, **same, **reading), attention_prefill.SHORT_WARPS, launch.stages)
for kernel, constants in ((attention._write_token, dict(CELL=64, HEAD_DIM=128, SIZE=1024, BLOCK=1024, EARLY=True)),
                          (flashinfer._join_sinks, dict(HEADS=64, HEAD_DIM=64, BLOCK_DIM=64))):
    build(kernel, pointers(kernel, "*bf16"), constants)
"""


@pytest.mark.kernels
def test_kernels_compile_for_hopper_without_one():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
