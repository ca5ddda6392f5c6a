"""Two pieces of work beside each other: the same outcome as one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.operations import CPU, PLAIN
from weft.kernels.cuda.launch import overlap
from weft.kernels.cuda.together import MOST_ROWS
from weft.kernels.cuda.together import run_together as beside

SIZE = 4096


@pytest.mark.parametrize("run", [CPU.run_together, PLAIN.run_together, beside])
def test_elsewhere_one_comes_after_the_other(run):
    done: list[str] = []
    run(torch.empty(0), lambda: done.append("one"), lambda: done.append("other"))
    assert done == ["one", "other"]


@pytest.mark.gpu
def test_many_rows_are_recorded_one_after_the_other():
    x, streams = torch.zeros(MOST_ROWS + 1, 1, device="cuda"), []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beside(x, *[lambda: streams.append(torch.cuda.current_stream())] * 2)
        beside(x[:MOST_ROWS], *[lambda: streams.append(torch.cuda.current_stream())] * 2)
        x.add_(1)
    many, also_many, branch, main = streams
    assert many == also_many == main != branch


def test_only_the_first_kernel_of_a_branch_starts_late(monkeypatch):
    monkeypatch.setattr(overlap, "is_able", lambda device: True)
    x = torch.empty(0)

    def launches(count: int) -> list[bool]:
        return [overlap.early(x)["EARLY"] for _ in range(count)]

    assert launches(1) == [True]
    with overlap.branching():
        assert overlap.on_branch()
        assert launches(3) == [False, True, True]
    with overlap.branching():
        pass
    assert launches(1) == [True]
    assert not overlap.on_branch()


@pytest.mark.gpu
def test_recorded_branches_meet_again():
    """Each takes long enough that whoever did not wait for it would be seen.

    They end, and what follows begins, as in a step: with kernels that start before the ones before them have ended.
    Programs share sums on both at once.
    """
    from weft.kernels.cuda.activation import activate
    from weft.kernels.cuda.linear.few import few_rows

    torch.manual_seed(0)
    x = torch.randn(3, SIZE, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) / SIZE**0.5 for _ in range(2))
    last = torch.randn(SIZE, 2 * SIZE, device="cuda", dtype=torch.bfloat16) / SIZE**0.5
    kept = torch.zeros(3, 2 * SIZE, device="cuda", dtype=torch.bfloat16)

    def repeated(weight: torch.Tensor, out: torch.Tensor, times: int) -> None:
        y = x
        for _ in range(times):
            y = few_rows(y, weight)
        activate("silu", y, None, out)

    def step() -> torch.Tensor:
        beside(x, lambda: repeated(first, kept[:, :SIZE], 3), lambda: repeated(second, kept[:, SIZE:], 9))
        return few_rows(kept, last)

    wanted = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        kept.zero_()
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
