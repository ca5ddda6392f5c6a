"""The matrix product with weights, by the routine of this processor that is fastest for so many rows.

It chooses, by what was measured (docs/benchmarks.md), among those that torch brings and our own for few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activation import KERNELS, activated, gated_product
from weft.kernels.native import library as native
from weft.kernels.stream import LazyNorm, Normed

# Up to so many rows our own kernel on a CPU is the fastest: it has no use for units that multiply whole tiles.
FEW_ROWS = {torch.float32: 16, torch.bfloat16: 4}
# Up to so many rows a CPU multiplies faster in bfloat16 if the weights come first: they are then read as they lie, and
# not copied into another layout at every product.
WEIGHTS_FIRST_ROWS = 64
# Rows of a float32 product for which oneDNN is faster than the library that torch takes, if weights are as stored.
HANDFUL = range(4, 33)
# A packed layout hardly depends on the number of rows that it is made for.
EXPECTED_ROWS = 64
HAS_TRITON = find_spec("triton") is not None
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Without units for 16 bits torch multiplies bfloat16 number by number, hundreds of times slower than float32.
HAS_BFLOAT16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
_onednn = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None


def linear(
    x: Normed,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    stored: Float[Tensor, "outputs inputs"] | None = None,
) -> Float[Tensor, "*n outputs"]:
    """x @ weight.T + bias; `weight` as it is, or as `pack` made it. `stored`: the same weights for few rows."""
    x = for_product(x, weight)
    if isinstance(x, LazyNorm):
        from weft.kernels.cuda import linear as on_gpu

        return on_gpu.product(x, weight, bias)
    if stored is None:
        stored = weight
    if are_few(x, stored):
        return _few_rows(x, stored, bias)
    if weight.is_mkldnn:
        return _onednn(x, weight, bias, "none", [], "")
    rows = len(x)
    if weight.is_cuda:
        return _on_gpu(x, weight, bias)
    if weight.dtype == torch.bfloat16 and not HAS_BFLOAT16:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if x.ndim != 2 or rows > WEIGHTS_FIRST_ROWS:
        return F.linear(x, weight, bias)
    if weight.dtype == torch.bfloat16:
        return _weights_first(x, weight, bias)
    if rows in HANDFUL and weight.dtype == torch.float32 and _onednn is not None and weight.is_contiguous():
        return _onednn(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def are_few(x: Tensor, weight: Tensor) -> bool:
    """Whether our own kernel is to multiply them."""
    return (
        x.is_cpu
        and x.ndim == 2
        and 0 < x.shape[0] <= FEW_ROWS.get(x.dtype, 0)
        and native.available()
        and not weight.is_mkldnn
        and weight.dtype in (x.dtype, torch.bfloat16)
        and weight.is_contiguous()
        and x.stride(1) == 1
    )


def _few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None, parts: int = 1
) -> Tensor:
    from weft.kernels.native.linear import few_rows

    return few_rows(x, weight, bias, activation, parts)


def _on_gpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if HAS_TRITON:
        from weft.kernels.cuda import linear as on_gpu

        if on_gpu.suits(x, weight):
            return on_gpu.product(x, weight, bias)
    return F.linear(x, weight, bias)


def for_product(x: Normed, weight: Tensor) -> Normed:
    """What a product with these weights reads: rows, or a norm that it is to compute on its way."""
    if isinstance(x, LazyNorm):
        from weft.kernels.cuda import linear as on_gpu

        return x if on_gpu.can_norm(x, weight) else x.computed()
    return x


def unsummed_linear(
    x: Float[Tensor, "n inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    stored: Float[Tensor, "outputs inputs"] | None = None,
) -> Float[Tensor, "*parts n outputs"]:
    """The product for a residual stream (`norm.Change`), which adds up parts for nothing: it may come in such."""
    if weight.is_cuda and HAS_TRITON:
        from weft.kernels.cuda import linear as on_gpu

        if on_gpu.suits(x, weight):
            return on_gpu.product(x, weight, bias, summed=False)
    return linear(x, weight, bias, stored)


def activated_linear(
    x: Normed,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    activation: Callable[[Tensor], Tensor],
    parts: int = 1,
    stored: Float[Tensor, "outputs inputs"] | None = None,
) -> Float[Tensor, "n results"]:
    """activation(linear(x)); with two parts side by side, the activation of the first times the second."""
    x = for_product(x, weight)
    if activation in KERNELS:
        if isinstance(x, LazyNorm) or (weight.is_cuda and HAS_TRITON):
            from weft.kernels.cuda import linear as on_gpu

            if on_gpu.suits(x, weight, activated=True):
                return on_gpu.product(x, weight, bias, KERNELS[activation], parts)
        elif are_few(x, weight if stored is None else stored):
            return _few_rows(x, weight if stored is None else stored, bias, activation, parts)
    product = linear(x, weight, bias, stored)
    return activated(product, activation) if parts == 1 else gated_product(*product.chunk(2, -1), activation)


def _weights_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(x) == 1:
        product = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return product.unsqueeze(0)
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


def pack(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """The same weights in the layout that many rows are fastest with, which may be the one they have.

    In bfloat16 blocks for the processor's units of 16 bits; nothing but `linear` can read them.
    """
    if not weight.is_cpu or not weight.numel():
        return weight
    if weight.dtype == torch.bfloat16 and HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
    return weight


def for_few_rows(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"] | None:
    """A second form of plain weights, if few rows are faster with it than with what `pack` gives.

    Float32 weights of a checkpoint that was stored in 16 bits are the same numbers in half the bytes.
    """
    if not weight.is_cpu or not weight.numel() or not native.available():
        return None
    weight = weight.detach()
    if weight.dtype == torch.float32:
        short = weight.bfloat16()
        return short if torch.equal(short.float(), weight) else None
    return weight if weight.dtype == torch.bfloat16 and HAS_ONEDNN else None
