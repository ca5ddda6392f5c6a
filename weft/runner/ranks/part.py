"""One rank's part of a model, loaded, and the device that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.base.config import EngineConfig
from weft.base.cores import available_cores
from weft.kernels.interface import Operations
from weft.memory.identity import Identity
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.file import rows_of_first
from weft.memory.tiers.disk.format import ModelPart
from weft.models.model import CausalModel
from weft.runner.ranks.group import ProcessRanks
from weft.runner.ranks.meeting import Meeting
from weft.runner.runner import Runner


def rank_threads(ranks: int, threads: int) -> int:
    """Return the threads of each rank on a CPU: as many as were asked for, or its share of the cores if 0 were."""
    return threads or max(1, available_cores() // ranks)


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """One rank's part of a model, and what executes plans with it."""

    model: CausalModel
    operations: Operations
    device: str
    rank: int
    ranks: int
    identity: Identity | None = None  # of the part, if there is a file or a role
    disk: Path | None = None  # file of the group's disk tier

    def runner(self, meeting: Meeting, config: EngineConfig, draft_room: int, threads: int) -> Runner:
        """Join the group and return the device that executes its plans on this rank, with the tiers below it."""
        spec = MemorySpec(self.model.memories(self.operations), draft_room=draft_room)
        group = ProcessRanks(self.rank, self.ranks, meeting, self.device)
        on_cpu = rank_threads(self.ranks, threads) if self.device == "cpu" else None
        parts = (self.model, spec, config.memory_bytes, config.max_sequences, self.device, on_cpu, self.operations)
        runner = Runner(*parts, group=group)
        runner.tiers.add(config, self.disk, self.identity, part=ModelPart(self.rank, self.ranks))
        return runner

    def begin(self, runner: Runner) -> None:
        """Let the first rank's file decide what is there. A drop that was interrupted ends here.

        Only when all ranks have opened their files: with a file of another model, the first rank refuses to start, and
        the other files stay as they are.
        """
        if self.rank and self.disk is not None:
            runner.tiers.disk.erase_all_but(rows_of_first(self.disk, runner.tiers.disk.layout))
