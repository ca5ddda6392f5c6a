"""Matmuls with weights, by the fastest routine of this CPU for the number of rows.

Our own kernel reads weights in panels and serves any number of rows. Where the CPU multiplies tiles of bfloat16 in
hardware, oneDNN is faster for more than a few rows. The choice is by measurement (docs/lab/benchmarks.md).
"""

from __future__ import annotations

import platform
from collections.abc import Set

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.base import processor
from weft.kernels import large_pages
from weft.kernels.activations import NAMES, Function
from weft.kernels.cpu.activation import gated_product
from weft.kernels.formats.blocks import OtherInputs
from weft.kernels.formats.rounded import BLOCK as ROUNDED_BLOCK
from weft.kernels.formats.rounded import FP8, INTEGERS, NOTHING, RoundedRows, takes_fp8
from weft.kernels.formats.stored import DENSE, Stored
from weft.kernels.native import library as native
from weft.kernels.native import linear as kernels
from weft.kernels.native.calls import prefers_calls, room
from weft.kernels.native.compiling import instruction_set
from weft.kernels.native.layouts import (
    BLOCKS,
    BLOCKS_AND_PANELS,
    DENSE_AND_PANELS,
    PANELS,
    StoredPanels,
    as_panels,
    panels_of,
)
from weft.kernels.native.linear import pack as pack_panels
from weft.kernels.native.linear import product, stored_product
from weft.kernels.native.packing import PANEL
from weft.kernels.native.stored import name_of
from weft.kernels.native.stored import pack as pack_stored
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
# Outputs of another format that are decoded at a time, so that they stay in the cache until they are multiplied.
DECODED_OUTPUTS = 256
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
        instructions += f", restricted to {instruction_set()}"
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
    bias = weight.bias
    if len(weight.parts) == 1:
        return multiplied(x, weight.parts[0], bias)
    sizes = [part.outputs for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    if x.ndim == 2 and x.shape[0] and all(are_in_panels(x, part) for part in weight.parts):
        joined = room((x.shape[0], weight.outputs), x.dtype)
        for part, own, y in zip(weight.parts, biases, joined.split(sizes, -1)):
            panel_product(x, part, own, y=y)
        return joined
    return torch.cat([multiplied(x, part, own) for part, own in zip(weight.parts, biases)], -1)


def are_in_panels(x: Tensor, part: Stored) -> bool:
    """Return whether one of our own kernels multiplies with a part, and with nothing else."""
    return part.format is PANELS or (isinstance(part.format, StoredPanels) and x.dtype in native.DTYPES)


def panel_product(
    x: Float[Tensor, "n inputs"],
    part: Stored,
    bias: Tensor | None,
    activation: Function | None = None,
    parts: int = 1,
    y: Tensor | None = None,
) -> Float[Tensor, "n results"]:
    x = x if x.stride(1) == 1 else x.contiguous()
    if part.format is PANELS:
        return product(x, part.tensors[0], part.outputs, bias, activation, parts, y=y)
    return stored_product(x, part, bias, activation, parts, y)


def multiplied(x: Float[Tensor, "*n inputs"], part: Stored, bias: Tensor | None) -> Float[Tensor, "*n outputs"]:
    if isinstance(part.format, OtherInputs):
        return multiplied(take_columns(x, part.tensors[-1]), part.format.as_stored(part), bias)
    if isinstance(part.format, RoundedRows):
        rows, own = part.format.rounded(x), None if bias is None else bias.float()
        return multiplied(rows, part.format.as_stored(part), own).to(x.dtype)
    if isinstance(part.format, StoredPanels):
        return multiplied_as_stored(x, part, bias)
    panels = panels_of(part)
    if panels is not None and reads_panels(x, part):
        return product(x, panels, part.outputs, bias)
    if part.format is PANELS:
        return product(as_rows(x), part.tensors[0], part.outputs, bias).view(*x.shape[:-1], part.outputs)
    matrix = part.tensors[0]
    if part.format in (BLOCKS, BLOCKS_AND_PANELS):
        return _onednn(x, matrix, bias)
    if part.format not in (DENSE, DENSE_AND_PANELS):
        return decoded_product(x, part, bias)
    if must_widen(matrix):
        return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
    if x.ndim == 2 and len(x) <= WEIGHTS_FIRST_ROWS and matrix.dtype == torch.bfloat16:
        return _weights_first(x, matrix, bias)
    return F.linear(x, matrix, bias)


def decoded_product(x: Float[Tensor, "*n inputs"], part: Stored, bias: Tensor | None) -> Float[Tensor, "*n outputs"]:
    """Multiply with a matrix of another format, which is decoded some outputs at a time.

    With C++, a sum adds its products in the order of the inputs, whatever the number of rows.
    """
    rows, found = as_rows(x).float(), []
    for start in range(0, part.outputs, DECODED_OUTPUTS):
        end = min(start + DECODED_OUTPUTS, part.outputs)
        tile = part.format.rows(part, torch.arange(start, end)).decode()
        if native.available() and rows.numel():
            found.append(product(rows, pack_panels(tile), end - start))
        else:
            found.append(F.linear(rows, tile))
    y = torch.cat(found, -1)
    return (y if bias is None else y + bias.float()).to(x.dtype).view(*x.shape[:-1], part.outputs)


def multiplied_as_stored(
    x: Float[Tensor, "*n inputs"], part: Stored, bias: Tensor | None
) -> Float[Tensor, "*n outputs"]:
    """Multiply with panels of a stored format, rows of any shape and dtype."""
    shape = (*x.shape[:-1], part.outputs)
    if not x.numel():
        return x.new_zeros(shape)
    if x.dtype not in native.DTYPES:
        return multiplied_as_stored(x.float(), part, None if bias is None else bias.float()).to(x.dtype)
    rows = x if x.ndim == 2 and x.stride(1) == 1 else as_rows(x)
    return stored_product(rows, part, bias).view(shape)


def take_columns(x: Float[Tensor, "*n inputs"], order: Int[Tensor, " inputs"]) -> Float[Tensor, "*n inputs"]:
    """Return inputs in the order in which a matrix is stored."""
    fits = x.ndim == 2 and x.shape[0] > 0 and x.stride(1) == 1 and x.dtype in native.DTYPES
    return kernels.take_columns(x, order) if fits and native.available() else x.index_select(-1, order)


def linear_into_stream(x: Normed, weight: Weight) -> Addend:
    return linear(x, weight)


def activated_linear(x: Normed, weight: Weight, activation: Function, parts: int = 1) -> Float[Tensor, "n results"]:
    """Return activation(linear(x)); with two parts side by side, activation(first) * second."""
    assert isinstance(x, Tensor)
    fits = len(weight.parts) == 1 and (parts == 1 or weight.outputs % (parts * PANEL) == 0)
    if activation in NAMES and fits and x.ndim == 2 and x.shape[0] and are_in_panels(x, weight.parts[0]):
        return panel_product(x, weight.parts[0], weight.bias, activation, parts)
    panels = panels_of(weight.parts[0]) if activation in NAMES and fits else None
    if panels is not None and reads_panels(x, weight.parts[0]):
        return product(x, panels, weight.outputs, weight.bias, activation, parts)
    projected = linear(x, weight)
    if parts == 1:
        return activation(projected)
    gate, gated = projected.chunk(2, -1)
    return gated_product(gate, gated, activation)


def reads_panels(x: Tensor, part: Stored) -> bool:
    """Return whether to multiply these rows with a matrix's panels, without a copy of the rows."""
    fits = x.ndim == 2 and x.shape[0] > 0 and x.stride(1) == 1
    return fits and (part.format is PANELS or x.shape[0] <= FEW_ROWS[x.dtype] or prefers_calls(x.shape[0]))


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


def prepare(weight: Weight, twice: bool, rounds: Set[str] = NOTHING) -> Weight:
    """Return the weights in the fastest layout for any number of rows; `twice`: also in panels for few rows.

    With 16-bit units that layout is oneDNN's, whose blocks only `linear` can read; without, it is panels, except that
    PyTorch's library is faster for many rows of float32 weights as stored. `rounds`: what rows are rounded to, where
    formats have kernels for that.
    """
    return Weight(tuple(prepared(part, twice, rounds) for part in weight.parts), weight.bias)


def prepared(part: Stored, twice: bool, rounds: Set[str] = NOTHING) -> Stored:
    matrix, sizes = part.dense, (part.outputs, part.inputs)
    if matrix is None:
        return prepared_as_stored(part, rounds)
    if not matrix.numel():
        return part
    if has_units_for(matrix):
        blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.detach(), EXPECTED_ROWS)
        if twice and native.available():
            return Stored(BLOCKS_AND_PANELS, (blocks, pack_panels(matrix.detach(), large_pages.empty)), *sizes)
        return Stored(BLOCKS, (blocks,), *sizes)
    packed = pack_many(matrix)
    if packed is matrix:
        return part
    if packed.dtype == torch.float32 and twice:
        return Stored(DENSE_AND_PANELS, (matrix, packed), *sizes)
    return as_panels(part, packed)


def prepared_as_stored(part: Stored, rounds: Set[str]) -> Stored:
    """Return a matrix, or all experts', of another format in panels, if there is a kernel for it."""
    if isinstance(part.format, OtherInputs):
        inner = prepared_as_stored(part.format.as_stored(part), rounds)
        return OtherInputs.of(inner, part.tensors[-1])
    packed = pack_stored(part, INTEGERS in rounds) if native.available() else None
    if FP8 in rounds and takes_fp8(part):
        return RoundedRows.of(packed or part, FP8)
    if packed is not None:
        return packed
    has_integers = INTEGERS in rounds and name_of(part.format) is not None and part.inputs % ROUNDED_BLOCK == 0
    return RoundedRows.of(part, INTEGERS) if has_integers else part


def pack_many(matrices: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*layout"]:
    """Return weights in panels; unchanged where the CPU has units for them, or there are no C++ kernels."""
    if has_units_for(matrices) or matrices.dtype not in native.DTYPES or not native.available():
        return matrices
    return pack_panels(shortened(matrices.detach()), large_pages.empty)


def has_units_for(matrix: Tensor) -> bool:
    return matrix.dtype == torch.bfloat16 and HAS_BFLOAT16


def shortened(matrix: Float[Tensor, "*many outputs inputs"]) -> Float[Tensor, "*many outputs inputs"]:
    """Return float32 weights of a checkpoint stored in 16 bits as those: the same numbers in half the bytes."""
    if matrix.dtype != torch.float32:
        return matrix
    short = matrix.bfloat16()
    return short if torch.equal(short.float(), matrix) else matrix
