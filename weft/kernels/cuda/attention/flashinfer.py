"""FlashInfer's paged prefill: planned on the host once per step and kind of layer, then run by all layers of the kind.

A module takes FlashInfer a minute to compile, the first time on a machine. That happens in the background, at a low
priority (`warm`); until it is done, prompts use Triton, so neither a start nor a request waits for it. A module that
fails to compile or to run is reported once and left to Triton. Plans use the host's numbers, so nothing waits for the
device. A sink is added afterwards, by means of the log-sum that FlashInfer returns.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.interface import Batch, PageList

log = logging.getLogger(__name__)

LOG2_E = tl.constexpr(1.4426950408889634)
LOW_PRIORITY = 10
# FlashInfer's recommendation; only fa2 uses it.
WORKSPACE_BYTES = {"fa2": 128 << 20, "fa3": 1 << 20}


@dataclass(frozen=True, slots=True)
class WrapperShape:
    """Parameters of layers that share a plan."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    cell: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def module(self) -> tuple[object, ...]:
        """Return what FlashInfer compiles for."""
        return self.dtype, self.head_dim, self.window is not None, self.softcap is not None


@dataclass(slots=True)
class PooledWrapper:
    """A FlashInfer wrapper, and the event after which its pinned memory may be overwritten."""

    wrapper: Any
    uploaded: torch.cuda.Event


@dataclass(slots=True)
class BackgroundBuild:
    """A module that a thread compiles, and the shapes that wait for it."""

    backend: str
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    waiting: set[tuple[WrapperShape, torch.device]] = field(default_factory=set)


builds: dict[tuple[object, ...], BackgroundBuild] = {}
# Warmed modules and their backends; None if warm-up failed.
modules: dict[tuple[object, ...], str | None] = {}
# Planners of a shape on a device. At most one step at a time uses each.
planners: dict[tuple[WrapperShape, torch.device], list[PooledWrapper]] = {}


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


def is_warm(shape: WrapperShape, device: torch.device) -> bool:
    """Return whether this shape has planners. A warm module of another shape is not enough.

    Modules that were compiled in the background are loaded here, by the thread that launches steps: loading them
    while another thread captures a CUDA graph would break the capture.
    """
    if (shape, device) in planners:
        return True
    build = builds.get(shape.module)
    if build is None or not build.ended.is_set() or (shape, device) not in build.waiting:
        return False
    waiting = list(build.waiting)
    build.waiting.clear()
    if build.error is None:
        _load([each for each, where in waiting if where == device], build.backend, device)
    return (shape, device) in planners


def warm(shapes: Iterable[WrapperShape], backend: str, device: torch.device) -> None:
    """Load what is compiled for `shapes`, and compile the rest in the background; `is_warm` loads that later."""
    # With its index, as tensors name it.
    device = torch.empty(0, device=device).device
    compiled = []
    for shape in shapes:
        build = builds.get(shape.module)
        if build is None and shape.module not in modules:
            build = _start_build(shape, backend)
        if build is None or build.ended.is_set():
            compiled.append(shape)
        else:
            build.waiting.add((shape, device))
    _load([shape for shape in compiled if _failed(shape) is None], backend, device)


def finish_compiling() -> None:
    """Wait for everything that compiles in the background: for tests and benchmarks."""
    for build in builds.values():
        build.ended.wait()


def _failed(shape: WrapperShape) -> Exception | None:
    build = builds.get(shape.module)
    return None if build is None else build.error


def _start_build(shape: WrapperShape, backend: str) -> BackgroundBuild | None:
    """Compile a module in a thread; return None if that is not needed, or this FlashInfer cannot do it."""
    try:
        module = module_of(shape, backend)
        if module.is_compiled:
            return None
    except Exception:  # Another version: its wrapper compiles, while the start waits.
        log.debug("FlashInfer cannot compile ahead", exc_info=True)
        return None
    build = builds[shape.module] = BackgroundBuild(backend)
    log.info("FlashInfer compiles its prefill in the background; until then, long prompts use Triton, which is slower")

    def compile_module() -> None:
        begun = time.monotonic()
        with suppress(OSError, AttributeError):
            # A thread's own priority, which its compilers inherit: requests go first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        try:
            module.build(verbose=False)
            log.info("FlashInfer's prefill is compiled after %.0f s: long prompts use it now", time.monotonic() - begun)
        except Exception as error:  # A compiler may raise anything.
            build.error = error
            _report(shape, error)
        build.ended.set()

    # A daemon, so that a server that is stopped meanwhile does not wait for it.
    threading.Thread(target=compile_module, name="weft-flashinfer", daemon=True).start()
    return build


def module_of(shape: WrapperShape, backend: str) -> Any:
    """Return FlashInfer's description of the module that its wrapper loads for this shape."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    no_positions, half_sums = 0, False
    return gen_batch_prefill_module(
        backend, shape.dtype, shape.dtype, shape.dtype, torch.int32, shape.head_dim, shape.head_dim,
        no_positions, shape.window is not None, bool(shape.softcap), half_sums,
    )  # fmt: skip


def _load(shapes: list[WrapperShape], backend: str, device: torch.device) -> None:
    """Load and try the modules of `shapes`, and make their planners."""
    kinds = {shape.module: shape for shape in shapes if shape.module not in modules}
    with ThreadPoolExecutor() as pool:
        for shape, error in zip(
            kinds.values(), pool.map(lambda one: trial_error(one, backend, device), kinds.values())
        ):
            modules[shape.module] = backend if error is None else None
            if error is not None:
                _report(shape, error)
    for shape in shapes:
        if modules[shape.module] is not None:
            # Allocate pinned memory now: later that would synchronize the device.
            spare = planners.setdefault((shape, device), [])
            spare.extend(new_planner(backend, device) for _ in range(2 - len(spare)))


def _report(shape: WrapperShape, error: Exception) -> None:
    log.warning(
        "FlashInfer does not support heads of %d (%s): prompts use Triton, which is slower. Reason: %s",
        shape.head_dim, shape.dtype, str(error).strip().splitlines()[-1] if str(error) else repr(error),
    )  # fmt: skip


def trial_error(shape: WrapperShape, backend: str, device: torch.device) -> Exception | None:
    """Attend over two cells of one row. The only check is that the result is a number."""
    cell, tokens = shape.cell, 2 * shape.cell
    try:
        planner = new_planner(backend, device)
        bounds, pages = torch.tensor([0, 2], dtype=torch.int32), torch.arange(2, dtype=torch.int32, device=device)
        first, last = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([cell], dtype=torch.int32)
        _plan(planner, shape, first, bounds, pages, last, tokens)
        q = torch.ones(tokens, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        store = torch.ones(2, 3, cell, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
        out = torch.empty_like(q)
        planner.wrapper.run(q, (store[:, 0], store[:, 1]), out=out)
        if not bool(out.isfinite().all()):
            return ArithmeticError("its result is not finite")
    except Exception as error:  # A compiler, a driver or another FlashInfer version may raise anything.
        return error
    return None


def attend_prefill(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    listed: PageList,
    view: AttentionView,
    shape: WrapperShape,
    sinks: Tensor | None,
    derived: dict[Any, Any],
) -> None:
    """Attend for all tokens of `q` after the leading `batch.decodes` into those of `out`."""
    if not out.is_contiguous():
        # The library writes contiguous tokens.
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        attend_prefill(q, whole, batch, listed, view, shape, sinks, derived)
        out[batch.decodes :] = whole[batch.decodes :]
        return
    key = ("flashinfer", shape)
    planner = derived.get(key)
    if planner is None:
        planner = derived[key] = _plan_step(shape, batch, listed, q.device)
    q, out = q[batch.decodes :], out[batch.decodes :]
    pages = (view.keys, view.values)
    if sinks is None:
        planner.wrapper.run(q, pages, out=out)
        return
    _, total = planner.wrapper.run(q, pages, out=out, return_lse=True)
    tokens, heads, head_dim = out.shape
    _join_sinks[(tokens, heads)](
        named(out_ptr=out, total_ptr=total, sinks_ptr=sinks),
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_DIM=power_of_two(head_dim), num_warps=1,
    )  # fmt: skip


def _plan_step(shape: WrapperShape, batch: Batch, listed: PageList, device: torch.device) -> PooledWrapper:
    """Plan the rows after the decodes together."""
    spare = planners[shape, device]
    planner = next((one for one in spare if one.uploaded.query()), None)
    if planner is None:
        # The device is further behind than expected: allocate new memory rather than wait.
        planner = new_planner(modules[shape.module] or "", device)
        spare.append(planner)
    decodes = batch.decodes
    first, bounds = batch.host_first[decodes:], listed.host_bounds[decodes:]
    ends = batch.host_start[decodes:] + first.diff()
    last_page = (ends - 1) % shape.cell + 1
    pages = listed.pages[int(bounds[0]) :]
    _plan(planner, shape, first - first[0], bounds - bounds[0], pages, last_page, batch.longest)
    planner.uploaded.record()
    return planner


def _plan(
    planner: PooledWrapper,
    shape: WrapperShape,
    first: Tensor,
    bounds: Tensor,
    pages: Tensor,
    last_page: Tensor,
    longest: int,
) -> None:
    planner.wrapper.plan(
        first, bounds, pages, last_page,
        shape.heads, shape.kv_heads, shape.head_dim, shape.cell,
        causal=True, sm_scale=shape.scale, logits_soft_cap=shape.softcap,
        window_left=-1 if shape.window is None else shape.window - 1,
        q_data_type=shape.dtype, kv_data_type=shape.dtype, max_token_per_sequence=longest,
    )  # fmt: skip


def new_planner(backend: str, device: torch.device) -> PooledWrapper:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(backend, device), "NHD", backend=backend)
    return PooledWrapper(wrapper, torch.cuda.Event())


@cache
def _workspace(backend: str, device: torch.device) -> Tensor:
    """Return the workspace of all wrappers, which run one after another on one stream."""
    return torch.zeros(WORKSPACE_BYTES[backend], dtype=torch.uint8, device=device)


@jit
def _join_sinks(
    out_ptr, total_ptr, sinks_ptr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """Rescale values that were divided by a sum without the sink. Totals are base-2 logarithms."""
    token, head = tl.program_id(0), tl.program_id(1)
    at = token.to(tl.int64) * HEADS + head
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    share = 1 / (1 + tl.exp2(sink - tl.load(total_ptr + at)))
    feature = tl.arange(0, BLOCK_DIM)
    value_ptr = out_ptr + at * HEAD_DIM + feature
    value = tl.load(value_ptr, mask=feature < HEAD_DIM, other=0.0)
    tl.store(value_ptr, (value * share).to(value.dtype), mask=feature < HEAD_DIM)
