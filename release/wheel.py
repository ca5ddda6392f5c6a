"""Builds the wheel, with compiled C++ kernels unless it is to be pure Python, and checks what is in it.

    python release/wheel.py [--out dist] [--pure | --here] [--no-isolation]

Everything happens in a copy: the checkout stays as it is. A wheel with kernels is for Linux with the oldest glibc that
they ran against here; build releases in a container with an old one (`.github/workflows/release.yml`). `--pure` builds
the wheel for all other systems. `--here` compiles only the variant that this machine would choose, to save time.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from weft.base import processor  # noqa: E402
from weft.kernels.native import prebuilt  # noqa: E402
from weft.kernels.native.flags import FLAGS  # noqa: E402

PARTS = ("weft", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# The build machine's libstdc++ and libgcc may be newer than the user's.
LINKING = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
MOST_BYTES = 60_000_000
NEEDED = ("weft/py.typed", "weft/builtin/model/config.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python release/wheel.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheel")
    parser.add_argument("--pure", action="store_true", help="without compiled kernels, for any system")
    parser.add_argument("--here", action="store_true", help="only the variant of kernels that this machine uses")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools of this environment")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tree = copied(Path(scratch) / "tree")
        tag = None
        if not arguments.pure:
            variants = chosen(arguments.here)
            built = compile_all(arguments.compiler, variants, tree, Path(scratch))
            tag = f"manylinux_{'_'.join(map(str, glibc_of(built)))}_{platform.machine()}"
        wheel = build(tree, arguments.out, tag, arguments.no_isolation)
    wrong = complaints(wheel)
    for complaint in wrong:
        print(f"wrong: {complaint}", file=sys.stderr)
    print(wheel)
    return 1 if wrong else 0


def copied(tree: Path) -> Path:
    """Copy what a wheel is built from."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


def chosen(here: bool) -> list[prebuilt.Variant]:
    machine = platform.machine()
    found = prebuilt.fitting(machine, processor.instructions())[:1] if here else prebuilt.variants_of(machine)
    if not found:
        raise SystemExit(f"there is no variant of the kernels for this processor ({machine}); pass --pure")
    return found


def compile_all(compiler: str, variants: list[prebuilt.Variant], tree: Path, scratch: Path) -> list[Path]:
    """Compile all files for all variants side by side, and link a library for each variant."""
    folder = tree / prebuilt.FOLDER.relative_to(ROOT)
    folder.mkdir(parents=True)
    # Largest first, so that the longest job is not the last one to start.
    sources = sorted(folder.parent.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            variant: [pool.submit(compile_one, compiler, variant, source, scratch) for source in sources]
            for variant in variants
        }
        return [link(compiler, variant, [job.result() for job in jobs[variant]], folder) for variant in variants]


def compile_one(compiler: str, variant: prebuilt.Variant, source: Path, scratch: Path) -> Path:
    target = scratch / f"{variant.name}-{source.stem}.o"
    subprocess.run([compiler, *FLAGS, *variant.flags, "-c", str(source), "-o", str(target)], check=True)
    return target


def link(compiler: str, variant: prebuilt.Variant, objects: list[Path], folder: Path) -> Path:
    built = folder / f"{variant.name}.so"
    subprocess.run([compiler, *LINKING, "-s", *map(str, objects), "-o", str(built)], check=True)
    return built.rename(folder / prebuilt.file_name(variant, built, folder.parent))


def glibc_of(libraries: list[Path]) -> tuple[int, int]:
    """Return the newest version of glibc whose symbols these libraries need."""
    found = {(int(a), int(b)) for path in libraries for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())}
    return max(found, default=(2, 17))


def build(tree: Path, out: Path, tag: str | None, no_isolation: bool) -> Path:
    """Run the build backend, and return the wheel. A wheel with libraries is for one platform."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tree.parent / "wheel")]
    command += [f"--config-settings=--build-option=--plat-name={tag}"] if tag else []
    command += ["--no-build-isolation"] if no_isolation else []
    subprocess.run([*command, str(tree)], check=True)
    [wheel] = (tree.parent / "wheel").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, out / wheel.name))


def complaints(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: files that do not belong there, missing ones, too many bytes."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wrong = [f"{name} does not belong into a wheel" for name in names if not belongs(name)]
    libraries = [name for name in names if name.endswith(".so")]
    if ("manylinux" in wheel.name) != bool(libraries):
        wrong.append(f"{wheel.name} has {len(libraries)} libraries")
    wrong += [f"{name} is missing" for name in NEEDED if name not in names]
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"{wheel.stat().st_size} bytes are more than {MOST_BYTES}")
    return wrong


def belongs(name: str) -> bool:
    """
    >>> [belongs(name) for name in ("weft/a.py", "weft_serve-0.2.0.dist-info/RECORD", "tests/a.py", "weft/tests/a.py")]
    [True, True, False, False]
    """
    parts = name.split("/")
    ours = parts[0] == "weft" or re.fullmatch(r"weft_serve-[\w.]+\.dist-info", parts[0])
    return bool(ours) and not {"tests", "benchmarks", "training", "__pycache__"} & set(parts)


if __name__ == "__main__":
    sys.exit(main())
