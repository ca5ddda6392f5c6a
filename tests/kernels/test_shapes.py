"""Shapes that stand in signatures are true: some tests run again with every call checked against its signature.

Apart, in a process of its own, because checking costs as much again as computing does on models this small.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fences import ROOT

PACKAGES = ("weft.kernels", "weft.models", "weft.runner")
CHECKER = "beartype.beartype"
TESTS = (
    "tests/kernels/test_causal_conv.py::test_windows_may_reach_behind_the_cell[8]",
    # As decodes, and in pieces of a cell.
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[ssd-cpu-1]",
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[ssd-cpu-64]",
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[gated_delta-cpu-1]",
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[gated_delta-cpu-64]",
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[channel_delta-cpu-1]",
    "tests/kernels/test_recurrent.py::test_any_chunking_gives_the_same[channel_delta-cpu-64]",
    "tests/kernels/test_attention.py::test_blocks_of_queries_change_nothing",
    "tests/kernels/test_attention.py::test_a_common_beginning_read_once_equals_reading_it_for_each",
    "tests/kernels/test_latent_attention.py::test_sizes_may_be_odd",
    "tests/kernels/test_moe.py",
    "tests/kernels/test_rotary.py::test_layer_types_have_their_own_rotation",
    "tests/kernels/test_rotary.py::test_turning_equals_complex_multiplication",
    "tests/kernels/test_rotary.py::test_dimensions_behind_the_rotary_part_pass",
    "tests/kernels/test_rotary.py::test_amplitude_scales_cosines_and_sines",
    "tests/kernels/test_norm.py",
    "tests/runner/test_runner.py::test_landings_bring_narrow_arrays_in_the_order_of_the_plan",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.thorough
def test_every_call_keeps_to_the_shapes_of_its_signature():
    found = run("-m", "pytest", "-q", f"--jaxtyping-packages={','.join((*PACKAGES, CHECKER))}", *TESTS)
    assert found.returncode == 0, found.stdout[-3000:]


@pytest.mark.thorough
def test_a_wrong_shape_is_seen():
    code = f"""
from jaxtyping import TypeCheckError, install_import_hook
with install_import_hook({PACKAGES}, "{CHECKER}"):
    from weft.kernels.cpu.sampling import likeliest
import torch
likeliest(torch.zeros(2, 3))
try:
    likeliest(torch.zeros(2, 3, 4))
except TypeCheckError:
    print("seen")
"""
    assert run("-c", code).stdout == "seen\n"
