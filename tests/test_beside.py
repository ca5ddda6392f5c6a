"""Two pieces of work beside each other: the same outcome as one after the other."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.beside import beside
from weft.kernels.cuda import overlap

SIZE = 8192


def test_elsewhere_one_comes_after_the_other():
    done: list[str] = []
    beside(torch.empty(0), lambda: done.append("one"), lambda: done.append("other"))
    assert done == ["one", "other"]


def test_only_the_first_kernel_of_a_branch_starts_late(monkeypatch):
    monkeypatch.setattr(overlap, "is_able", lambda device: True)
    x = torch.empty(0)
    overlap.start_late()
    assert [overlap.early(x)["EARLY"] for _ in range(3)] == [False, True, True]


@pytest.mark.gpu
def test_recorded_branches_meet_again():
    """Each branch takes long enough that whoever did not wait for it would be seen.

    Products are so wide that no programs share one: those count who has come, for one product at a time.
    """
    from weft.kernels.cuda.linear import few_rows

    torch.manual_seed(0)
    x = torch.randn(3, SIZE, device="cuda", dtype=torch.bfloat16)
    first, second, last = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) / SIZE**0.5 for _ in range(3))
    kept = torch.zeros(3, 2 * SIZE, device="cuda", dtype=torch.bfloat16)

    def repeated(weight: torch.Tensor, out: torch.Tensor, times: int) -> None:
        y = x
        for _ in range(times):
            y = few_rows(y, weight)
        out.copy_(y)

    def step() -> torch.Tensor:
        beside(x, lambda: repeated(first, kept[:, :SIZE], 3), lambda: repeated(second, kept[:, SIZE:], 9))
        return few_rows(kept[:, :SIZE] + kept[:, SIZE:], last)

    wanted = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        kept.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
