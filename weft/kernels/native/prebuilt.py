"""C++ kernels that a wheel carries: one library for each set of instructions, chosen when it is loaded.

`release/wheel.py` compiles them; a checkout has none. A library's name has the fingerprint of the sources and flags
that it was compiled from, so that changed sources are never served by an old one, and a checksum of its content.
Names of instructions are those of /proc/cpuinfo, which come from CPUID.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from weft.base import processor
from weft.kernels.native.flags import FLAGS

SOURCES = Path(__file__).parent
FOLDER = SOURCES / "prebuilt"
# As compiled on the machine itself, apart from the processor.
AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions that kernels are compiled for. `isa` is what WEFT_ISA restricts to it, besides `native`."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    isa: str | None = None


# The most capable first. Tiles (AMX) of bfloat16 are multiplied by oneDNN, and those of integers bring a tenth, so no
# kernel here has a variant for them.
VARIANTS = (
    Variant("avx512_vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), (*AVX512, "avx512_vnni")),
    Variant("avx512", "x86_64", ("-march=x86-64-v4",), AVX512, "avx512"),
    Variant("avx_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), (*AVX2, "avx_vnni")),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), AVX2, "avx2"),
    Variant("i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm",), ("asimd", "asimddp", "i8mm")),
    Variant("dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), ("asimd", "asimddp")),
    Variant("neon", "aarch64", ("-march=armv8-a",), ("asimd",), "neon"),
)


def variants_of(machine: str) -> list[Variant]:
    return [each for each in VARIANTS if each.machine == machine]


def find(isa: str = "native") -> tuple[str, Path] | None:
    """Return the name and file of the best library for this processor that was compiled from these sources."""
    if not FOLDER.is_dir():
        return None
    for variant in fitting(platform.machine(), processor.instructions(), isa):
        found = sorted(FOLDER.glob(f"kernels-{variant.name}-{fingerprint(variant)}-*.so"))
        if found:
            return variant.name, found[0]
    return None


def fitting(machine: str, instructions: Collection[str], isa: str = "native") -> list[Variant]:
    """Return the variants that a processor can run, the best first.

    >>> [each.name for each in fitting("x86_64", [*AVX512, "avx512_vnni"])]
    ['avx512_vnni', 'avx512', 'avx2']
    >>> [each.name for each in fitting("x86_64", AVX512, "avx2")], fitting("x86_64", ["sse2"])
    (['avx2'], [])
    """
    able = [each for each in variants_of(machine) if set(each.needs) <= set(instructions)]
    return able if isa == "native" else [each for each in able if each.isa == isa]


def fingerprint(variant: Variant, sources: Path = SOURCES) -> str:
    """Return a hash of the sources and of what decides what they compute."""
    digest = hashlib.sha256(" ".join([*FLAGS, *variant.flags]).encode())
    for path in source_files(sources):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def file_name(variant: Variant, library: Path, sources: Path = SOURCES) -> str:
    return f"kernels-{variant.name}-{fingerprint(variant, sources)}-{checksum(library)}.so"


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def source_files(folder: Path) -> Iterable[Path]:
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
