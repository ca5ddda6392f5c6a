"""Integers in groups, NVFP4 and MXFP8 as public tools write them: tables for `quantised.quantise`.

Written from the published layouts, number by number, and knowing nothing of Weft's own form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.models.quantised import LISTED, Write, Written

# Of the sixteen codes of a four-bit float.
FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
# Experts in one tensor are kept wide: gpt-oss's.
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Pack = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]


def words(codes: Tensor, bits: int, dim: int, places: list[int] | None = None) -> Tensor:
    """Return codes in words of 32 bits along a dimension; the last word is filled with zeros."""
    each = 32 // bits
    lines = codes.movedim(dim, -1).long()
    lines = torch.nn.functional.pad(lines, (0, -lines.shape[-1] % each)).unflatten(-1, (-1, each))
    total = torch.zeros(lines.shape[:-1], dtype=torch.long)
    for place, source in enumerate(places or range(each)):
        total |= lines[..., source] << (bits * place)
    return torch.where(total >= 2**31, total - 2**32, total).int().movedim(-1, dim).contiguous()


def integers(
    bits: int, group: int | None, pack: Pack, symmetric: bool = True, shuffled: bool = False, dtype=torch.float16
) -> Write:
    """Return how to write integers in groups; `shuffled`: inputs belong to groups in an order of their own."""

    def write(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs, top = matrix.shape[1], 2**bits - 1
        size = group or inputs
        group_of = torch.arange(inputs) // size
        if shuffled:
            group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        scales, zeros, codes = [], [], torch.empty(matrix.shape, dtype=torch.long)
        decoded = torch.empty(matrix.shape)
        for number in range(int(group_of.max()) + 1):
            own = matrix[:, group_of == number]
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            if symmetric:
                high = torch.maximum(high, -low)
                low = -high
            scale = ((high - low) / top).to(dtype).float().clamp(min=1e-6)
            zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
            code = ((own / scale[:, None]).round() + zero[:, None]).clamp(0, top)
            codes[:, group_of == number] = code.long()
            decoded[:, group_of == number] = (code - zero[:, None]) * scale[:, None]
            scales.append(scale.to(dtype))
            zeros.append(zero.long())
        return pack(codes, torch.stack(scales, 1), torch.stack(zeros, 1), group_of.int()), decoded

    return write


def by_compressed_tensors(bits: int, with_zeros: bool = False, with_order: bool = False) -> Pack:
    def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        found = {
            "_packed": words(codes, bits, 1),
            "_scale": scales,
            "_shape": torch.tensor(codes.shape),
        }
        if with_zeros:
            found["_zero_point"] = words(zeros, bits, 0)
        if with_order:
            found["_g_idx"] = group_of
        return found

    return pack


def as_bytes(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> dict[str, Tensor]:
    return {"": (codes - 128).to(torch.int8), "_scale": scales}


def by_gptq(bits: int, offset: int = 1, with_order: bool = True) -> Pack:
    def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return {
            ".qweight": words(codes.T, bits, 0),
            ".qzeros": words((zeros.T - offset) % 2**bits, bits, 1),
            ".scales": scales.T,
            **({".g_idx": group_of} if with_order else {}),
        }

    return pack


def by_awq(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> dict[str, Tensor]:
    return {
        ".qweight": words(codes.T, 4, 1, AWQ_PLACES),
        ".qzeros": words(zeros.T, 4, 1, AWQ_PLACES),
        ".scales": scales.T,
    }


def compressed(
    format: str, bits: int, kind: str = "int", group: int | None = None, more_ignored=(), **more: Any
) -> dict[str, Any]:
    strategy = {"strategy": "channel" if group is None else "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": bits, "type": kind, "symmetric": True, **strategy, **more}}},
        "ignore": ["lm_head", "re:.*in_proj_(a|b|ba)$", "re:.*\\.gate$", "re:.*shared_expert_gate", "re:.*_[ab]_proj$",
                   "re:.*\\.b_proj$", "re:.*router.*", "re:.*mlp\\.experts\\.(gate_up|down)_proj$", *more_ignored],
    }  # fmt: skip


def gptq(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    skipped = {f"-:.*{name}$": {} for name in [*LISTED, *FUSED]}
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": True, "dynamic": skipped, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate", *FUSED]}  # fmt: skip
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int",
             "packing_format": "auto_round:auto_gptq",
             "extra_config": {f".*{name}$": {"bits": 16, "data_type": "float"} for name in LISTED}}  # fmt: skip

INTEGERS = {
    "compressed-tensors": Written(
        compressed("pack-quantized", 4, group=32),
        integers(4, 32, by_compressed_tensors(4), dtype=torch.bfloat16),
    ),
    "compressed-tensors, zeros": Written(
        compressed("pack-quantized", 4, group=64, symmetric=False),
        integers(4, 64, by_compressed_tensors(4, with_zeros=True), symmetric=False),
    ),
    "compressed-tensors, act-order": Written(
        compressed("pack-quantized", 4, group=32, symmetric=False, actorder="group"),
        integers(4, 32, by_compressed_tensors(4, True, True), symmetric=False, shuffled=True),
    ),
    "compressed-tensors, channels": Written(
        compressed("pack-quantized", 4), integers(4, None, by_compressed_tensors(4), dtype=torch.float32)
    ),
    "compressed-tensors, eight bits": Written(
        compressed("pack-quantized", 8, group=128), integers(8, 128, by_compressed_tensors(8))
    ),
    "compressed-tensors, bytes": Written(compressed("int-quantized", 8), integers(8, None, as_bytes)),
    "GPTQ": Written(gptq(4, 128), integers(4, 128, by_gptq(4))),
    "GPTQ, zeros": Written(
        gptq(4, 32, sym=False), integers(4, 32, by_gptq(4, with_order=False), symmetric=False)
    ),
    "GPTQ 2, act-order": Written(
        gptq(4, 32, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        integers(4, 32, by_gptq(4, offset=0), symmetric=False, shuffled=True),
    ),
    "GPTQ, eight bits": Written(gptq(8, None), integers(8, None, by_gptq(8))),
    "AWQ": Written(AWQ, integers(4, 32, by_awq, symmetric=False)),
    "AutoRound as GPTQ": Written(AUTOROUND, integers(4, 32, by_gptq(4, with_order=False))),
    "AutoRound as AWQ": Written(
        AUTOROUND | {"packing_format": "auto_round:auto_awq", "group_size": 64}, integers(4, 64, by_awq)
    ),
}  # fmt: skip


def nvfp4(divides: bool) -> Write:
    """Return how compressed-tensors, which divides by the global scale, or ModelOpt writes NVFP4."""

    def write(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        factor = matrix.abs().max() / (6 * 448)
        blocks = matrix.unflatten(-1, (-1, 16))
        scales = (blocks.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        own = (scales.float() * factor)[..., None]
        codes = ((blocks / own.clamp(min=1e-30))[..., None] - FLOATS).abs().argmin(-1)
        decoded = (FLOATS[codes] * own).flatten(-2)
        pairs = codes.flatten(-2).to(torch.uint8)
        packed = pairs[..., ::2] | (pairs[..., 1::2] << 4)
        if divides:
            return {"_packed": packed, "_scale": scales, "_global_scale": (1 / factor)[None]}, decoded
        return {"": packed, "_scale": scales, "_scale_2": factor}, decoded

    return write


def mxfp8(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = matrix.unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1).clamp(min=1e-30) / 448).log2().ceil().clamp(min=-127)
    codes = (blocks / exponent.exp2()[..., None]).to(torch.float8_e4m3fn)
    decoded = (codes.float() * exponent.exp2()[..., None]).flatten(-2)
    return {"": codes.flatten(-2), "_scale": (exponent + 127).to(torch.uint8)}, decoded


def modelopt(algorithm: str, *more: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": [f"*{n}" for n in [*LISTED, *FUSED, *more]]}


SMALL_FLOATS = {
    "NVFP4, compressed-tensors": Written(
        compressed("nvfp4-pack-quantized", 4, "float", 16, strategy="tensor_group"), nvfp4(divides=True),
        {".input_global_scale": torch.ones(1)},
    ),
    "NVFP4, ModelOpt": Written(modelopt("NVFP4"), nvfp4(divides=False), {".input_scale": torch.ones(())}),
    "MXFP8, compressed-tensors": Written(
        compressed("mxfp8-quantized", 8, "float", 32, ["re:.*shared_experts?\\.down_proj"]), mxfp8
    ),
    "MXFP8, ModelOpt": Written(modelopt("MXFP8", "*shared_expert*.down_proj"), mxfp8),
}  # fmt: skip
# Each with the number that inputs must be a multiple of.
ALL = {name: (written, 8) for name, written in INTEGERS.items()}
ALL |= {name: (written, 16 if "NVFP4" in name else 32) for name, written in SMALL_FLOATS.items()}
