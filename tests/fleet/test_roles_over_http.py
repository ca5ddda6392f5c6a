"""Engines with `--role`, as users start them: a chat through the router, the prefill engine and the decode engine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.support.fleet.routers import start_route
from tests.support.servers.serving import SECONDS, Served, first_lines, serving


@contextmanager
def serving_role(role: str, secret: str, *more: str) -> Iterator[tuple[Served, str]]:
    """Serve an engine with a role; yield it with its address for routers."""
    door = ("--fleet-listen", "127.0.0.1:0", "--fleet-secret", secret)
    with serving("--role", role, *door, "--exact", *more) as served:
        port = re.search(r"serving routers at 127.0.0.1:(\d+)", served.wait_for("serving routers at"))[1]
        yield served, f"tcp://127.0.0.1:{port}"


@contextmanager
def routing(urls: list[str], secret: str, folder) -> Iterator[Served]:
    log = folder / "log"
    process = start_route([*urls, "--fleet-secret", secret], log)
    try:
        router = Served(process, first_lines(process), log, {})
        for url in urls:
            router.wait_for(f"replica {url} is ready")
        yield router
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def chat(number: int) -> dict[str, object]:
    """A prompt of about 400 tokens that no other one begins like."""
    content = f"{number} " + "is the number of this chat. " * 13
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "stream": True}


def streamed(served: Served, body: dict[str, object]) -> str:
    """Return the text of a streamed chat, which must end as streams do."""
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert choices[-1]["finish_reason"] is not None
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@contextmanager
def answering(served: Served) -> Iterator[None]:
    """Keep an answer running, which a prompt beside it would delay: that is when prefill engines get prompts."""
    body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield
        # A generator that is forgotten closes its connection.
        lines.close()


def received_prefixes(router: Served) -> float:
    found = re.search(r"^weft_transfer_received_prefixes_total (\S+)", router.call("/metrics")[1], re.M)
    return 0.0 if found is None else float(found[1])


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("s" * 40)
    file.chmod(0o600)
    return str(file)


@pytest.mark.thorough
def test_a_chat_through_a_router_is_prefilled_by_one_engine_and_answered_by_another(secret, tmp_path):
    with serving_role("prefill", secret) as (prefill, first), serving_role("decode", secret) as (decode, second):
        with routing([first, second], secret, tmp_path) as router:
            deadline, number = time.monotonic() + SECONDS, 0
            # The router learns from the engine's next report that an answer runs, so the first chats may stay together.
            while not received_prefixes(router):
                assert time.monotonic() < deadline
                number += 1
                with answering(router):
                    found = streamed(router, chat(number))
                assert found == streamed(decode, chat(number))
            assert prefill.call("/server_info")[1]["stats"]["transfers"]["sent_prefixes"] >= 1
            shows_roles(router, {first: "prefill", second: "decode"})
        for served, role in ((prefill, "prefill"), (decode, "decode")):
            assert served.call("/server_info")[1]["role"] == role
            assert f'role="{role}"' in served.call("/metrics")[1]


def shows_roles(router: Served, roles: dict[str, str]) -> None:
    log, metrics, facts = router.errors.read_text(), router.call("/metrics")[1], router.call("/server_info")[1]
    assert "role" not in facts
    for url, role in roles.items():
        assert f"replica {url} is ready: role {role}" in log
        assert f'weft_replica_info{{replica="{url}",role="{role}"}} 1.0' in metrics
        assert facts["stats"]["replicas"][url]["role"] == role
