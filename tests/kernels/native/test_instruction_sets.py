"""C++ kernels for other processors than this one: fewer instructions, another compiler, another architecture."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from itertools import product

import pytest

from tests.support.fences import ROOT
from weft.base import processor
from weft.kernels.cpu import linear
from weft.kernels.native import compiling, library
from weft.kernels.native.flags import FLAGS

NATIVE = sorted(compiling.FOLDER.glob("*.cpp"))
IS_ARM = platform.machine() in ("aarch64", "arm64")
# Restricted sets that this CPU can run, by the feature that each needs.
RUNNABLE = [
    isa
    for isa, needed in {"avx2": "avx2", "avx512": "avx512f", "neon": "asimd"}.items()
    if needed in processor.features()
]
# The compiler, emulator and instruction sets of the other architecture.
OTHER = (
    ("x86_64-linux-gnu-g++", "qemu-x86_64", ("x86-64", "x86-64-v3"), ("x86-64-v4",))
    if IS_ARM
    else (
        "aarch64-linux-gnu-g++",
        "qemu-aarch64",
        ("armv8-a", "armv8.2-a+dotprod", "armv8.2-a+dotprod+i8mm"),
        ("armv8.6-a",),
    )
)

# Programs for an emulator, the kernels that they call, and the cases that they compare.
CHECKS = (
    ("native_check", ("linear", "stored"), 348),
    ("native_attention_check", ("attention", "coded_attention"), 128),
)


def test_an_unknown_instruction_set_is_refused_with_those_that_are_known(monkeypatch):
    monkeypatch.setenv(processor.ISA, "mmx")
    with pytest.raises(compiling.Unavailable, match=r"WEFT_ISA must be one of native, .*neon, got 'mmx'"):
        library.load()


def test_a_restricted_set_has_a_library_of_its_own(monkeypatch):
    if not library.available():
        pytest.skip("no C++ compiler here")
    monkeypatch.delenv(processor.ISA, raising=False)
    compiler = compiling.find_compiler()
    found = {compiling.fingerprint(compiler, NATIVE)}
    for isa in compiling.ISAS:
        monkeypatch.setenv(processor.ISA, isa)
        found.add(compiling.fingerprint(compiler, NATIVE))
        assert compiling.flags()[-1].endswith(f"={compiling.ISAS[isa]}")
    assert len(found) == len(compiling.ISAS), "native is the default"


def test_a_restricted_set_has_no_16_bit_units(monkeypatch):
    monkeypatch.setattr(linear, "HAS_ONEDNN", True)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(processor, "facts", lambda: {"flags": "avx512f avx512_bf16"})
    monkeypatch.setenv(processor.ISA, "avx2")
    assert not linear.has_units()
    assert "restricted to avx2" in linear.described()
    monkeypatch.setenv(processor.ISA, "native")
    assert linear.has_units()


def test_avx512_without_16_bit_units_is_not_mistaken_for_a_cpu_with_them(monkeypatch):
    """oneDNN supports bfloat16 on all of AVX-512, by emulation."""
    monkeypatch.setattr(linear, "HAS_ONEDNN", True)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.delenv(processor.ISA, raising=False)
    for flags, expected in {"avx2": False, "avx512f avx512bw": False, "avx512f amx_bf16": True}.items():
        monkeypatch.setattr(processor, "facts", lambda flags=flags: {"flags": flags})
        assert linear.has_units() == expected, flags


def called(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("isa", RUNNABLE)
def test_kernels_are_right_with_fewer_instructions(isa):
    folder = "tests/kernels/native"
    tests = [
        f"{folder}/test_native_{name}.py"
        for name in ("linear", "stored", "norm", "attention", "coded_attention", "conv", "ssd", "gated_delta")
    ]
    found = called([sys.executable, "-m", "pytest", "-q", *tests], WEFT_ISA=isa)
    assert " passed" in found
    assert "skipped" not in found


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in RUNNABLE or shutil.which("g++") is None, reason="g++ and AVX2 are needed")
def test_rows_keep_their_bits_where_the_compiler_avoids_chains_of_fused_sums(tmp_path):
    """Tuned for Zen, GCC does not fuse a product into the only sum of a loop: with one row, but not with several."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -mtune=znver3\n')
    compiler.chmod(0o755)
    folder = "tests/kernels/native"
    tests = [f"{folder}/test_native_{name}.py" for name in ("linear", "stored", "moe")]
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path), "WEFT_ISA": "avx2"}
    assert " passed" in called([sys.executable, "-m", "pytest", "-q", *tests], **environment)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")
def test_clang_compiles_kernels_that_are_right(tmp_path):
    tests = ["tests/kernels/native/test_native_linear.py", "tests/kernels/native/test_native_attention.py"]
    environment = {"CXX": "clang++", "XDG_CACHE_HOME": str(tmp_path)}
    assert " passed" in called([sys.executable, "-m", "pytest", "-q", *tests], **environment)


@pytest.mark.slow
@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in OTHER[:2]), reason=f"{OTHER[0]} and {OTHER[1]} are not installed"
)
def test_the_other_architecture_compiles_all_kernels_and_computes_right(tmp_path):
    compiler, emulator, runs, only_compiles = OTHER
    for architecture in (*runs, *only_compiles):
        flags = [*FLAGS, f"-march={architecture}"]
        for source in NATIVE:
            called([compiler, *flags, "-c", str(source), "-o", str(tmp_path / "kernel.o")])
    for architecture, (check, names, cases) in product(runs, CHECKS):
        program = tmp_path / f"{check}-{architecture}"
        own = ROOT / "tests" / "support" / "kernels" / f"{check}.cpp"
        sources = [str(own), *(str(compiling.FOLDER / f"{name}.cpp") for name in (*names, "pool"))]
        flags = [flag for flag in FLAGS if flag != "-fPIC"]
        called([compiler, *flags, f"-march={architecture}", *sources, "-o", str(program)])
        libraries = f"/usr/{compiler.removesuffix('-g++')}"
        assert int(called([emulator, "-cpu", "max", "-L", libraries, str(program)])) == cases
