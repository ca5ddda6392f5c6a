"""Matmuls with weights, by the fastest routine of this CPU for the number of rows.

The choice is among torch's routines and our own for few rows, by measurement (docs/benchmarks.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activations import NAMES, Function
from weft.kernels.cpu.activation import gated_product
from weft.kernels.native import library as native
from weft.kernels.native.linear import few_rows
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight

# Up to this number of rows our own kernel is the fastest: it cannot use units that multiply whole tiles.
FEW_ROWS = {torch.float32: 16, torch.bfloat16: 4}
# Up to this number of rows a CPU multiplies faster in bfloat16 if the weights come first: it then reads them in place
# instead of copying them into another layout at every matmul.
WEIGHTS_FIRST_ROWS = 64
# Numbers of rows for which oneDNN is faster in float32 than torch's library, with weights as stored.
HANDFUL = range(4, 33)
# A packed layout hardly depends on the number of rows that it is made for.
EXPECTED_ROWS = 64
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Without 16-bit units torch multiplies bfloat16 element by element, hundreds of times slower than float32.
HAS_BFLOAT16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def must_widen(x: Tensor) -> bool:
    """Return whether this CPU multiplies numbers of this kind only one by one."""
    return x.dtype == torch.bfloat16 and not HAS_BFLOAT16


def wide(x: Tensor) -> Tensor:
    """Return x in a dtype that this CPU multiplies quickly."""
    return x.float() if must_widen(x) else x


def _onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")
    return product


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    """Return x @ weight.T + bias."""
    assert isinstance(x, Tensor)
    matrix, bias = weight.matrix, weight.bias
    if are_few(x, weight.for_few):
        return few_rows(x, weight.for_few, bias)
    if matrix.is_mkldnn:
        return _onednn(x, matrix, bias)
    rows = len(x)
    if must_widen(matrix):
        return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
    if x.ndim != 2 or rows > WEIGHTS_FIRST_ROWS:
        return F.linear(x, matrix, bias)
    if matrix.dtype == torch.bfloat16:
        return _weights_first(x, matrix, bias)
    if rows in HANDFUL and matrix.dtype == torch.float32 and HAS_ONEDNN and matrix.is_contiguous():
        return _onednn(x, matrix, bias)
    return F.linear(x, matrix, bias)


def linear_into_stream(x: Float[Tensor, "n inputs"], weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    """Return activation(linear(x)); with two parts side by side, activation(first) * second."""
    assert isinstance(x, Tensor)
    if activation in NAMES and are_few(x, weight.for_few):
        return few_rows(x, weight.for_few, weight.bias, activation, parts)
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, gated = projected.chunk(2, -1)
    return gated_product(gate, gated, activation)


def are_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether to use the C++ kernel."""
    return (
        x.ndim == 2
        and 0 < x.shape[0] <= FEW_ROWS.get(x.dtype, 0)
        and native.available()
        and not weight.is_mkldnn
        and weight.dtype in (x.dtype, torch.bfloat16)
        and weight.is_contiguous()
        and x.stride(1) == 1
    )


def _weights_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(x) == 1:
        product = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return product.unsqueeze(0)
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


def prepare(weight: Weight, twice: bool) -> Weight:
    few = for_few_rows(weight.matrix) if twice else None
    return Weight(pack(weight.matrix), weight.bias, few)


def pack(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """Return the weights in the fastest layout for many rows, which may be their present one.

    In bfloat16 the layout is blocks for the CPU's 16-bit units; only `linear` can read them.
    """
    if not weight.numel():
        return weight
    if weight.dtype == torch.bfloat16 and HAS_BFLOAT16:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
        return packed
    return weight


def for_few_rows(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"] | None:
    """Return a second form of plain weights, if few rows are faster with it than with the result of `pack`.

    Float32 weights of a checkpoint stored in 16 bits are the same numbers in half the bytes.
    """
    if not weight.numel() or not native.available():
        return None
    weight = weight.detach()
    if weight.dtype == torch.float32:
        short = weight.bfloat16()
        return short if torch.equal(short.float(), weight) else None
    return weight if weight.dtype == torch.bfloat16 and HAS_ONEDNN else None
