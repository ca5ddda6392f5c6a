"""Replicas of every family answer as one engine does: the same tokens, and in exact mode the same bits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.engine.sameness import asks, check
from tests.support.models.engines import FAMILIES, Ask, make_engine
from tests.support.models.exact_traffic import exact_engine, exact_model
from tests.support.servers.backends import collect, in_loop, started
from tests.support.servers.fake_engines import fake_info
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.routing import RoutedChoice
from weft.start.thread_backend import ThreadBackend

pytestmark = pytest.mark.slow


class Heard:
    """What a client got, in the form that engines' answers have in tests."""

    def __init__(self, outputs: list[Output]) -> None:
        self.tokens = [output.token for output in outputs if output.token is not None]
        self.logprobs = [output.logprob for output in outputs if output.token is not None]
        self.digests = [output.digest for output in outputs if output.token is not None]
        self.finish = outputs[-1].finish


def request_of(ask: Ask) -> Request:
    return Request(np.array(ask.prompt, np.int32), ask.params, salt=ask.salt)


async def through_replicas(engines: list[Engine], requests: list[Request]) -> tuple[list[Heard], set[str]]:
    """Ask everything at once, and once more; return the answers and the names of the replicas that gave them."""
    config = engines[0].config
    info = fake_info(exact=config.exact, form=config.form, cache=True)
    members = [(str(place), ThreadBackend(lambda e=engine: (e, info))) for place, engine in enumerate(engines)]
    fleet = FleetBackend(members, chooser=RoutedChoice(), check_seconds=None)
    async with started(fleet):
        streams = await asyncio.gather(*(fleet.submit(request) for request in requests))
        names = {stream.member.name for stream in streams}
        first = await asyncio.gather(*(collect(stream) for stream in streams))
        again = [await collect(await fleet.submit(request)) for request in requests]
    return [Heard(outputs) for outputs, _ in [*first, *again]], names


@pytest.mark.parametrize("family", FAMILIES)
@in_loop
async def test_two_replicas_answer_as_one_engine(family):
    given = list(asks())
    heard, names = await through_replicas([make_engine(family), make_engine(family)], [request_of(a) for a in given])
    check(family, given * 2, heard, [*range(len(given))] * 2)
    assert names == {"0", "1"}


@pytest.mark.parametrize("family", FAMILIES)
@in_loop
async def test_two_exact_replicas_answer_with_the_bits_of_one_engine(family):
    requests = [request_of(Ask(ask.prompt, replace(ask.params, logits_digest=True))) for ask in asks()]
    model = exact_model(family, torch.bfloat16)
    heard, names = await through_replicas([exact_engine(model), exact_engine(model)], requests)
    alone = []
    for request in requests:
        engine = exact_engine(model)
        engine.add(request)
        outputs = []
        while not engine.idle:
            outputs += engine.step()
        alone.append(Heard(outputs).digests)
    assert [answer.digests for answer in heard] == alone * 2
    assert all(None not in digests for digests in alone)
    assert names == {"0", "1"}
