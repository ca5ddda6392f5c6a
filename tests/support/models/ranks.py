"""Tensor-parallel groups without processes: every rank is a thread, and one of them runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.base.config import EngineConfig
from weft.base.plan import Ints, Landing, Plan
from weft.engine.device import Capabilities, Device
from weft.engine.loop import Engine
from weft.kernels.choosing import choose
from weft.memory.spec import MemorySpec
from weft.models.sharding import Shard
from weft.models.weights import load_model
from weft.runner.runner import Runner


class Meeting:
    """Where threads meet: each brings a tensor and leaves with those of all, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Held by the thread that runs. Waiting releases it, so that kernels of two ranks never overlap.
        self.turn = threading.Condition()
        self.brought: dict[int, Tensor] = {}
        self.taken: list[Tensor] = []
        self.round = 0
        self.broken: BaseException | None = None

    def meet(self, rank: int, x: Tensor) -> list[Tensor]:
        number = self.round
        self.brought[rank] = x.clone()
        if len(self.brought) == self.ranks:
            self.taken = [self.brought[each] for each in range(self.ranks)]
            self.brought, self.round = {}, number + 1
            self.turn.notify_all()
        else:
            self.turn.wait_for(lambda: self.round > number or self.broken is not None)
        if self.round == number:
            raise RuntimeError("another rank failed") from self.broken
        return self.taken


class ThreadGroup:
    """One thread's end of a meeting. It counts what it exchanges."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.ranks = meeting, rank, meeting.ranks
        self.sums = 0

    def sum(self, x: Tensor) -> Tensor:
        self.sums += 1
        return torch.stack(self.meeting.meet(self.rank, x)).sum(0)

    def gather(self, x: Tensor) -> list[Tensor]:
        return self.meeting.meet(self.rank, x)

    def from_first(self, x: Tensor) -> Tensor:
        return self.meeting.meet(self.rank, x)[0]


class ThreadedRanks(Device):
    """The device of an engine whose runners are threads. All launch the same plan; the first one's results count."""

    def __init__(self, runners: list[Runner], meeting: Meeting) -> None:
        self.runners, self.meeting = runners, meeting
        self.pool = ThreadPoolExecutor(len(runners))
        self.flights: dict[Runner, Any] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.supply_masks)

    def launch(self, plan: Plan) -> Any:
        self.flights = dict(zip(self.runners, self.together(lambda runner: runner.launch(plan)), strict=True))
        return self.flights[self.runners[0]]

    def supply_masks(self, flight: Any, masks: Ints) -> None:
        assert flight is self.flights[self.runners[0]], "masks belong to the last step"
        self.together(lambda runner: runner.supply_masks(self.flights[runner], masks))

    def land(self, flight: Any) -> Landing:
        return self.runners[0].land(flight)

    def together(self, work: Callable[[Runner], Any]) -> list[Any]:
        def run(runner: Runner) -> Any:
            with self.meeting.turn:
                try:
                    return work(runner)
                except BaseException as error:
                    self.meeting.broken = error
                    self.meeting.turn.notify_all()
                    raise

        futures = [self.pool.submit(run, runner) for runner in self.runners]
        return [future.result() for future in futures]


def threaded_engine(
    folder: Path,
    ranks: int,
    memory_bytes: int = 64 << 20,
    draft_room: int = 0,
    drafting: Any = None,
    whole_experts: bool = False,
    **settings: Any,
) -> Engine:
    """An engine whose model is cut over threads."""
    meeting, runners = Meeting(ranks), []
    options = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory_bytes, **options)
    for rank in range(ranks):
        model, _ = load_model(folder, torch.float32, progress=False, shard=Shard(rank, ranks, whole_experts))
        operations = choose("cpu", torch.float32, model.memories).operations
        spec = replace(MemorySpec(model.memories(operations)), draft_room=draft_room)
        group = ThreadGroup(meeting, rank)
        runner = Runner(model, spec, memory_bytes, config.max_sequences, threads=1, operations=operations, group=group)
        runners.append(runner)
    return Engine(spec, ThreadedRanks(runners, meeting), config, drafting=drafting)
