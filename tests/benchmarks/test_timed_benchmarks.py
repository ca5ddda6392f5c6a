"""Benchmarks time what they claim to time: requests without a client's own start, matmuls with weights from memory."""

from __future__ import annotations

import queue
from argparse import Namespace
from itertools import cycle
from typing import Any

import pytest
import torch

from benchmarks import over_http, products


class Answering:
    """Client of a server that answers every request with two tokens at once."""

    events: list[str] = []  # noqa: RUF012

    def __init__(self, *ignored: object) -> None:
        pass

    async def get(self, path: str) -> dict[str, Any]:
        self.events.append(path)
        return {"data": [{"id": "tiny"}]}

    async def stream(self, path: str, body: dict[str, Any]):
        self.events.append(path)
        yield {
            "choices": [{"text": "two tokens"}],
            "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2},
        }

    async def close(self) -> None:
        self.events.append("closed")


class Ready:
    def wait(self) -> None:
        Answering.events.append("timed from here")


def test_a_client_that_is_timed_has_nothing_to_do_but_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.client.Client", Answering)
    monkeypatch.setattr(Answering, "events", [])
    arguments = Namespace(port=1, prefix_length=3, groups=2, input_length=4, output_length=2, vocabulary=100)
    results: queue.Queue[dict[str, Any]] = queue.Queue()
    over_http.send(arguments, 3, "seed", Ready(), results)
    assert Answering.events == ["/v1/models", "timed from here", *["/v1/completions"] * 3, "closed"]
    found = results.get_nowait()
    assert (found["tokens"], found["errors"]) == (6, [])
    assert found["began"] <= found["ended"]


def test_a_routine_goes_on_where_it_stopped_so_that_its_weights_have_left_the_caches() -> None:
    used: list[int] = []
    matmuls = cycle([lambda x, number=number: used.append(number) for number in range(5)])
    for _ in range(2):
        products.timed(torch.zeros(1, 1), matmuls, count=2)
    assert used == [0, 1, 2, 3, 4, 0]
