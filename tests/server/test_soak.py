"""A server under an hour of churn, with drafts and a disk tier: prompts with log-probabilities, clients that leave,
salts, grammars, conversations, several answers to a prompt, every route.

Neither process may grow once it is warm: along a line through the second half, the engine by at most 16 MiB, which is
half a MiB per minute of the hour, and the front by 4. What the front's tokenizer remembers for good is filled first.
`test_growth.py` counts what an engine holds. WEFT_SOAK_SECONDS sets the duration of the slow test,
an hour by default; WEFT_SOAK_CURVE names a file for what was measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.models import tiny_model
from tests.support.servers.serving import Served, serving
from weft.text.tokenizer import REMEMBERED_WORDS

CLIENTS = 8
# Logits of a step's 2,048 prompt tokens take 64 MiB: temporaries that grow with the prompts are seen.
VOCABULARY = 8192
MODEL = "model"
OPTIONS = ("--port", "0", "--memory", "16MiB", "--max-length", "2048", "--threads", "1", "--max-sequences", "12")
PAGE = os.sysconf("SC_PAGE_SIZE")
# What the engine takes beyond what it started with: its memory of 16 MiB, a step's temporaries, caches of allocators.
MOST_ABOVE_START_BYTES = 192 << 20
# Growth over the second half of the run, along a fitted line.
MOST_GROWTH_BYTES = {"front": 4 << 20, "engine": 16 << 20}
# Characters of the odd words that fill the memory of the front's tokenizer: longer ones are not remembered.
LONGEST_REMEMBERED = 250
SAMPLES = 240

Send = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


@dataclass
class Curve:
    """Resident bytes of the front and the engine at equal distances in time."""

    seconds: list[float] = field(default_factory=list)
    front: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    def add(self, seconds: float, served: Served, requests: int) -> None:
        (engine,) = served.children
        self.seconds.append(seconds)
        self.front.append(resident_bytes(served.process.pid))
        self.engine.append(resident_bytes(engine))
        self.requests.append(requests)


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE


def growth_bytes(resident: list[int]) -> float:
    """Return how much a straight line through the second half of the samples rises from its beginning to its end."""
    late = np.array(resident[len(resident) // 2 :], np.float64)
    slope, _ = np.polyfit(np.arange(len(late)), late, 1)
    return float(slope * (len(late) - 1))


def check_growth(curve: Curve) -> None:
    for name, most_bytes in MOST_GROWTH_BYTES.items():
        resident = getattr(curve, name)
        grown = growth_bytes(resident)
        last = f"{resident[len(resident) // 2] / 2**20:.1f} to {resident[-1] / 2**20:.1f} MiB"
        assert grown < most_bytes, f"the {name} grew by {grown / 2**20:.1f} MiB in the second half: {last}"
        above = max(resident) - resident[0]
        assert above < MOST_ABOVE_START_BYTES, f"the {name} took {above / 2**20:.1f} MiB more than at the start"


# requests -------------------------------------------------------------------------------------------------------------


def prompt_of(dice: random.Random) -> list[int]:
    return [dice.randrange(256) for _ in range(dice.randrange(2, dice.choice([100, 500, 2000])))]


def scored(dice: random.Random) -> dict[str, Any]:
    wishes = {"echo": True, "logprobs": dice.choice([0, 1, 5]), "max_tokens": dice.choice([0, 1, 8])}
    return {"prompt": prompt_of(dice), "temperature": 0.7, **wishes}


async def score(http: httpx.AsyncClient, dice: random.Random) -> None:
    body = scored(dice)
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) >= len(body["prompt"])


async def score_natively(http: httpx.AsyncClient, dice: random.Random) -> None:
    wishes = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": dice.choice([0, 2, 20])}
    body = {"input_ids": prompt_of(dice), "sampling_params": {"max_new_tokens": dice.choice([0, 4])}, **wishes}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["meta_info"]["input_token_logprobs"]) == len(body["input_ids"])


async def leave_while_scoring(http: httpx.AsyncClient, dice: random.Random) -> None:
    request = asyncio.ensure_future(http.post("/v1/completions", json=scored(dice)))
    await asyncio.sleep(dice.random() * 0.5)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def leave_a_stream(http: httpx.AsyncClient, dice: random.Random) -> None:
    left, body = dice.randrange(1, 20), {"prompt": prompt_of(dice), "max_tokens": 40, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            left -= 1
            if not left:
                return


async def ask(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def words_of(dice: random.Random) -> str:
    return " ".join(dice.choice(["rain", "snow", "wind", "sun"]) for _ in range(dice.randrange(1, 60)))


async def ask_as_a_tenant(http: httpx.AsyncClient, dice: random.Random) -> None:
    await ask(http, "/v1/completions", {"prompt": prompt_of(dice), "max_tokens": 12, "cache_salt": str(dice.random())})


async def ask_for_a_form(http: httpx.AsyncClient, dice: random.Random) -> None:
    """Every second form is a new one."""
    most = dice.choice([7, dice.randrange(10**6)])
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": most}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    body = {"messages": [{"role": "user", "content": words_of(dice)}], "max_tokens": 24, "response_format": form}
    await ask(http, "/v1/chat/completions", body)


async def ask_for_several(http: httpx.AsyncClient, dice: random.Random) -> None:
    body = {"prompt": words_of(dice), "max_tokens": 12, "n": dice.randrange(2, 6), "temperature": 1}
    await ask(http, "/v1/completions", body | {"bad_words": ["snow"], "frequency_penalty": 0.3})


async def converse(http: httpx.AsyncClient, dice: random.Random) -> None:
    messages: list[dict[str, str]] = []
    for _ in range(dice.randrange(1, 5)):
        messages.append({"role": "user", "content": words_of(dice)})
        found = await ask(http, "/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or "nothing"})


async def ask_elsewhere(http: httpx.AsyncClient, dice: random.Random) -> None:
    await ask(http, "/v1/responses", {"input": words_of(dice), "max_output_tokens": 12})
    messages = [{"role": "user", "content": words_of(dice)}]
    await ask(http, "/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 12})


async def chat(http: httpx.AsyncClient, dice: random.Random) -> None:
    body = {"messages": [{"role": "user", "content": words_of(dice)}], "max_tokens": 8}
    await ask(http, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 3})


SCORES: tuple[Send, ...] = (score, score, score_natively, leave_while_scoring, leave_a_stream, chat)
WAYS = (*SCORES, ask_as_a_tenant, ask_for_a_form, ask_for_several, converse, ask_elsewhere)


# the run --------------------------------------------------------------------------------------------------------------


async def fill_tokenizer(http: httpx.AsyncClient, dice: random.Random) -> None:
    """Let the tokenizer meet as many words as it remembers, and of the greatest length."""
    for _ in range(REMEMBERED_WORDS):
        word = "".join(chr(dice.randrange(33, 127)) for _ in range(LONGEST_REMEMBERED))
        await ask(http, "/tokenize", {"prompt": word})


async def soak(served: Served, seconds: float) -> tuple[Curve, Counter[str]]:
    curve, sent, loop = Curve(), Counter[str](), asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=served.url, timeout=600) as http:
        await fill_tokenizer(http, random.Random(0))
    began = loop.time()

    async def client(number: int) -> None:
        dice = random.Random(number)
        async with httpx.AsyncClient(base_url=served.url, timeout=600) as http:
            while loop.time() < began + seconds:
                way = dice.choice(WAYS)
                await way(http, dice)
                sent[way.__name__] += 1

    async def watch() -> None:
        for sample in range(SAMPLES + 1):
            await asyncio.sleep(max(0.0, began + seconds * sample / SAMPLES - loop.time()))
            curve.add(loop.time() - began, served, sent.total())

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        group.create_task(watch())
    return curve, sent


def tiny_model_with_logits_that_weigh(folder: Path) -> list[str]:
    shutil.copytree(tiny_model.FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    return ["--model", str(folder), "--weights", "dummy"]


@pytest.mark.slow
def test_an_hour_of_churn_leaves_both_processes_as_large_as_they_were(tmp_path):
    options = [*tiny_model_with_logits_that_weigh(tmp_path / MODEL), *OPTIONS, "--draft", "suffix"]
    options += ["--disk", str(tmp_path / "tier"), "--disk-size", "64MiB"]
    with serving(options=options, OMP_NUM_THREADS="1") as served:
        curve, sent = asyncio.run(soak(served, float(os.environ.get("WEFT_SOAK_SECONDS", "3600"))))
        if report := os.environ.get("WEFT_SOAK_CURVE"):
            Path(report).write_text(json.dumps({"sent": sent, **vars(curve)}))
        assert set(sent) == {way.__name__ for way in WAYS}
        check_growth(curve)
        assert served.stop() == 0
        assert "Traceback" not in served.errors.read_text()


def test_growth_after_the_warm_up_would_be_seen_and_the_warm_up_is_not():
    steady, rising = [100 << 20] * SAMPLES, [(100 << 20) + i * (1 << 18) for i in range(SAMPLES)]
    warming = [min(size, (100 << 20) + SAMPLES // 2 * (1 << 18)) for size in rising]
    check_growth(Curve(front=steady, engine=warming))
    with pytest.raises(AssertionError, match=r"the engine grew by 29\.[78] MiB"):
        check_growth(Curve(front=steady, engine=rising))
    slowly = [(100 << 20) + i * (1 << 16) for i in range(SAMPLES)]
    with pytest.raises(AssertionError, match=r"the front grew by 7\.4 MiB"):
        check_growth(Curve(front=slowly, engine=slowly))
    with pytest.raises(AssertionError, match=r"the engine took 300\.0 MiB more"):
        check_growth(Curve(front=steady, engine=[steady[0], 400 << 20, *steady]))
