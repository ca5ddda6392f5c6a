"""Norms of a residual stream that are left to whoever reads them, as one row on a GPU does it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.cuda_short_conv import Case, assert_close
from tests.support.kernels.operations import CPU, GPU, PLAIN, activated_linear, linear
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from tests.support.models.engines import FAMILIES, Ask, greedy, model_of, serve, tokens
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.activations import NAMES
from weft.kernels.choosing import GROUPS, assemble
from weft.kernels.cuda import causal_conv as short_conv
from weft.kernels.cuda import linear as on_gpu
from weft.kernels.cuda.linear import for_matmul as for_product
from weft.kernels.cuda.linear.one import one_row
from weft.kernels.cuda.linear.vectors import Vectors
from weft.kernels.cuda.norm import LazyNorm, can_wait
from weft.kernels.cuda.norm import rows_of as whole
from weft.kernels.cuda.norm.norms import join
from weft.kernels.interface import Operations
from weft.kernels.plain.norm import join as add_and_norm
from weft.kernels.stream import Change
from weft.memory.spec import MemorySpec
from weft.models.layers.norm import RMSNorm
from weft.models.model import CausalModel
from weft.runner.runner import Runner

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-5
# Families whose changes are normed before they are added.
OWN_NORMS = ("gemma3", "lfm3", "olmo2", "olmo3")


def some(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def made(
    size: int,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    changed: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> LazyNorm:
    x, value = (some(1, size, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    scale = (1 + some(size, seed=3, device=device) / 4).to(scale_dtype)
    return LazyNorm(x, Change(value, 0.22) if changed else None, scale, EPS)


def computed(lazy: LazyNorm) -> tuple[Tensor, Tensor]:
    """The sum and its norm, as a kernel of their own has them."""
    return join(lazy.x, [] if lazy.change is None else [lazy.change], lazy.weight, EPS)


def assert_left(lazy: LazyNorm, total: Tensor, normed: Tensor) -> None:
    """To the bit, but for the order in which squares are added up."""
    assert torch.equal(lazy.total, total)
    assert (lazy.result != normed).sum() <= 1 + normed.numel() // 100
    torch.testing.assert_close(lazy.result, normed, rtol=2e-3, atol=2e-3)


# A stream ------------------------------------------------------------------------------------------------------------


@pytest.mark.kernels
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["nobody", "tensor", "product", "two"])), max_size=6))
def test_a_stream_tells_the_same_whoever_computes_its_norms(blocks):
    """Blocks add so many changes, one of them normed, and what the stream then offers is read in some way or not."""
    size, weight = 32, some(5, 32, seed=9)
    norm, own = RMSNorm(size, EPS), RMSNorm(size, EPS)
    norm.weight.copy_(some(size, seed=7))
    own.weight.copy_(some(size, seed=8))
    offered, plain = (by.residual(some(1, size, seed=0)) for by in (GPU, PLAIN))
    for number, (changes, reader) in enumerate(blocks):
        for seed in range(changes):
            change = some(1, size, seed=10 * number + seed)
            for stream in (offered, plain):
                stream.add(change, 0.5, own if seed == 1 else None)
        lazy, normed = offered.read(norm), plain.finish(norm)
        if reader == "tensor":
            torch.testing.assert_close(whole(lazy), normed)
        if reader in ("product", "two"):
            torch.testing.assert_close(product(lazy, weight), F.linear(normed, weight), rtol=1e-4, atol=1e-5)
        if reader == "two":
            torch.testing.assert_close(whole(lazy), normed)
    torch.testing.assert_close(offered.finish(own), plain.finish(own))


def product(x: Tensor | LazyNorm, weight: Tensor) -> Tensor:
    return one_row(x, weight) if isinstance(x, LazyNorm) else F.linear(x, weight)


def test_only_one_row_on_a_gpu_is_left_to_its_readers():
    norm, x = RMSNorm(8, EPS), some(1, 8, seed=0)
    norm.weight.fill_(1.0)
    for operations, rows, waits in ((GPU, 1, True), (GPU, 2, False), (CPU, 1, False), (PLAIN, 1, False)):
        read = operations.residual(x.repeat(rows, 1)).read(norm)
        assert isinstance(read, LazyNorm) == waits
        assert isinstance(operations.rows_of(read), Tensor)


def test_what_a_matmul_cannot_add_is_added_before():
    x = some(1, 8, seed=0)
    change, weight = Change(x), some(8, seed=1)
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
        for rows, size in ((64, 4096), (16384, 2048), (8192, 4096))
    )
    norms = {size: made(size) for size in (2048, 4096)}
    assert on_gpu.can_norm(norms[4096], small)
    assert on_gpu.can_norm(norms[2048], narrow)
    assert not on_gpu.can_norm(norms[4096], wide)
    assert not on_gpu.can_norm(made(8208), torch.empty(8, 8208, dtype=torch.float16, device="meta")), "too wide"


def test_whoever_comes_later_reads_what_the_first_left():
    lazy, weight = made(64), some(16, 64, seed=5, dtype=torch.float16)
    total, normed = computed(lazy)
    wanted = F.linear(normed.float(), weight.float())
    for _ in range(2):
        torch.testing.assert_close(linear(lazy, weight, by=GPU).float(), wanted, rtol=2e-2, atol=2e-2)
        # Whoever computed it anew would find this.
        lazy.x = torch.full_like(lazy.x, float("nan"))
    assert for_product(lazy, weight) is lazy.result
    assert_left(lazy, total, normed)
    with pytest.raises(AssertionError):
        lazy.leave()


def test_an_activated_product_computes_it_too():
    weight = some(16, 64, seed=5, dtype=torch.float16)
    for activation, parts in ((F.silu, 2), (F.relu, 1), (torch.tanh, 1)):
        lazy = made(64)
        total, normed = computed(lazy)
        gate, *up = F.linear(normed.float(), weight.float()).chunk(parts, -1)
        wanted = activation(gate) * up[0] if up else activation(gate)
        found = activated_linear(lazy, weight, None, activation, parts, by=GPU)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
        assert_left(lazy, total, normed)


def test_a_change_that_lies_across_is_refused():
    lazy = made(64)
    lazy.change = Change(some(64, 2, seed=1, dtype=torch.float16).t()[:1])
    with pytest.raises(AssertionError):
        one_row(lazy, some(16, 64, seed=5, dtype=torch.float16))


def test_a_large_product_has_it_computed_before(monkeypatch):
    lazy, weight = made(64), some(16, 64, seed=5, dtype=torch.float16)
    total, normed = computed(lazy)
    monkeypatch.setattr(on_gpu, "NORMING", 0)
    monkeypatch.setattr(LazyNorm, "leave", lambda lazy: pytest.fail("a product computed it"))
    found = for_product(lazy, weight)
    torch.testing.assert_close(found, normed, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lazy.summed(), total, rtol=2e-3, atol=2e-3)
    case = Case(1, 64, 5, 3)
    case.x = made(64)
    torch.testing.assert_close(case.together(case.view()), after_norm(case, found))


def after_norm(case: Case, normed: Tensor) -> Tensor:
    case.x = normed
    return case.together(case.view())


# Whole models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OWN_NORMS])
def test_models_answer_as_with_norms_computed_before(family, monkeypatch):
    """In float16, which products of one row take; the first token comes of a prompt, the others of rows."""
    model, asks = model_of(family, torch.float16, PLAIN), [Ask(tokens(9, seed=1), greedy(8))]
    [before] = serve(engine_of(model), asks)
    lazy_ones = []

    def product(x, weight, bias=None, activation=None, parts=1, summed=True):
        """As the kernel, which would take minutes here: it computes the norm and leaves it."""
        if isinstance(x, LazyNorm):
            lazy_ones.append(x)
            total, normed = add_and_norm(x.x, [] if x.change is None else [x.change], x.weight, x.eps)
            for left, found in zip(x.leave(), (total, normed)):
                left.copy_(found)
            x = normed
        if activation is None:
            return F.linear(x, weight, bias)
        function = next(function for function, name in NAMES.items() if name == activation)
        return activated_linear(x, weight, bias, function, parts)

    monkeypatch.setattr(on_gpu, "matmul", product)
    [found] = serve(engine_of(model, lazy_operations()), asks)
    assert len(lazy_ones) >= 7
    assert found.tokens == before.tokens
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(before.logprobs), rtol=0, atol=2e-2)


def lazy_operations() -> Operations:
    """Streams and matmuls of a GPU; all else on a CPU, of rows."""
    table = assemble({**dict.fromkeys(GROUPS, "cpu"), "norm": "cuda", "linear": "cuda"})
    for name in ("short_conv", "experts"):
        compute = getattr(CPU, name)
        setattr(table, name, lambda x, *more, compute=compute: compute(table.rows_of(x), *more))
    return table


def engine_of(model: CausalModel, operations: Operations = CPU) -> Engine:
    spec, memory_bytes = MemorySpec(model.memories(CPU)), 64 << 20
    config = EngineConfig(memory_bytes=memory_bytes, max_sequences=2, max_tokens_per_step=64, max_length=64)
    runner = Runner(model, spec, memory_bytes, config.max_sequences, threads=1, operations=operations)
    return Engine(spec, runner, config)


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
        lazy = made(inputs, device=device, changed=changed, scale_dtype=torch.float16 if parts == 2 else torch.float32)
        total, normed = computed(lazy)
        found, wanted = (one_row(x, weight, added, activation, parts, by) for x in (lazy, normed))
        torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)
        assert_left(lazy, total, normed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 3, 7, 8])
@pytest.mark.parametrize(("inputs", "channels"), [(80, 7), (1040, 5)])
def test_a_short_convolution_of_it_is_that_of_the_norm(device, inputs, channels, first):
    case, lazy = Case(1, inputs, channels, 3, device=device, bias=True, first=first), made(inputs, device=device)
    total, normed = computed(lazy)
    assert short_conv.suits(lazy, case.projection, case.batch)
    views, outcomes = [case.view(), case.view()], []
    for case.x, view in zip((lazy, normed), views):
        outcomes.append(case.together(view))
    assert_close(*outcomes, *views, tolerance=5e-3)
    assert_left(lazy, total, normed)


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 32), (2048, 12352), (2880, 32), (4096, 1536)])
def test_a_product_of_real_size_is_that_of_the_norm(inputs, outputs):
    weight = some(outputs, inputs, seed=4, dtype=torch.bfloat16, device="cuda") / inputs**0.5
    for activation, parts in ((None, 1), ("silu", 2)):
        lazy = made(inputs, torch.bfloat16, "cuda")
        total, normed = computed(lazy)
        found, wanted = (one_row(x, weight, None, activation, parts) for x in (lazy, normed))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lazy.total, total, rtol=0, atol=0)
        torch.testing.assert_close(lazy.result, normed, rtol=1e-2, atol=1e-2)


def launch() -> None:
    for inputs, outputs in ((2048, 32), (2048, 3072), (2048, 16384), (2880, 32), (4096, 1536)):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
        one_row(made(inputs, torch.bfloat16), weight)
        one_row(made(inputs, torch.bfloat16, changed=False), weight)
        one_row(made(inputs, torch.bfloat16), weight, torch.empty(outputs, dtype=torch.bfloat16), "silu", 2)
    case = Case(1, 2048, 2048, 3, torch.bfloat16)
    case.x = made(2048, torch.bfloat16)
    case.together(case.view())


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch, in_registers=True)
