"""Turns the events of a server into spans of Chrome's trace format, as they arrive.

A source of events, an engine or a member of a fleet, is a process. Its first lane has the engine's steps, and every
request takes the first lane that is free while it waits or runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Span = dict[str, Any]

STEPS = 0
WAITS_FOR = {
    "turn": "waits for its turn",
    "sequences": "waits for a sequence to end",
    "memory": "waits for memory",
    "load": "loads its prefix",
    "prefix": "waits for a prefix that is being computed",
    "grammar": "waits for its grammar",
    "step": "waits for room in a step",
}


class TracedRequest:
    """A request that has not ended. `since` is the time up to which its lane has spans."""

    __slots__ = ("began", "facts", "id", "lane", "since", "wait")

    def __init__(self, name: str, lane: int, at: float) -> None:
        self.id = name
        self.lane = lane
        self.began = self.since = at
        self.wait: str | None = None
        # What is known of it, for the span that holds all others.
        self.facts: dict[str, Any] = {}


class TracedSource:
    """One engine. `process` is its number in the trace."""

    def __init__(self, process: int, name: str) -> None:
        self.process = process
        self.name = name
        self.requests: dict[str, TracedRequest] = {}
        self._lanes: set[int] = set()
        self._named: set[int] = set()
        self._step_end = 0.0

    def begin(self) -> Iterator[Span]:
        yield self._label("process_name", STEPS, self.name or "engine")
        yield self._label("thread_name", STEPS, "steps")

    def take(self, message: dict[str, Any]) -> Iterator[Span]:
        """Yield the spans that a message of the server completes."""
        at = message["at"]
        if message.get("opening"):
            running = {event["id"] for event in message["events"]}
            for name in [name for name in self.requests if name not in running]:
                yield from self._end(name, at, "unknown")
        for event in message["events"]:
            yield from self._event(event)
        for step in message.get("steps", ()):
            yield from self._step(step)
        if message["lost"]:
            yield self._instant(STEPS, at, f"{message['lost']} events were lost", scope="g")

    def close(self, at: float) -> Iterator[Span]:
        """Yield what is known of requests that have not ended."""
        for name in list(self.requests):
            yield from self._end(name, max(at, self.requests[name].since), "still running")

    def _event(self, event: dict[str, Any]) -> Iterator[Span]:
        kind, name, at = event["event"], event["id"], event["at"]
        request = self.requests.get(name)
        if request is None:
            began = at - event.get("ms", 0)
            request = self.requests[name] = TracedRequest(name, self._free_lane(), began)
            if request.lane not in self._named:
                self._named.add(request.lane)
                yield self._label("thread_name", request.lane, f"requests {request.lane}")
        if kind == "ends":
            request.facts["tokens"] = event["tokens"]
            yield from self._end(name, at, event["reason"])
            return
        facts = {key: value for key, value in event.items() if key not in ("event", "id", "at", "tenant", "ms")}
        if kind in ("waits", "runs") and event["for"] is not None:
            yield from self._waited(request, at)
            request.wait = event["for"]
        elif kind == "starts":
            yield from self._waited(request, at)
        elif kind == "computes":
            yield self._span(request, at, f"prompt {event['from']} to {event['to']}", facts)
        elif kind == "decodes":
            request.since = max(request.since, at - event["ms"])
            yield self._span(request, at, f"{event['tokens']} tokens", facts)
        elif kind == "preempted":
            yield self._instant(request.lane, at, "preempted")
            request.since = max(request.since, at)
        if kind in ("starts", "runs"):
            request.facts |= {"tenant": event["tenant"], **facts}
            request.facts.pop("for", None)

    def _waited(self, request: TracedRequest, at: float) -> Iterator[Span]:
        if request.wait is not None:
            yield self._span(request, at, WAITS_FOR.get(request.wait, f"waits for {request.wait}"), {})
        request.wait, request.since = None, max(request.since, at)

    def _end(self, name: str, at: float, reason: str) -> Iterator[Span]:
        request = self.requests[name]
        yield from self._waited(request, at)
        del self.requests[name]
        self._lanes.discard(request.lane)
        request.since = request.began
        yield self._span(request, at, name, request.facts | {"end": reason})

    def _step(self, step: dict[str, Any]) -> Iterator[Span]:
        facts = {key: value for key, value in step.items() if key not in ("at", "ms")}
        # Times and durations come from two clocks. TraceSpans that overlap would be shown wrongly.
        begin = max(step["at"] - step["ms"], self._step_end)
        self._step_end = max(step["at"], begin)
        found = {"ph": "X", "pid": self.process, "tid": STEPS, "ts": 1000 * begin}
        yield {**found, "dur": 1000 * (self._step_end - begin), "name": f"{step['rows']} rows", "args": facts}
        rows = {"decoded": step["tokens"] - step["prompt_tokens"], "prompts": step["prompt_tokens"]}
        yield {"ph": "C", "pid": self.process, "ts": found["ts"], "name": "tokens of a step", "args": rows}

    def _span(self, request: TracedRequest, at: float, name: str, facts: dict[str, Any]) -> Span:
        begin, request.since = request.since, max(request.since, at)
        found = {"ph": "X", "pid": self.process, "tid": request.lane, "ts": 1000 * begin}
        return {**found, "dur": 1000 * (request.since - begin), "name": name, "args": facts}

    def _instant(self, lane: int, at: float, name: str, scope: str = "t") -> Span:
        return {"ph": "i", "pid": self.process, "tid": lane, "ts": 1000 * at, "name": name, "s": scope}

    def _label(self, kind: str, lane: int, name: str) -> Span:
        return {"ph": "M", "pid": self.process, "tid": lane, "name": kind, "args": {"name": name}}

    def _free_lane(self) -> int:
        lane = STEPS + 1
        while lane in self._lanes:
            lane += 1
        self._lanes.add(lane)
        return lane


class TraceSpans:
    """TraceSpans of all sources."""

    def __init__(self) -> None:
        self._sources: dict[str, TracedSource] = {}
        self._at = 0.0
        # For the line that sums it up.
        self.events = self.steps = self.lost = 0

    def take(self, message: dict[str, Any]) -> Iterator[Span]:
        name = message.get("source", "")
        self._at = max(self._at, message["at"])
        self.events += len(message["events"])
        self.steps += len(message.get("steps", ()))
        self.lost += message["lost"]
        if name not in self._sources:
            self._sources[name] = TracedSource(len(self._sources) + 1, name)
            yield from self._sources[name].begin()
        yield from self._sources[name].take(message)

    def close(self) -> Iterator[Span]:
        for source in self._sources.values():
            yield from source.close(self._at)
