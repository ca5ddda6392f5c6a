"""Computes the prompts of one HTTP request that has no answer in tokens: a few hundred at a time, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from starlette.requests import Request

from weft.answers.followed import FollowedAnswer
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Report
from weft.server.access.rates import Used
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import while_connected
from weft.server.texts.prompt_builder import Prompt
from weft.server.texts.schemas import CacheFields

# While one part of a request ends, the engine has another one.
LANES = 2


class Computation:
    """The generations of one request: their reports, in order, and what they used."""

    def __init__(self, front: Front, request: Request, body: CacheFields, field: str) -> None:
        self._front = front
        self._tenant = request.state.tenant
        self._body = body
        self._field = field
        self._name = new_name("vec-")
        self.names = (self._name,)
        self.model = front.model_name
        self._generations: list[Generation] = []

    @property
    def sequences(self) -> list[FollowedAnswer]:
        return [sequence for each in self._generations for sequence in each.sequences]

    def used(self) -> Used:
        found = [each.used() for each in self._generations]
        return Used(sum(each.prompt for each in found), sum(each.cached for each in found), 0)

    @property
    def queued_seconds(self) -> float:
        return max((each.queued_seconds for each in self._generations), default=0.0)

    @property
    def first_token_seconds(self) -> float | None:
        return None

    @property
    def finish(self) -> FinishReason | None:
        ends = [each.finish for each in self._generations]
        return next((end for end in ends if end is not FinishReason.LENGTH), FinishReason.LENGTH) if ends else None

    async def run(self, asked: Sequence[tuple[Prompt, SamplingParams]]) -> list[Report]:
        """Return the report of each prompt. The first one that fails ends all."""
        width = max(1, self._front.limits.sequences // LANES)
        parts = [asked[first : first + width] for first in range(0, len(asked), width)]
        found: list[list[Report]] = [[] for _ in parts]
        left = iter(enumerate(parts))
        lanes = [asyncio.ensure_future(self._lane(left, found)) for _ in range(min(LANES, len(parts)))]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        return [report for part in found for report in part]

    async def _lane(
        self, left: Iterator[tuple[int, Sequence[tuple[Prompt, SamplingParams]]]], found: list[list[Report]]
    ) -> None:
        for place, part in left:
            found[place] = await self._part(place, part)

    async def _part(self, place: int, part: Sequence[tuple[Prompt, SamplingParams]]) -> list[Report]:
        body = self._body
        generation = await self._front.generate(
            [AskedPrompt(prompt, params, field=self._field) for prompt, params in part],
            self._tenant,
            name=f"{self._name}.{place}",
            aliases=(self._name,),
            cache_salt=body.cache_salt,
            priority=body.priority,
            retain=body.retain,
        )
        self._generations.append(generation)
        try:
            return [sequence.report for sequence in await generation.collect()]
        finally:
            generation.close()


async def computed(
    front: Front, request: Request, body: CacheFields, asked: Sequence[tuple[Prompt, SamplingParams]], field: str
) -> tuple[list[Report], Used]:
    """Return what the engine reports of prompts, and what they used. The work ends when the client disconnects."""
    computation = Computation(front, request, body, field)
    request.state.record.generation = computation
    reports = await while_connected(request, computation.run(asked))
    return reports, computation.used()
