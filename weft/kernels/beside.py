"""Two pieces of work that do not need each other, such as the two mixers of one block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Rows up to which two streams were measured to be faster, on whole decode steps of a 7B model on an H200: by 4 % with
# one row, by 1 % with so many. Then each piece of work keeps the memory busy by itself.
MOST_ROWS = 128


def beside(x: Tensor, one: Callable[[], object], other: Callable[[], object]) -> None:
    """Both; in a step of not many rows that is recorded for a GPU, at the same time; `x` has the rows.

    What was made before and is read by both has to be held until this returns: memory that a stream is done with is
    handed out again without a look at the other. Where nothing is recorded, the host would not keep up with two.
    """
    if not x.is_cuda or len(x) > MOST_ROWS:
        one()
        other()
        return
    from weft.kernels.cuda.overlap import branch_of, branching

    if not torch.cuda.is_current_stream_capturing():
        one()
        # The same kernels as in a recording, before which they are to be compiled.
        with branching():
            other()
        return
    main = torch.cuda.current_stream(x.device)
    branch = branch_of(x.device)
    branch.wait_stream(main)
    with torch.cuda.stream(branch), branching():
        other()
    one()
    main.wait_stream(branch)
