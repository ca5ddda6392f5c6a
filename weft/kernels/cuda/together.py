"""Independent work, such as the mixers of one block, on two streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.overlap import branch_of, branching
from weft.kernels.interface import Batch, DecodeSteps

# Rows up to which two streams were measured to be faster, on whole decode steps of a 7B model on an H200: by 4 % with
# one row, by 1 % at this limit. Beyond it, each piece of work keeps the memory busy alone.
MOST_ROWS = 128


def run_together(x: Tensor, one: Callable[[], object], *others: Callable[[], object]) -> None:
    """Run all of it; in a recorded step of few rows, run `one` on a parallel stream.

    The caller keeps inputs shared by several of them alive until this returns: the allocator reuses memory that one
    stream has freed without regard to the other. Outside a recording the host could not keep up with two streams.
    """
    if len(x) > MOST_ROWS or not x.is_cuda:
        for work in (one, *others):
            work()
        return
    if not torch.cuda.is_current_stream_capturing():
        one()
        # Launch the same kernels as in a recording, so that they are compiled before it.
        with branching():
            for work in others:
                work()
        return
    main = torch.cuda.current_stream(x.device)
    branch = branch_of(x.device)
    branch.wait_stream(main)
    with torch.cuda.stream(branch), branching():
        for work in others:
            work()
    one()
    main.wait_stream(branch)


def side_by_side(
    like: Float[Tensor, "rows any"], sizes: Sequence[int]
) -> tuple[Float[Tensor, "rows all"], tuple[Tensor, ...]]:
    rows = torch.empty((like.shape[0], sum(sizes)), dtype=like.dtype, device=like.device)
    return rows, rows.split_with_sizes(list(sizes), 1)


def record_decodes(compute: Callable[[Batch], Tensor]) -> DecodeSteps:
    """Compute every step anew: the runner records whole steps here."""
    return DecodeSteps(compute)
