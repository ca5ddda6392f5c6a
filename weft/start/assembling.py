"""Assembles the device of an engine, or of its drafter, from the parts that its backend and its role ask for."""

from __future__ import annotations

from weft.base.config import EngineConfig
from weft.base.cores import available_cores
from weft.kernels.choosing import Chosen
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.cuda.exact import ExactTurns
from weft.runner.cuda.recorded import StepRecording
from weft.runner.eager import Numerics, UsualNumerics
from weft.runner.exact import ExactCells
from weft.runner.passes import ModelPass
from weft.runner.runner import Runner


def assemble_runner(
    model: CausalModel,
    spec: MemorySpec,
    config: EngineConfig,
    chosen: Chosen,
    device: str,
    computes: ModelPass,
    threads: int | None = None,
    progress: bool = False,
) -> Runner:
    """Return what executes plans of a model or a drafter. `threads` of a CPU default to those of the process."""
    is_drafter = computes.is_drafter
    return Runner(
        model,
        spec,
        config.draft_bytes if is_drafter else config.memory_bytes,
        config.max_sequences,
        device,
        threads,
        chosen.operations,
        computes=computes,
        # Drafts need not be exact.
        numerics=UsualNumerics() if is_drafter else numerics_of(chosen),
        recording=StepRecording(config.max_length, progress) if chosen.are_recorded else None,
        marks_layers=bool(config.departures_bytes) and not is_drafter,
    )


def threads_on(device: str, threads: int) -> int | None:
    """Return the threads that compute steps, if they do; 0: all available."""
    return (threads or available_cores()) if device == "cpu" else None


def numerics_of(chosen: Chosen) -> Numerics:
    """Return the numerics that chosen operations need."""
    if chosen.numerics == "cells":
        return ExactCells(getattr(chosen.operations, "decodes_at_once", 1))
    return ExactTurns() if chosen.numerics == "turns" else UsualNumerics()
