"""How units are laid out in the buffer: every byte has one owner, and a tail's tokens lie as its parts wish."""

from __future__ import annotations

import torch

from weft.device.store import RecurrentView, Store
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec, Part, RecurrentMemory

MEMORY = RecurrentMemory(
    state=(Part("matrix", (3, 2), "float32"),),
    tail=(
        Part("conv", (5,), "float32"),
        Part("by_token", (3, 2), "float32"),
        Part("by_head", (3, 2), "float32", apart=1),
        Part("number_by_head", (3,), "float32", apart=1),
    ),
    conv_width=4,
)


def view_of(store: Store) -> RecurrentView:
    (view,) = store.views
    assert isinstance(view, RecurrentView)
    return view


def test_a_part_may_lie_head_by_head() -> None:
    """The same index finds a token's numbers; but in memory the tokens of a head follow one another."""
    spec = MemorySpec((MEMORY,), cell=8)
    tail = view_of(Store(spec, 1 << 14)).tail
    assert tail["by_token"].shape[1:] == tail["by_head"].shape[1:] == (8, 3, 2)
    assert tail["number_by_head"].shape[1:] == (8, 3)
    assert tail["by_token"].stride()[1:] == (6, 2, 1)
    assert tail["by_head"].stride()[1:] == (2, 16, 1)
    assert tail["number_by_head"].stride()[1:] == (1, 8)


def test_parts_of_a_tail_share_no_byte_and_stay_in_their_unit() -> None:
    spec = MemorySpec((MEMORY, MEMORY), cell=8, draft_room=3)
    store = Store(spec, 1 << 14)
    owners = [part for view in store.views for part in view.tail.values()]
    for number, part in enumerate(owners, 1):
        part[2].fill_(float(number))
    for number, part in enumerate(owners, 1):
        assert bool((part[2] == number).all())
    inside = store.unit(Kind.TAIL, 2).clone()
    store.unit(Kind.TAIL, 2).zero_()
    assert not store.buffer.any(), "nothing lies outside of its unit"
    assert int((inside.view(torch.float32) != 0).sum()) == sum(part[2].numel() for part in owners)


def test_a_tail_with_room_for_whole_cells_has_the_fewest_that_hold_its_drafts() -> None:
    inputs, keys = Part("conv", (4,), "float32"), Part("k", (4,), "float32", whole_cells=True)
    memory = RecurrentMemory((), (inputs, keys), conv_width=4)
    for room, wanted in ((0, 8), (1, 16), (8, 16), (9, 24)):
        spec = MemorySpec((memory,), cell=8, draft_room=room)
        assert [spec.ring(memory, part) for part in memory.tail] == [3 + room, wanted]
