"""Kernels that a wheel carries: chosen by what the processor can do, never stale, and used without a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.base import processor
from weft.kernels.native import compiling, library, prebuilt
from weft.kernels.native.prebuilt import AVX2, AVX512, VARIANTS, fitting

XEON, OLD_XEON, ALDER_LAKE, EPYC = (
    [*AVX512, "avx512_vnni", "avx512_bf16", "amx_bf16"],
    AVX512,
    [*AVX2, "avx_vnni"],
    AVX2,
)


@pytest.mark.parametrize(
    ("machine", "instructions", "names"),
    [
        ("x86_64", XEON, ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", OLD_XEON, ["avx512", "avx2"]),
        ("x86_64", ALDER_LAKE, ["avx_vnni", "avx2"]),
        ("x86_64", EPYC, ["avx2"]),
        ("x86_64", ["sse2", "avx"], []),
        ("aarch64", ["asimd", "asimddp"], ["dotprod", "neon"]),
        ("aarch64", ["asimd", "asimddp", "i8mm"], ["i8mm", "dotprod", "neon"]),
        ("aarch64", ["asimd"], ["neon"]),
        ("riscv64", XEON, []),
    ],
)
def test_a_processor_gets_the_best_variant_that_it_can_run(machine, instructions, names):
    assert [each.name for each in fitting(machine, instructions)] == names


def test_a_restricted_instruction_set_gets_that_variant_or_none():
    assert [each.name for each in fitting("x86_64", XEON, "avx2")] == ["avx2"]
    assert [each.name for each in fitting("x86_64", XEON, "sse2")] == []
    assert {each.isa for each in VARIANTS} - {None} <= set(compiling.ISAS)


@pytest.fixture
def shipped(monkeypatch, tmp_path) -> Path:
    """A folder as in a wheel, with a library for this processor that takes no time to compile."""
    able = fitting(platform.machine(), processor.instructions())
    if not able or shutil.which("g++") is None:
        pytest.skip("no variant for this processor, or no compiler to make one")
    source, built = tmp_path / "one.cpp", tmp_path / "one.so"
    source.write_text('extern "C" int one() { return 1; }')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    shutil.copy(built, folder / prebuilt.file_name(able[0], built))
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compiling.SWITCH, raising=False)
    monkeypatch.delenv(processor.ISA, raising=False)
    forget()
    yield folder
    forget()


def forget() -> None:
    for function in (library.library, library.attempt_for):
        function.cache_clear()
    library.Wanted.groups = None


def test_a_shipped_library_needs_no_compiler_and_is_named(shipped, monkeypatch):
    monkeypatch.setattr(library, "find_compiler", None)
    found = library.attempt()
    assert isinstance(found, ctypes.CDLL)
    assert found.one() == 1
    assert library.origin().startswith("prebuilt for ")


@pytest.mark.parametrize("how", ["changed sources", "damage", "asked for"])
def test_otherwise_the_machine_compiles_its_own(shipped, monkeypatch, tmp_path, how):
    [path] = shipped.iterdir()
    if how == "changed sources":
        monkeypatch.setattr(prebuilt, "FLAGS", ("-O0",))
    elif how == "damage":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        monkeypatch.setenv(compiling.SWITCH, compiling.COMPILE)
    sources = tmp_path / "sources"
    sources.mkdir()
    (tmp_path / "one.cpp").rename(sources / "one.cpp")
    monkeypatch.setattr(compiling, "FOLDER", sources)
    assert isinstance(library.attempt(), ctypes.CDLL)
    assert library.origin().startswith("compiled by ")
