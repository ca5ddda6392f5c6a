"""Laws of all recurrent mixers, in each package: whatever rows its tokens come in, a mixer equals a loop over tokens.

What only one mixer has is tested in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.support.kernels import causal_conv, channel_delta, gated_delta, ssd
from tests.support.kernels.operations import CPU, PLAIN
from tests.support.kernels.plans import Rig

LENGTHS = [50, 33, 24, 8, 7, 1, 65]
STEPS = [1, 1, 2, 3, 5, 8, 9, 16, 27]
MIXERS = {
    "causal_conv": causal_conv.make_rig,
    "ssd": ssd.make_rig,
    "gated_delta": gated_delta.make_rig,
    "channel_delta": channel_delta.make_rig,
}
PACKAGES = {"cpu": CPU, "plain": PLAIN}
# Other shapes than the usual one.
SHAPES = {
    "causal_conv": [
        {"width": width, "bias": odd, "activation": odd} for width in (2, 3, 4, 5) for odd in (True, False)
    ],
    "ssd": [{"groups": 1}, {"groups": 4}, {"skip": False}, {"state": 24}],
    "gated_delta": [{"key_heads": 1, "value_heads": 1}, {"key_heads": 3, "value_heads": 3}],
    "channel_delta": [{"sizes": (1, 8, 3)}],
}
# How much a token forgets: next to nothing, and all.
WEAK = {"ssd": {"dt_scale": 0.05}, "gated_delta": {"decay": 0.05}, "channel_delta": {"decay": 0.05}}
STRONG = {"ssd": {"dt_scale": 200.0}, "gated_delta": {"decay": 300.0}, "channel_delta": {"decay": 300.0, "cell": 32}}

MakeRig = Callable[..., Rig]


@pytest.fixture(params=[(mixer, package) for mixer in MIXERS for package in PACKAGES], ids="-".join)
def make_rig(request: pytest.FixtureRequest) -> MakeRig:
    mixer, package = request.param
    return partial(MIXERS[mixer], operations=PACKAGES[package])


@pytest.mark.parametrize("room", [0, 3])
def test_packed_rows_of_any_length_equal_the_loop(make_rig: MakeRig, room: int) -> None:
    for seed in range(4):
        make_rig(LENGTHS, room=room, seed=seed).run(STEPS)


@pytest.mark.parametrize(("mixer", "shape"), [(mixer, shape) for mixer in SHAPES for shape in SHAPES[mixer]])
@pytest.mark.parametrize("package", PACKAGES)
def test_packed_rows_of_any_shape_equal_the_loop(mixer: str, shape: dict[str, object], package: str) -> None:
    MIXERS[mixer](LENGTHS, room=3, operations=PACKAGES[package], **shape).run(STEPS)


def test_more_rows_than_a_group_holds_equal_the_loop(make_rig: MakeRig) -> None:
    make_rig([*range(2, 40, 2)]).run([2, 5, 8, 16, 30])


@pytest.mark.parametrize("mixer", WEAK)
@pytest.mark.parametrize("package", PACKAGES)
def test_full_cells_of_64_equal_the_loop(mixer: str, package: str) -> None:
    rig = MIXERS[mixer]([200, 128, 64, 63, 5], cell=64, operations=PACKAGES[package], **WEAK[mixer])
    rig.run([1, 7, 64, 65, 128])


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
def test_any_chunking_gives_the_same(make_rig: MakeRig, chunk: int) -> None:
    make_rig([64, 64, 30]).run([chunk])


@pytest.mark.parametrize("room", [0, 3])
def test_one_sequence_alone_equals_the_loop(make_rig: MakeRig, room: int) -> None:
    make_rig([70], room=room).run([1, 1, 1, 1, 2, 5, 16])


@pytest.mark.parametrize("mixer", STRONG)
@pytest.mark.parametrize("package", PACKAGES)
def test_strong_decay_neither_overflows_nor_leaks(mixer: str, package: str) -> None:
    rig = MIXERS[mixer]([50, 33], operations=PACKAGES[package], **STRONG[mixer])
    rig.tolerance = 1e-4
    rig.run([1, 3, 8, 20])


def test_first_row_of_a_sequence_sees_no_earlier_tenant(make_rig: MakeRig) -> None:
    rig = make_rig([20, 20])
    rig.step([(0, 20)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 19)])


def test_a_row_of_nan_stays_alone(make_rig: MakeRig) -> None:
    rig = make_rig([30, 30, 30])
    for tensor in (*rig.sequences[0].inputs, *rig.sequences[0].outputs, *rig.sequences[0].states.values()):
        tensor.fill_(float("nan"))
    rig.compare = lambda found, answer, what: torch.testing.assert_close(
        found[~answer.isnan()], answer[~answer.isnan()], rtol=2e-5, atol=2e-5, msg=what
    )
    rig.run([1, 2, 5, 8])


def test_rejected_drafts_leave_no_trace(make_rig: MakeRig) -> None:
    for seed in range(4):
        rig = make_rig([60, 55, 50], room=5, seed=seed)
        rig.step([(0, 14), (1, 7), (2, 1)])
        rig.run_with_drafts(6)


@pytest.mark.parametrize("mixer", ["causal_conv", "ssd", "gated_delta"])
def test_bfloat16_inputs_are_computed_in_float32(mixer: str) -> None:
    rig = MIXERS[mixer]([50, 20, 9], dtype=torch.bfloat16)
    rig.tolerance = 1e-2
    rig.run([1, 2, 9, 16])
