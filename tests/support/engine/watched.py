"""An engine that is watched from some step on, and a judge of what it notes: it replays the events of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from weft.engine.events import FinishReason, Output, Report
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.engine.tracing.events import Computes, Decoded, Ends, Event, Preempted, Runs, Starts, TraceBatch, Waits


class WatchedEngine(Engine):
    """Gives every request a name, and collects batches now and then."""

    first_step = 0

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.steps = 0
        self.batches: list[TraceBatch] = []
        self.reports: dict[str, Report] = {}
        self.ends: dict[str, tuple[FinishReason, int]] = {}
        self._dice = Random(self.config.seed)

    def add(self, request: Request, *more: Any, **named: Any) -> int:
        return super().add(msgspec.structs.replace(request, name=f"r{self._next_id}"), *more, **named)

    def step(self) -> list[Output]:
        if self.steps == self.first_step:
            self.watch(True)
        self.steps += 1
        outputs = super().step()
        for output in outputs:
            if output.finish is not None:
                sequence = self._sequences[output.sequence]
                self.reports[f"r{sequence.id}"] = sequence.report
                self.ends[f"r{sequence.id}"] = output.finish, len(sequence.generated)
        if self.tracer is not None and (self._dice.random() < 0.4 or self.idle):
            self.batches += self.tracer.take()
        return outputs


@dataclass
class Seen:
    """What the events of one request add up to."""

    kinds: list[str] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    # Where the next chunk of its prompt must begin; None: anywhere.
    at: int | None = None
    starts: list[Starts] = field(default_factory=list)
    end: Ends | None = None
    tenants: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        assert self.end is None, "an event after the end"
        self.tenants.add(event.tenant)
        self.kinds.append(type(event).__name__)
        match event:
            case Runs():
                assert len(self.kinds) == 1, "what runs was reported twice"
                self.tokens, self.drafts, self.accepted = event.tokens, event.drafts, event.accepted
                self.preemptions = event.preemptions
                self.kinds[-1] = {"waits": "Waits", "computes": "Starts", "decodes": "Decoded"}[event.state]
            case Waits():
                assert self.kinds[-2:-1] in ([], ["Waits"], ["Preempted"])
            case Starts():
                assert self.kinds[-2] == "Waits"
                self.starts.append(event)
                self.at = None
            case Computes():
                assert self.kinds[-2] in ("Starts", "Computes")
                assert self.at is None or event.first == self.at
                assert event.first < event.end <= event.known
                self.at = event.end
            case Decoded():
                assert self.kinds[-2] in ("Computes", "Decoded", "Starts")
                assert self.at is None or not self.starts or self.kinds[-2] != "Computes" or event.tokens
                self.tokens += event.tokens
                self.drafts += event.drafts
                self.accepted += event.accepted
            case Preempted():
                assert self.kinds[-2] in ("Starts", "Computes", "Decoded", "Waits")
                self.preemptions += 1
            case Ends():
                self.end = event


def judge(engine: WatchedEngine) -> dict[str, Seen]:
    """Replay all events, and compare what they add up to with what the engine reported of each request."""
    seen: dict[str, Seen] = {}
    assert [batch.opening for batch in engine.batches].count(True) == 1
    for batch in engine.batches:
        if batch.opening:
            seen.clear()
        for event in batch.events:
            seen.setdefault(event.id, Seen()).take(event)
        for step in batch.steps:
            assert 0 < step.rows <= step.tokens
            assert step.prompt_tokens + step.drafts <= step.tokens
    for name, found in seen.items():
        report, (reason, tokens) = engine.reports[name], engine.ends[name]
        assert found.end is not None
        assert (found.end.reason, found.end.tokens, found.tokens) == (reason, tokens, tokens)
        assert found.preemptions == report.preemptions
        assert (found.drafts, found.accepted) == (report.drafts.proposed, report.drafts.accepted)
        assert len(found.tenants) == 1
        for start in found.starts:
            assert start.cached == report.cached_tokens
            assert start.miss is None or start.miss.at == report.cached_tokens
    return seen
