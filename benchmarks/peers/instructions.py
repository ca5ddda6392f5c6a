"""Instruction sets to which every library of a process can be restricted, and those that this processor has."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# What restricts our kernels, oneDNN, MKL and PyTorch's own kernels.
RESTRICTIONS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {
        "WEFT_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    # Without units for 16 or 8 bits.
    "avx512": {
        "WEFT_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
}
FLAGS = {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"} | {
    "asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve"}  # fmt: skip


def restricted(name: str) -> dict[str, str]:
    """Return the environment of a process that uses this instruction set."""
    return {**os.environ, **RESTRICTIONS[name]}


def flags() -> str:
    """Return the processor's instructions that matter for matmuls."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    known = next(
        (line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    return " ".join(sorted(FLAGS & set(known)))
