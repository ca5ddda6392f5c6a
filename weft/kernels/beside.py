"""Pieces of work that do not need each other, such as the mixers of one block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Rows up to which two streams were measured to be faster, on whole decode steps of a 7B model on an H200: by 4 % with
# one row, by 1 % with so many. Then each piece of work keeps the memory busy by itself.
MOST_ROWS = 128


def beside(x: Tensor, one: Callable[[], object], *others: Callable[[], object]) -> None:
    """Do all of it; in a recorded step of few rows on a GPU, `one` beside the others. `x` has the rows.

    The caller holds whatever several of them read until this returns: memory that one stream is done with is handed out
    again without a look at the other. Outside of a recording the host would not keep up with two streams.
    """
    if not x.is_cuda or len(x) > MOST_ROWS:
        for work in (one, *others):
            work()
        return
    from weft.kernels.cuda.overlap import branch_of, branching

    if not torch.cuda.is_current_stream_capturing():
        one()
        # The same kernels as in a recording, before which they are to be compiled.
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
