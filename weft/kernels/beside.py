"""Two pieces of work that do not need each other, such as the two mixers of one block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def beside(x: Tensor, one: Callable[[], object], other: Callable[[], object]) -> None:
    """Both, in a step that is recorded for a GPU at the same time; `x` is where they work.

    Only there: memory that one stream has done with must not be handed out while the other still reads it, which a
    recording sees to by the order in which its pieces are given back. And elsewhere the host would not keep up. Neither
    may hold products whose sums are added up by whoever comes last: those are counted for one product at a time.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        one()
        other()
        return
    from weft.kernels.cuda.overlap import branch_of, start_late

    main = torch.cuda.current_stream(x.device)
    branch = branch_of(x.device)
    branch.wait_stream(main)
    with torch.cuda.stream(branch):
        start_late()
        other()
    one()
    main.wait_stream(branch)
