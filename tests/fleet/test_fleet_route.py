"""`weft route` as its users meet it: the same API before replicas on other machines, and a file that lists them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.fleet.routers import start_route
from tests.support.models import tiny_model
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import fake_info
from tests.support.servers.fake_members import FakeMember
from tests.support.servers.serving import Served, first_lines, serving, wait_for_log
from weft.base.errors import ModelError, OptionError
from weft.cli.main import main
from weft.cli.route import RouteOptions, texts_of
from weft.fleet.backend import FleetBackend
from weft.fleet.member import MemberState
from weft.fleet.replicas_file import ReplicasFile, read_replicas
from weft.text.identity import text_digest

PROMPT = {"prompt": "Once upon a time " * 12, "max_tokens": 6, "temperature": 0}
URLS = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tls://127.0.0.1:3"]


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("s" * 40)
    file.chmod(0o600)
    return str(file)


@pytest.mark.thorough
def test_a_router_answers_as_its_replica_and_never_loads_torch(secret, tmp_path):
    with serving("--fleet-listen", "127.0.0.1:0", "--fleet-secret", secret) as served:
        port = re.search(r"serving routers at 127.0.0.1:(\d+)", served.wait_for("serving routers at"))[1]
        log = tmp_path / "log"
        process = start_route([f"tcp://127.0.0.1:{port}", "--fleet-secret", secret], log)
        try:
            router = Served(process, first_lines(process), log, {})
            expected = served.call("/v1/completions", PROMPT)[1]
            found = router.call("/v1/completions", PROMPT)[1]
            assert found["choices"] == expected["choices"]
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
            chats = [each.call("/v1/chat/completions", chat)[1]["choices"] for each in (served, router)]
            assert chats[0] == chats[1]
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
            metrics = router.call("/metrics")[1]
            assert f'weft_replica_up{{replica="tcp://127.0.0.1:{port}"}} 1.0' in metrics
            assert served.stop() == 0
            wait_for_log(process, log, "is ejected")
            assert router.call("/health")[0] == 503
            assert router.call("/v1/completions", PROMPT)[0] == 503
            assert router.stop() == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_texts_of_another_model_are_refused_by_name(secret):
    options = RouteOptions(replica=tuple(URLS[:1]), fleet_secret=secret, model=str(tiny_model.FOLDER))
    digest = text_digest(tiny_model.FOLDER, tiny_model.FOLDER)
    assert texts_of(options, fake_info(digest=digest, end_tokens=[7])).end_tokens >= {7}
    with pytest.raises(ModelError, match="the replicas serve instant, and the config"):
        texts_of(options, fake_info(digest="another", end_tokens=[]))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--replicas-file or addresses must be given"),
        (URLS[:1], "--fleet-secret is required"),
        ([*URLS[:1], "--fleet-secret", "/none"], "cannot read fleet_secret /none"),
        (["http://a:1", "--fleet-secret", "SECRET"], "a replica must be tcp://HOST:PORT"),
        ([URLS[0], URLS[0], "--fleet-secret", "SECRET"], "is listed twice"),
        (["--replicas-file", "/none", "--fleet-secret", "SECRET"], "cannot use replicas_file /none"),
    ],
)
def test_a_router_that_cannot_work_is_one_line(arguments, complaint, secret, capsys, caplog):
    assert main(["route", *(secret if each == "SECRET" else each for each in arguments)]) == 2
    assert complaint in capsys.readouterr().err + caplog.text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--fleet-listen", "127.0.0.1:0"], "--fleet-listen and --fleet-secret need each other"),
        (["--fleet-listen", "nowhere", "--fleet-secret", "x"], "--fleet-listen must be HOST:PORT"),
        (["--fleet-listen", "a:1", "--fleet-secret", "x", "--replicas", "2"], "--fleet-listen serves one engine"),
    ],
)
def test_a_door_that_cannot_work_is_one_line(arguments, complaint, capsys):
    assert main(["serve", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@in_loop
async def test_a_changed_file_adds_and_drains_replicas(tmp_path, caplog):
    file = tmp_path / "replicas"
    file.write_text("\n".join(URLS[:2]))
    fleet = FleetBackend([(url, FakeMember()) for url in read_replicas(str(file))], patient=True, check_seconds=None)
    await fleet.start()
    watcher = ReplicasFile(str(file), fleet, lambda address: FakeMember(), 300)

    def states() -> dict[str, MemberState]:
        return {member.name: member.state for member in fleet.members}

    async def look() -> dict[str, MemberState]:
        watcher.look()
        for _ in range(20):
            await asyncio.sleep(0)
        return states()

    assert await look() == dict.fromkeys(URLS[:2], MemberState.UP)
    file.write_text(f"# the first one is upgraded\n{URLS[1]}\n{URLS[2]}\n")
    assert await look() == dict.fromkeys(URLS[1:], MemberState.UP)
    for wrong in ("", "http://a:1", "tcp://a:1\n" * 300):
        file.write_text(wrong)
        assert await look() == dict.fromkeys(URLS[1:], MemberState.UP), "a bad file changes nothing"
    file.unlink()
    assert await look() == dict.fromkeys(URLS[1:], MemberState.UP)
    assert "keeping the replicas" in caplog.text
    file.write_text("\n".join(URLS))
    assert await look() == dict.fromkeys(URLS, MemberState.UP)
    await fleet.stop(0)


def test_a_file_is_bounded(tmp_path):
    file = tmp_path / "replicas"
    file.write_text("#" * (1 << 17))
    with pytest.raises(OptionError, match="more than 65536 bytes"):
        read_replicas(str(file))
