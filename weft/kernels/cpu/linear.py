"""Matmuls with weights, by the fastest routine of this CPU for the number of rows.

Our own kernel reads weights in panels and serves any number of rows. Where the CPU multiplies tiles of bfloat16 in
hardware, oneDNN is faster for more than a few rows. The choice is by measurement (docs/lab/benchmarks.md).
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.base import processor
from weft.kernels.activations import NAMES, Function
from weft.kernels.cpu.activation import gated_product
from weft.kernels.native import library as native
from weft.kernels.native.calls import prefers_calls
from weft.kernels.native.linear import PANEL, product
from weft.kernels.native.linear import pack as pack_panels
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight

# Up to this number of rows panels are faster: than PyTorch's library for float32, and than oneDNN's 16-bit units, which
# need many rows to be busy, and whose threads compete with those of the other kernels of a step.
FEW_ROWS = {torch.bfloat16: 16, torch.float32: 64}
# Up to this number of rows a CPU multiplies faster in bfloat16 if the weights come first: it then reads them in place
# instead of copying them into another layout at every matmul.
WEIGHTS_FIRST_ROWS = 64
# A packed layout of oneDNN hardly depends on the number of rows that it is made for.
EXPECTED_ROWS = 64
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_units() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware, and oneDNN may use it.

    Without such units torch multiplies bfloat16 element by element, hundreds of times slower than float32.
    """
    return HAS_ONEDNN and processor.multiplies_bfloat16() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


HAS_BFLOAT16 = has_units()


def described() -> str:
    """Describe how matmuls are computed here, for the log and `weft doctor`."""
    instructions = " ".join(processor.features()) or platform.machine()
    if not processor.is_unrestricted():
        instructions += f", restricted to {native.instruction_set()}"
    units = "oneDNN for many rows of bfloat16" if HAS_BFLOAT16 else "no 16-bit units: bfloat16 is widened in cache"
    return f"C++ for {instructions}; {units}"


def must_widen(x: Tensor) -> bool:
    """Return whether this CPU multiplies numbers of this kind only one by one."""
    return x.dtype == torch.bfloat16 and not HAS_BFLOAT16


def wide(x: Tensor) -> Tensor:
    """Return x in a dtype that this CPU multiplies quickly."""
    return x.float() if must_widen(x) else x


def linear(x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]:
    """Return x @ weight.T + bias."""
    assert isinstance(x, Tensor)
    if reads_panels(x, weight):
        return product(x, weight.for_few, weight.outputs, weight.bias)
    matrix, bias = weight.matrix, weight.bias
    if in_panels(matrix):
        return product(as_rows(x), matrix, weight.outputs, bias).view(*x.shape[:-1], weight.outputs)
    if matrix.is_mkldnn:
        return _onednn(x, matrix, bias)
    if must_widen(matrix):
        return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
    if x.ndim == 2 and len(x) <= WEIGHTS_FIRST_ROWS and matrix.dtype == torch.bfloat16:
        return _weights_first(x, matrix, bias)
    return F.linear(x, matrix, bias)


def linear_into_stream(x: Float[Tensor, "n inputs"], weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    """Return activation(linear(x)); with two parts side by side, activation(first) * second."""
    assert isinstance(x, Tensor)
    fits = parts == 1 or weight.outputs % (parts * PANEL) == 0
    if activation in NAMES and fits and reads_panels(x, weight):
        return product(x, weight.for_few, weight.outputs, weight.bias, activation, parts)
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, gated = projected.chunk(2, -1)
    return gated_product(gate, gated, activation)


def reads_panels(x: Tensor, weight: Weight) -> bool:
    """Return whether to multiply these rows with the weight's panels, without a copy of the rows."""
    fits = in_panels(weight.for_few) and x.ndim == 2 and x.shape[0] > 0 and x.stride(1) == 1
    return fits and (weight.few is None or x.shape[0] <= FEW_ROWS[x.dtype] or prefers_calls(x.shape[0]))


def in_panels(matrix: Tensor) -> bool:
    return matrix.ndim == 3 and not matrix.is_mkldnn


def as_rows(x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "m inputs"]:
    """Return x as rows of adjacent numbers."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")
    return product


def _weights_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(x) == 1:
        product = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return product.unsqueeze(0)
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


def prepare(weight: Weight, twice: bool) -> Weight:
    """Return the weights in the fastest layout for any number of rows; `twice`: also in panels for few rows.

    With 16-bit units that layout is oneDNN's, whose blocks only `linear` can read; without, it is panels, except that
    PyTorch's library is faster for many rows of float32 weights as stored.
    """
    matrix, outputs = weight.matrix, weight.outputs
    if not matrix.numel():
        return weight
    if has_units_for(matrix):
        blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.detach(), EXPECTED_ROWS)
        few = pack_panels(matrix.detach()) if twice and native.available() else None
        return Weight(blocks, weight.bias, few, outputs)
    packed = pack_many(matrix)
    if packed is matrix:
        return weight
    if packed.dtype == torch.float32 and twice:
        return Weight(matrix, weight.bias, packed, outputs)
    return Weight(packed, weight.bias, None, outputs)


def pack_many(matrices: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*layout"]:
    """Return weights in panels; unchanged where the CPU has units for them, or there are no C++ kernels."""
    if has_units_for(matrices) or matrices.dtype not in native.DTYPES or not native.available():
        return matrices
    return pack_panels(shortened(matrices.detach()))


def has_units_for(matrix: Tensor) -> bool:
    return matrix.dtype == torch.bfloat16 and HAS_BFLOAT16


def shortened(matrix: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*many outputs inputs"]:
    """Return float32 weights of a checkpoint stored in 16 bits as those: the same numbers in half the bytes."""
    if matrix.dtype != torch.float32:
        return matrix
    short = matrix.bfloat16()
    return short if torch.equal(short.float(), matrix) else matrix
