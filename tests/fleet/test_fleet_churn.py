"""Ten thousand requests over replicas and routers that are killed, hung, drained and replaced at random moments.

All are processes, as users start them. Every step of every engine is audited. WEFT_CHURN_REQUESTS and WEFT_CHURN_SEED
set the number of requests and the seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.servers.fleet_processes import SECONDS, Fleet, FleetProcess, ReplicaProcess, RouterProcess, until
from weft.fleet.remote import RemoteBackend

REQUESTS = int(os.environ.get("WEFT_CHURN_REQUESTS", "10000"))
SEED = int(os.environ.get("WEFT_CHURN_SEED", "1"))
# Requests until the first disturbance is over, and for each further one.
MOST_CALM = 200
DISTURBERS = 2
CLIENTS = 12
QUESTIONS = 48
RETRY_SECONDS = 0.5


@dataclass
class Asked:
    """A question, and the whole answer of an undisturbed engine."""

    body: dict[str, object]
    text: str = ""


@dataclass
class Churn:
    fleet: Fleet
    choose: random.Random
    questions: list[Asked]
    ends: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    disturbed: list[FleetProcess] = field(default_factory=list)
    unlisted: list[ReplicaProcess] = field(default_factory=list)

    # requests -------------------------------------------------------------------------------------------------------

    async def client(self) -> None:
        """Send requests until there are enough; each must be answered once, as it should be, or refused."""
        async with httpx.AsyncClient(timeout=SECONDS) as http:
            while self.sent < REQUESTS:
                await until(lambda: self.sent < MOST_CALM * (1 + self.done.total()))
                self.sent += 1
                asked, router = self.choose.choice(self.questions), self.choose.choice(self.fleet.routers)
                streams = self.choose.random() < 0.6
                before, served = router.ends, router.serves
                try:
                    end = await (self._stream if streams else self._whole)(http, router, asked)
                except httpx.TransportError:
                    # Only a router that has ended may break a connection.
                    if served and router.ends == before:
                        raise
                    end = "lost with its router"
                self.ends[end] += 1
                if end in ("refused", "lost with its router"):
                    # As clients do; or most requests would be sent while nothing can answer them.
                    await asyncio.sleep(RETRY_SECONDS)

    async def _whole(self, http: httpx.AsyncClient, router: RouterProcess, asked: Asked) -> str:
        answer = await http.post(f"{router.url}/v1/completions", json=asked.body)
        if answer.status_code != 200:
            return self._refusal(answer.status_code, answer.text)
        [choice] = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (asked.text, "length")
        return "answered"

    async def _stream(self, http: httpx.AsyncClient, router: RouterProcess, asked: Asked) -> str:
        text, finishes, leaves = "", 0, self.choose.random() < 0.1
        async with http.stream("POST", f"{router.url}/v1/completions", json=asked.body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return self._refusal(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert not finishes
                    return "cut"
                text += event["choices"][0]["text"]
                finishes += event["choices"][0]["finish_reason"] is not None
                assert asked.text.startswith(text), "not the answer, or parts of two"
                if leaves:
                    return "left by its client"
        assert (text, finishes) == (asked.text, 1)
        return "answered"

    def _refusal(self, status: int, text: str) -> str:
        assert status in (429, 503), text
        return "refused"

    # disturbances ---------------------------------------------------------------------------------------------------

    async def disturb(self) -> None:
        """Do something bad to a part of the fleet, then repair it, again and again."""
        deeds = (self._kill, self._kill_engine, self._drain, self._hang, self._rewrite, self._restart_router)
        while self.sent < REQUESTS:
            start, pause = self.sent, self.choose.randrange(MOST_CALM)
            await until(lambda: self.sent >= min(start + pause, REQUESTS) or self._clients_wait)  # noqa: B023
            deed = self.choose.choice(deeds)
            victims = self.fleet.routers if deed == self._restart_router else self.fleet.replicas
            free = [each for each in victims if each not in self.disturbed]
            if not free:
                continue
            victim = self.choose.choice(free)
            self.disturbed.append(victim)
            if not victim.runs:
                # Its engine ended too often.
                await victim.start()
            await deed(victim)
            self.disturbed.remove(victim)
            self.done[deed.__name__.strip("_")] += 1

    @property
    def _clients_wait(self) -> bool:
        return self.sent >= MOST_CALM * (1 + self.done.total())

    async def _kill(self, victim: ReplicaProcess) -> None:
        await victim.end(signal.SIGKILL)
        await victim.start()

    async def _kill_engine(self, victim: ReplicaProcess) -> None:
        for engine in victim.engines:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    async def _drain(self, victim: ReplicaProcess) -> None:
        await victim.end(signal.SIGTERM)
        await victim.start()

    async def _hang(self, victim: ReplicaProcess) -> None:
        """Stop a whole replica until no router sends it anything."""
        assert victim.process is not None
        stopped = [victim.process.pid, *victim.engines]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        await self._until_unused(victim)
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    async def _rewrite(self, victim: ReplicaProcess) -> None:
        """Take a replica out of the file until no router uses it, then list it again."""
        self.unlisted.append(victim)
        self._write_file()
        await self._until_unused(victim)
        self.unlisted.remove(victim)
        self._write_file()

    def _write_file(self) -> None:
        self.fleet.list(*(each for each in self.fleet.replicas if each not in self.unlisted))

    async def _until_unused(self, replica: ReplicaProcess) -> None:
        async def unused() -> bool:
            # Routers that are being restarted use none.
            routers = [each for each in self.fleet.routers if each not in self.disturbed]
            try:
                return not any([(await each.metric("weft_replica_up")).get(replica.url) for each in routers])
            except httpx.TransportError:
                return False

        await until(unused)

    async def _restart_router(self, victim: RouterProcess) -> None:
        await victim.end(self.choose.choice([signal.SIGKILL, signal.SIGTERM]))
        await victim.start()


async def leaves_nothing(backend: RemoteBackend) -> dict[str, object]:
    """Flush an engine and return what is left in it."""
    cached = await backend.flush()
    stats = await backend.stats()
    live = {kind: units["live"] for kind, units in stats["units"].items()}
    names = ("open", "running", "waiting", "leases", "cells", "resume_points")
    return {name: stats[name] for name in names} | {"cached": cached, "live": sum(live.values())}


async def churn(folder: Path) -> Churn:
    choose, fleet = random.Random(SEED), Fleet(folder, replicas=3, routers=2)
    prompts = [[choose.randrange(256) for _ in range(choose.choice([3, 40, 70, 200]))] for _ in range(QUESTIONS // 2)]
    # Half of them continue others, so that caches are hit.
    prompts += [prompt + [choose.randrange(256) for _ in range(9)] for prompt in prompts]
    bodies = [
        {"prompt": p, "max_tokens": choose.choice([1, 2, 4, 12]), "temperature": 0, "ignore_eos": True} for p in prompts
    ]
    run = Churn(fleet, choose, [Asked(body) for body in bodies])
    try:
        await fleet.start()
        for router in fleet.routers:
            await until(lambda: router.are_up(*fleet.replicas))  # noqa: B023
        async with httpx.AsyncClient(timeout=SECONDS) as http:
            for asked in run.questions:
                answer = await http.post(f"{fleet.routers[0].url}/v1/completions", json=asked.body)
                asked.text = answer.json()["choices"][0]["text"]
        async with asyncio.TaskGroup() as tasks:
            for work in (*(run.disturb() for _ in range(DISTURBERS)), *(run.client() for _ in range(CLIENTS))):
                tasks.create_task(work)
        await audit(fleet)
    except BaseException:
        for each in (*fleet.replicas, *fleet.routers):
            print(f"--- {each.name}\n{each.log.read_text()[-4000:]}")
        raise
    finally:
        await fleet.stop()
    return run


async def audit(fleet: Fleet) -> None:
    """Every part serves again, and none holds anything of what it has been through."""
    for replica in fleet.replicas:
        if not replica.runs:
            await replica.start()
    for router in fleet.routers:
        await until(lambda: router.are_up(*fleet.replicas))  # noqa: B023
        await until(lambda: nothing_open(router))  # noqa: B023
    clean = dict.fromkeys(("open", "running", "waiting", "leases", "cells", "resume_points", "cached", "live"), 0)
    for replica in fleet.replicas:
        await until(lambda: is_clean(replica.ask, clean))  # noqa: B023
        assert "the engine failed" not in replica.log.read_text(), replica.log.read_text()


async def nothing_open(router: RouterProcess) -> bool:
    return not any((await router.metric("weft_replica_requests_open")).values())


async def is_clean(ask: Callable[..., Awaitable[object]], clean: dict[str, int]) -> bool:
    return await ask(leaves_nothing) == clean


@pytest.mark.slow
def test_ten_thousand_requests_over_real_replicas_are_answered_once_or_refused_and_leave_nothing(tmp_path):
    run = asyncio.run(churn(tmp_path))
    print(dict(run.ends), dict(run.done))
    assert sum(run.ends.values()) == REQUESTS
    assert run.ends["answered"] > 0.5 * REQUESTS
    assert run.done.total() >= REQUESTS // MOST_CALM - 1
