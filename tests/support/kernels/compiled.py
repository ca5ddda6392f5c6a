"""Whether Triton kernels compile for a GPU (sm_90), on a machine that needs to have none.

A test names functions that launch kernels, on tensors of the CPU; they run in another process, where every launch is
compiled as it would be on the GPU and nothing is executed. So outputs stay as they were allocated:

    def launch_scan() -> None:                     # a top-level function of a test module
        scan(torch.empty(5, 7, dtype=torch.bfloat16), ...)

    def test_kernels_compile_for_sm_90():
        assert_compiles(launch_scan, ...)

All tests of a process share the other one: it takes longer to start than to compile. `python -m
tests.support.kernels.compiled tests.test_x:launch_scan ...` does it by hand and prints registers, spills and shared
memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.fences import ROOT, module_of

WARP = 32
CAPABILITY = 90
# That a program can have: 228 KiB of a multiprocessor, less one that the system keeps.
SHARED_BYTES = 227 << 10
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def assert_compiles(*launches: Callable[[], None], in_registers: bool = False) -> None:
    """Every kernel launched by these functions compiles and fits into shared memory. They are found again by their
    modules and names.

    `in_registers`: nothing that a thread computes with has to be laid aside in memory.
    """
    names = [f"{module_of(Path(launch.__code__.co_filename))}:{launch.__name__}" for launch in launches]
    lines = compile_elsewhere(names)
    assert len(lines) >= len(launches), "nothing was launched"
    assert all(int(size) <= SHARED_BYTES for size in re.findall(r" shared=(\d+) ", "\n".join(lines))), lines
    assert not in_registers or is_older() or all("stack=0 " in line for line in lines), lines


def is_older() -> bool:
    """Return whether Triton is 3.6, which lays up to 160 bytes of a thread of the largest tiles aside."""
    return version("triton").startswith("3.6.")


def compile_elsewhere(names: list[str]) -> list[str]:
    """Return what `compile_launches` finds in the process that compiles."""
    process = compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        print(*names, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        # The next test starts another one.
        compiler.cache_clear()
    assert answer, f"the compiler ended with {process.wait()}"
    found = json.loads(answer)
    assert found["error"] is None, found["error"]
    lines: list[str] = found["lines"]
    return lines


@cache
def compiler() -> subprocess.Popen[str]:
    """Start a process that compiles what it is asked for, until this one has ended."""
    # A Triton other than the installed one may come first.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.kernels.compiled"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def serve() -> None:
    """Answer every line of names with one of JSON. What launches print goes elsewhere."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for request in sys.stdin:
            try:
                found = {"lines": compile_launches(request.split()), "error": None}
            except Exception:
                found = {"lines": [], "error": traceback.format_exc()}
            print(json.dumps(found), file=answers, flush=True)


def compile_launches(names: list[str]) -> list[str]:
    """Return a line for each kernel that these functions launch."""
    from triton.runtime.jit import JITFunction

    from weft.kernels.cuda.launch import overlap

    # As on the GPU that they are compiled for: kernels ask before they are imported, or when they are launched.
    overlap.is_able = lambda device: True
    seen: dict[str, None] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in LAUNCH_OPTIONS if key in kwargs}
        values = dict(zip(kernel.arg_names, args)) | kwargs
        values |= {p.name: p.default for p in kernel.params if p.has_default and p.name not in values}
        seen[compile_one(kernel, values, options)] = None

    JITFunction.run = compile_only
    for name in names:
        module, function = name.split(":")
        getattr(import_module(module), function)()
    return list(seen)


def compile_one(kernel: Any, values: dict[str, Any], options: dict[str, Any]) -> str:
    """One line: the kernel, what it was compiled for and what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else kind_of(value, not parameter.do_not_specialize)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif is_divisible(value) and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, WARP), options=options)
    # Whoever starts early has to wait for those before it.
    assert not values.get("EARLY") or "griddepcontrol.wait" in compiled.asm["ptx"], kernel.__name__
    chosen = {kernel.params[index].name: value for (index,), value in constants.items()}
    return f"{kernel.__name__} {resources(compiled.asm['cubin'])} shared={compiled.metadata.shared} {options} {chosen}"


def kind_of(value: Any, specialized: bool) -> str:
    """As Triton types a launch's argument: what is None, and mostly an integer of 1, are compiled in."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if value is None or (specialized and isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + DTYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{kind_of(value.base, specialized)[1:]}{list(value.block_shape)}>"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


DTYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64", "uint8": "u8",
    "bool": "i1", "float8_e4m3fn": "fp8e4nv", "int8": "i8",
}  # fmt: skip


def is_divisible(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def resources(binary: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    return f"registers={found[1]} stack={found[2]}" if found else "registers=?"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*compile_launches(sys.argv[1:]), sep="\n")
    else:
        serve()
