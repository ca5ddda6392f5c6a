"""Counted: how often a step makes the masks of its layers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.models.engines import greedy, make_engine, tokens
from weft.engine.request import Request
from weft.kernels.cpu import attention
from weft.kernels.native import attention as native_attention


def masks_are_made_once_a_step() -> None:
    """Index lists and masks of attention are shared by all layers with the same window."""
    engine = make_engine("gemma3", paranoid=False)
    assert len({memory.window for memory in engine.ledger.spec.memories}) == 2 < len(engine.ledger.spec.memories)
    calls: list[int | None] = []
    plan_reads, plan_step = attention.plan_reads, native_attention.plan_step

    def counted_reads(rows, paging, window, cell):
        calls.append(window)
        return plan_reads(rows, paging, window, cell)

    def counted_step(batch, view, heads):
        calls.append(view.window)
        return plan_step(batch, view, heads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "plan_reads", counted_reads)
        patch.setattr(native_attention, "plan_step", counted_step)
        engine.add(Request(np.array(tokens(100, 1), np.int32), greedy(5)))
        while not engine.idle:
            engine.step()
    assert len(calls) == 2 * engine.planner.number
