"""Sums over the processes of a tensor-parallel group, by torch.distributed: gloo on CPUs, NCCL on GPUs.

NCCL takes the same calls as gloo. It has not been tested: it needs a GPU for each rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from weft.runner.ranks.meeting import Meeting

# A rank that is alive and does not answer for this long counts as lost.
TIMEOUT_SECONDS = 600.0
LOOPBACK = "127.0.0.1"


class ProcessRanks:
    """This process's end of a group. All ranks meet through a file; gloo connects them over the loopback interface."""

    def __init__(self, rank: int, ranks: int, meeting: Meeting, device: str = "cpu") -> None:
        self.rank, self.ranks = rank, ranks
        # Without a number of ranks: the store would remove the file of the last one.
        store = PrefixStore(meeting.group, FileStore(meeting.path))
        self._group = _on_gpus(store, rank, ranks) if device != "cpu" else _on_cpus(store, rank, ranks)
        # Returns when all ranks are connected.
        self._group.barrier().wait()

    def sum(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [x.new_empty(x.shape) for _ in range(self.ranks)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def from_first(self, x: Tensor) -> Tensor:
        self._group.broadcast([x], dist.BroadcastOptions()).wait()
        return x


def _on_cpus(store: Any, rank: int, ranks: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from PyTorch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def _on_gpus(store: Any, rank: int, ranks: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)
