"""Kernels of a GPU that write and read pages of codes."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.kernels.assembly import run_assembly
from tests.support.kernels.coded_pages import KINDS, held, in_codes
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.cuda_attention import MIXES, REAL, Scene
from tests.support.kernels.operations import GPU, PLAIN, attention
from tests.support.models.exact_steps import EXACT
from weft.kernels.cuda.attention.pages import HALVES_OF_CODES, HALVES_OF_INTEGERS
from weft.kernels.interface import Operations
from weft.kernels.pages import decoded, encoded

LAYERS = (
    {"heads": 32, "kv_heads": 8, "head_dim": 128},
    {"heads": 16, "kv_heads": 4, "head_dim": 256},
    {"heads": 8, "kv_heads": 2, "head_dim": 64, "window": 128},
)
NUMERICS = {"usual": GPU, "exact": EXACT}


def attend(scene: Scene, by: Operations, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what kernels find over pages of codes, and what those pages hold says."""
    stored = in_codes(scene.view(), kind)
    found = attention(scene.q, scene.k, scene.v, scene.batch(by), stored, scene.scale, None, scene.sinks)
    k, v = (decoded(*encoded(each, kind), torch.float32) for each in (scene.k, scene.v))
    given = scene.q.float(), k, v, scene.batch(PLAIN), held(stored, torch.float32), scene.scale, None
    return found, attention(*given, scene.sinks.float())


def launch_all() -> None:
    for layer in LAYERS:
        for by, kind in itertools.product(NUMERICS.values(), KINDS.values()):
            for rows in ([(4000, 4001), (63, 64), (0, 1)], [(700, 1000), (64, 65), (10, 13)]):
                scene = Scene(rows, cell=64, dtype=torch.bfloat16, device="cpu", **layer)
                attention(scene.q, scene.k, scene.v, scene.batch(by), in_codes(scene.view(), kind), scene.scale)


@pytest.mark.parametrize(("kind", "instructions"), [("fp8", HALVES_OF_CODES), ("int8", HALVES_OF_INTEGERS)])
def test_words_of_two_codes_become_two_numbers(kind, instructions):
    """By the instructions of a GPU, of all codes but those that no page holds: what is no number, and -128."""
    unused = (127, 255) if kind == "fp8" else (128,)
    codes = torch.tensor([code for code in range(256) if code not in unused], dtype=torch.uint8)
    numbers = [int(each) & 0xFFFF for each in codes.view(KINDS[kind]).half().view(torch.int16)]
    for first, code in enumerate(codes.tolist()):
        second = len(codes) - 1 - first
        other, third = int(codes[second]), first // 2
        # Two words of two tokens lie in a register: their even features become one, their odd ones another.
        word = code | other << 8 | int(codes[third]) << 16 | code << 24
        found = run_assembly(instructions.value, word, outputs=2)
        wanted = numbers[first], numbers[third], numbers[second], numbers[first]
        assert [found >> shift & 0xFFFF for shift in (0, 16, 32, 48)] == [*wanted]


def launch_decodes() -> None:
    for layer, kind in itertools.product(LAYERS, KINDS.values()):
        scene = Scene([(4000, 4001)], cell=64, dtype=torch.bfloat16, device="cpu", **layer)
        attention(scene.q, scene.k, scene.v, scene.batch(GPU), in_codes(scene.view(), kind), scene.scale)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_all)
    assert_compiles(launch_decodes, in_registers=True)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["head_dim"]))
@pytest.mark.parametrize("rows", [*MIXES.values(), REAL], ids=[*MIXES, "real"])
def test_attention_over_codes_is_that_over_what_they_hold(rows, layer, kind, numerics):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        if numerics == "exact" and dtype is torch.float32:
            continue
        found, wanted = attend(
            Scene(rows, cell=64, dtype=dtype, device="cuda", **layer), NUMERICS[numerics], KINDS[kind]
        )
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)
