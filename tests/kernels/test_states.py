"""States in fewer bits: what is stored can be read back nearly, and every kernel rounds at every border of a cell."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.support.kernels.native_rows import needs_compiler
from tests.support.kernels.operations import CPU, NATIVE, PLAIN
from tests.support.kernels.small_states import RULES, Twins
from weft.device.store import RecurrentView, Store
from weft.kernels import states
from weft.kernels.cpu import recurrence
from weft.kernels.cpu import ssd as on_cpu
from weft.kernels.states import LEAST, LINES, States, decoded, encoded, state_parts
from weft.memory.spec import MemorySpec, RecurrentMemory

OPERATIONS = {"plain": PLAIN, "cpu": CPU}


@pytest.mark.parametrize("lines", [1, 31, 32, 33, 128])
def test_numbers_are_held_to_half_a_code(lines):
    torch.manual_seed(lines)
    state = torch.randn(6, lines, 9) * torch.randn(6, 1, 9).exp() ** 8
    codes, scales = encoded(state)
    assert scales.shape == (6, -(-lines // LINES), 9)
    step = scales.float().repeat_interleave(LINES, 1)[:, :lines]
    assert ((decoded(codes, scales) - state).abs() <= step * 0.51).all()
    # Each 32 lines of a column use all codes.
    largest = torch.stack([part.abs().amax(1) for part in codes.split(LINES, 1)], 1)
    assert (largest >= 126).all()


def test_zeros_and_what_is_no_number():
    state = torch.zeros(1, 2 * LINES, 4)
    state[0, 3, 1], state[0, 4, 2], state[0, LINES, 3] = torch.nan, torch.inf, LEAST / 4
    found = decoded(*encoded(state))
    assert torch.equal(found[0, :, 0], torch.zeros(2 * LINES))
    # Nothing beside what is no number looks like one, and other blocks stay as they are.
    assert found[0, :LINES, 1:3].isnan().all()
    assert torch.equal(found[0, LINES:], torch.zeros(LINES, 4))


def test_a_state_takes_a_byte_for_each_number_and_two_for_each_32():
    wide, half, small = (
        MemorySpec((RecurrentMemory(state_parts("ssm", (8, 128, 512), dtype), (), 1),))
        for dtype in ("float32", "bfloat16", "int8")
    )
    assert half.state_bytes / wide.state_bytes == 0.5
    assert small.state_bytes / wide.state_bytes == (1 + 2 / LINES) / 4
    # No two parts share a byte.
    view = Store(small, 3 * small.state_bytes).views[0]
    for number, part in enumerate(view.state.values()):
        part[1].view(torch.uint8).fill_(number + 1)
    for number, part in enumerate(view.state.values()):
        assert (part[1].view(torch.uint8) == number + 1).all()
        assert (part[::2].contiguous().view(torch.uint8) == 0).all()


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", OPERATIONS)
def test_one_row_is_that_of_float32_cut_and_rounded_at_every_border(by, rule, stored):
    if by == "cpu":
        Twins(RULES[rule](), OPERATIONS[by], stored, [90]).run([1, 1, 3, 16, 40])
    Twins(RULES[rule](), OPERATIONS[by], stored, [52]).run([1, 3, 16, 40])


@needs_compiler
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_decodes_in_cpp_are_those_of_float32(rule, stored):
    """With states of several widths: columns are widened some at a time."""
    Twins(RULES[rule](), NATIVE, stored, [52, 40, 33, 16]).run([1])
    sizes = {"ssd": (3, 30, 37, 1), "gated_delta": (1, 70, 2, 81), "channel_delta": (2, 33, 67)}[rule]
    rows = Twins(RULES[rule](*sizes), NATIVE, stored, [30, 20], room=2)
    rows.step([(0, 15)])
    rows.step([(1, 13)])
    rows.run([1])


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_beside_each_other_keep_their_own_states(rule, stored):
    """Sums of several rows are taken in another order, and what is rounded may differ by one code."""
    rows = Twins(RULES[rule](), CPU, stored, [70, 33, 48, 7, 64], tolerance=0.01)
    rows.run([1, 1, 2, 16, 17, 40])


# Planted bugs --------------------------------------------------------------------------------------------------------


class Kept(States):
    """States of which what was computed can still be read."""

    computed: torch.Tensor
    by_slot: ClassVar[dict[int, torch.Tensor]] = {}

    def rounded(self, new: torch.Tensor) -> Kept:
        found = Kept(*States.rounded(self, new))
        found.computed = new
        return found


def leave_a_border_inside_a_prompt_unrounded(patch: pytest.MonkeyPatch) -> None:
    def states_of(view: RecurrentView, name: str) -> States:
        return Kept(*states.states_of(view, name))

    patch.setattr(Kept, "wide", lambda self: self.computed)
    patch.setattr(recurrence, "states_of", states_of)


def read_a_state_that_a_decode_has_not_rounded(patch: pytest.MonkeyPatch) -> None:
    def write(self: Kept, slot: int, new: Kept, number: int) -> None:
        States.write(self, slot, new, number)
        Kept.by_slot[slot] = new.computed[number]

    def states_of(view: RecurrentView, name: str) -> States:
        found = states.states_of(view, name)
        return found if found.scales is None else Kept(*found)

    for module in (recurrence, on_cpu):
        patch.setattr(module, "states_of", states_of)
    patch.setattr(Kept, "by_slot", {})
    patch.setattr(Kept, "write", write)
    patch.setattr(Kept, "read", lambda self, slot: Kept.by_slot[slot])


def take_the_scales_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    def write(self: States, slot: int, new: States, number: int) -> None:
        assert self.scales is not None
        assert new.scales is not None
        self.numbers[slot], self.scales[slot] = new.numbers[number], new.scales[number - 1]

    patch.setattr(States, "write", write)


def take_the_scale_of_the_block_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "decoded", lambda codes, scales: decoded(codes, scales.roll(1, -2)))


PLANTS = {
    leave_a_border_inside_a_prompt_unrounded: ([52], [40]),
    read_a_state_that_a_decode_has_not_rounded: ([52], [1]),
    take_the_scales_of_the_row_before: ([52, 40], [16]),
    take_the_scale_of_the_block_before: ([52], [16]),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    lengths, chunks = PLANTS[plant]
    tolerance = None if len(lengths) == 1 else 0.01
    Twins(RULES["ssd"](), CPU, "int8", lengths, tolerance=tolerance).run(chunks)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        Twins(RULES["ssd"](), CPU, "int8", lengths, tolerance=tolerance).run(chunks)
