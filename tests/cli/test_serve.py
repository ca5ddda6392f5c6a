"""`weft serve` as its users meet it: the first line, what it lets paste, signals, exit codes, keys, warnings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import get_args

import pytest

from tests.support.models import tiny_model
from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import SECONDS, SMALL, Served, serving, wait_for_log
from weft.base.errors import OptionError
from weft.base.logs import LogFormat
from weft.base.options import Options
from weft.cli.client import Client, ServerError
from weft.cli.main import main
from weft.cli.serve import (
    LOG_FORMATS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ServeOptions,
    read_admin_key,
    read_keys,
    settings_of,
)
from weft.server.access.keys import Key, RateLimits
from weft.server.http.listener import bind, listen
from weft.start.launch import LOOPBACK, Address, curl, load_texts, warn_of_strangers
from weft.text.reasoning import REASONING
from weft.text.tools import FORMATS

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
# Takes seconds: a client that has seen the beginning can act before the end, also on a busy machine.
LONG = {"prompt": "Once upon a time", "max_tokens": 3500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def quiet_start():
    """Start the server that most tests here ask; yield it and what it had logged before the first request."""
    with serving() as found:
        yield found, found.errors.read_text()


@pytest.fixture(scope="module")
def served(quiet_start):
    return quiet_start[0]


def test_five_lines_name_model_device_memory_what_auto_chose_and_the_address_alone(served):
    assert [line.split()[0] for line in served.lines[:4]] == ["model", "device", "memory", "auto"]
    assert served.lines[0].startswith("model    tiny: ")
    assert re.fullmatch(r"device   cpu, 1 thread, (C\+\+ kernels|PyTorch kernels, no C\+\+: .*)", served.lines[1])
    assert re.fullmatch(r"memory   0\.06 GiB, for \d+ tokens of context", served.lines[2])
    assert "exact off" in served.lines[3]
    assert served.lines[4] == served.url
    # The reasons, and what else is known at the start, are on request.
    assert served.call("/server_info")[1]["auto"]["exact"].startswith("off: ")


def test_by_default_a_server_says_nothing_else_until_it_is_asked(quiet_start):
    served, logged = quiet_start
    assert len(served.lines) == 5
    # A first start also says that kernels are compiled.
    assert [line for line in logged.splitlines() if "compiling" not in line] == []


def test_it_answers_openai_requests(served):
    status, models = served.call("/v1/models")
    assert (status, [each["id"] for each in models["data"]]) == (200, ["tiny"])
    status, answer = served.call("/v1/chat/completions", HELLO)
    assert (status, answer["object"]) == (200, "chat.completion")
    assert served.call("/v1/chat/completions", HELLO | {"max_tokens": -1})[0] == 400
    assert served.call("/health")[0] == 200


def test_chat_talks_to_a_server_and_tells_cached_tokens(served, monkeypatch, capsys, tmp_path):
    said = tmp_path / "said"
    said.write_text(f"{'Tell me about looms. ' * 10}\nAnd then?\n/exit\nnever sent\n")
    with said.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["chat", "--url", served.url, "--max-tokens", "8", "--stats", "--temperature", "0"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "; 0 of " in told[0]
    cached = int(told[1].partition("; ")[2].split()[0])
    assert cached >= 192
    assert cached % 64 == 0


def test_chat_without_a_server_says_so_in_one_line(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("weft chat: cannot connect to http://127.0.0.1:1")


async def follow(url: str, body: dict, after_first=lambda: None, key: str | None = None) -> int:
    """Tokens of a streamed answer; something is done after its first chunk."""
    client, tokens = Client(url, key), 0
    async with aclosing(client.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})) as events:
        async for event in events:
            if event["choices"] and not tokens:
                after_first()
                tokens = 1
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    await client.close()
    return tokens


@pytest.mark.parametrize(("logged", "status"), [("ready", 0), ("failed", 3)])
def test_waiting_for_a_log_line_ends_with_the_process(tmp_path, logged, status):
    code = f"import sys; print({logged!r}, file=sys.stderr); sys.exit({status})"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=log, text=True)
    if logged == "ready":
        # Its line may not have ended yet.
        assert wait_for_log(process, tmp_path / "log", "ready").rstrip() == "ready"
    else:
        with pytest.raises(AssertionError, match=r"ended with 3 before it logged 'ready':\n\s*failed"):
            wait_for_log(process, tmp_path / "log", "ready")
    process.wait()


def test_sigterm_lets_running_requests_finish_and_takes_no_more():
    # A busy machine may need long for the rest of the answer.
    with serving("--drain-seconds", str(SECONDS)) as served:
        [engine] = served.children

        def stop() -> None:
            # The answer cannot be complete before the server has closed its door.
            os.kill(engine, signal.SIGSTOP)
            served.process.send_signal(signal.SIGTERM)

        async def watch() -> int:
            running = asyncio.create_task(follow(served.url, LONG | {"max_tokens": 400}, stop))
            await asyncio.to_thread(served.wait_for, "draining")
            # Balancers and new clients get an answer: the port stays open while running requests finish.
            for work in (Client(served.url).get("/health"), Client(served.url).post("/v1/completions", LONG)):
                with pytest.raises(ServerError, match="status 503"):
                    await work
            os.kill(engine, signal.SIGCONT)
            return await running

        assert asyncio.run(watch()) == 400
        assert served.process.wait(SECONDS) == 0
        assert "Traceback" not in served.errors.read_text()


@pytest.mark.thorough
def test_what_is_not_finished_in_time_is_answered_with_an_error():
    with serving("--drain-seconds", "0.2", "--in-process") as served:

        def stop() -> None:
            served.process.send_signal(signal.SIGINT)

        with pytest.raises(ServerError, match="the engine has stopped or is stopping"):
            asyncio.run(follow(served.url, LONG, stop))
        assert served.process.wait(SECONDS) == 0


@pytest.mark.thorough
def test_on_request_the_rest_is_logged_with_a_curl_that_takes_its_key_and_a_dead_engine_ends_the_server():
    with serving("--served-model-name", "loom", "--log-level", "debug", WEFT_API_KEY="secret") as served:
        text = served.wait_for("try: curl ")
        rest = ("accepting up to", "operations: ", "exact: ", "dtype: ")
        assert all(f"DEBUG weft: {words}" in text for words in rest)
        assert "secret" not in served.curl
        assert served.call("/v1/models")[0] == 401
        assert served.call("/v1/models", key="secret")[1]["data"][0]["id"] == "loom"
        found = subprocess.run(["bash", "-c", served.curl], capture_output=True, text=True, env=served.environment)
        answer = json.loads(found.stdout)
        assert (answer["model"], answer["choices"][0]["message"]["role"]) == ("loom", "assistant")
        assert answer["usage"]["completion_tokens"] <= 32

        [engine] = served.children
        with pytest.raises(ServerError):
            asyncio.run(follow(served.url, LONG, lambda: os.kill(engine, signal.SIGKILL), key="secret"))
        assert served.process.wait(SECONDS) == 1
        assert "the engine has ended" in served.errors.read_text()


# what goes wrong before anything runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [True, False])
def test_an_address_in_use_is_told_at_once_and_in_one_line(caplog, loads):
    with bind("127.0.0.1", 0) as taken:
        # A server that still loads its model has bound its address, and does not listen yet.
        if not loads:
            listen(taken)
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert caplog.messages == [f"cannot bind 127.0.0.1:{port}: " + os.strerror(98)]


def test_an_address_with_closed_connections_of_an_earlier_server_can_be_bound():
    port = 0
    for _ in range(3):
        with bind("127.0.0.1", port) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(OptionError, match="cannot bind"):
                bind("127.0.0.1", port)
            listen(listener)
            with socket.create_connection(("127.0.0.1", port)) as client:
                # The side that closes first keeps the connection for a while.
                listener.accept()[0].close()
                assert client.recv(1) == b""


def test_a_model_that_cannot_be_loaded_is_one_line():
    command = [sys.executable, "-m", "weft", "serve", *SMALL, "/no/such/model"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    [line] = found.stderr.splitlines()
    assert " ERROR weft: there is no folder /no/such/model" in line


@pytest.mark.thorough
def test_more_memory_than_the_machine_has_is_one_line():
    command = [sys.executable, "-m", "weft", "serve", *SMALL, "--memory", "9999999GiB", "--log-level", "warning"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    [line] = found.stderr.splitlines()
    assert " ERROR weft: cannot allocate memory of 9999999.0 GiB" in line


def test_a_signal_while_loading_ends_at_once(tmp_path):
    folder = shutil.copytree(tiny_model.FOLDER, tmp_path / "model")
    # Nothing is ever written into it, so loading does not end.
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    command = [sys.executable, "-m", "weft", "serve", *SMALL, "--model", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    served = Served(process, "", tmp_path, {})
    wait_until(lambda: served.children or process.poll() is not None)
    [engine] = served.children
    process.send_signal(signal.SIGTERM)
    text, told = process.communicate(timeout=SECONDS)
    assert (process.returncode, text) == (0, "")
    assert "Traceback" not in told
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--drain-seconds", "-1"], "--drain-seconds must be from 0"),
        (["--api-key", "two words"], "api_keys must be non-empty ASCII"),
        (["--admin-key", "a"], "admin_key needs api_keys"),
        (["--api-key-file", "/no/such/file"], "cannot read api_key_file /no/such/file"),
        (["--max-body", "auto"], "--max-body must be a size"),
        (["--max-body", "0"], "--max-body must be a size"),
        (["--max-answers", "0"], "--max-answers must be at least 1"),
        (["--engine-timeout", "nan"], "--engine-timeout must be from 0"),
        (["--limit", "tool=3"], "must be one of body_bytes, header_bytes"),
        (["--limit", "tools"], "'' is not a valid number for tools"),
        (["--limit", "tools=x"], "'x' is not a valid number for tools"),
        (["--limit", "tools=0"], "tools must be greater than zero"),
        (["--limit", "tools=129"], "tools must be at most 128, the limit of the engine"),
        (["--limit", "schema_bytes=many"], "schema_bytes must be a size"),
        (["--host", "no.such.host.invalid"], "cannot bind no.such.host.invalid"),
        (["--max-open-requests", "0"], "--max-open-requests must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_one_line(capsys, caplog, monkeypatch, arguments, message):
    """Printed if the command line alone shows it, and logged once the log is set up."""
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    assert main(["serve", *arguments]) == 2
    printed, logged = capsys.readouterr().err.splitlines(), caplog.messages
    assert len(printed) == message.startswith("--")
    assert message in [*printed, *logged][-1]


def test_strangers_are_warned_of_and_louder_without_a_key(caplog):
    for host in LOOPBACK:
        warn_of_strangers(host, has_keys=False)
    assert caplog.messages == []
    warn_of_strangers("0.0.0.0", has_keys=True)
    assert len(caplog.messages) == 1
    caplog.clear()
    warn_of_strangers("0.0.0.0", has_keys=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "NO API KEY" in caplog.text


def test_by_default_only_this_machine_is_served():
    assert ServeOptions().host == "127.0.0.1"
    with bind(ServeOptions().host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_keys_come_from_options_and_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("b\n\n c \nbob d requests_per_minute=5\n")
    file.chmod(0o600)
    assert read_keys(ServeOptions()) == ()
    from_file = (Key("b"), Key("c"), Key("d", "bob", RateLimits(5)))
    assert read_keys(ServeOptions(api_key=("a",), api_key_file=str(file))) == ("a", *from_file)
    file.write_text("\n# none\n")
    with pytest.raises(OptionError, match="has no key"):
        read_keys(ServeOptions(api_key_file=str(file)))


def test_the_admin_key_comes_from_option_or_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("root sesame\n")
    file.chmod(0o600)
    assert read_admin_key(ServeOptions(admin_key="a")) == "a"
    assert read_admin_key(ServeOptions(admin_key_file=str(file))) == Key("sesame", "root")
    file.write_text("one\ntwo\n")
    with pytest.raises(OptionError, match="must hold one key, got 2"):
        read_admin_key(ServeOptions(admin_key_file=str(file)))
    with pytest.raises(OptionError, match="exclude each other"):
        ServeOptions(admin_key="a", admin_key_file=str(file))
    assert read_admin_key(ServeOptions()) is None


def test_parsers_on_the_command_line_are_those_that_exist():
    assert ("auto", "none", *FORMATS) == TOOL_PARSERS
    assert ("auto", "none", *REASONING) == REASONING_PARSERS
    assert get_args(LogFormat) == LOG_FORMATS


def test_options_reach_the_settings():
    found = settings_of(
        ServeOptions(
            api_key=("a", "b"),
            admin_key="c",
            served_model_name="loom",
            open_health=False,
            requests_per_minute=60,
            tokens_per_minute=1000,
            log_requests=False,
            sse_keep_alive=3.0,
            max_open_requests=7,
            max_body="1KiB",
            max_answers=3,
            limit=("tools=5", "schema_bytes=2KiB", "header_seconds=1.5", "n=4"),
            drain_seconds=2.5,
            cors_origin=("http://a",),
            tool_parser="hermes",
            reasoning_parser="none",
        )
    )
    assert (found.api_keys, found.admin_key, found.model_name) == (("a", "b"), "c", "loom")
    limits = found.limits
    assert (limits.open_sequences, limits.body_bytes, limits.n) == (7, 1024, 4)
    assert (limits.tools, limits.schema_bytes, limits.header_seconds, limits.stops) == (5, 2048, 1.5, 16)
    assert (found.open_health, found.drain_seconds, found.cors_origins) == (False, 2.5, ("http://a",))
    assert (found.key_rates, found.log_requests, found.keep_alive_seconds) == (RateLimits(60, 1000), False, 3.0)
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", "none")


def test_without_a_key_only_names_of_this_machine_are_answered_to():
    assert settings_of(ServeOptions()).trusted_hosts == LOOPBACK
    assert settings_of(ServeOptions(host="0.0.0.0")).trusted_hosts == ()
    assert settings_of(ServeOptions(api_key=("a",))).trusted_hosts == ()


def test_a_model_without_a_tokenizer_is_told_of_and_pasted_with_token_ids(tmp_path, caplog):
    texts = load_texts(Options(model=str(tmp_path)), {"folder": str(tmp_path), "end_tokens": [5]})
    assert (texts.tokenizer, texts.template, texts.end_tokens) == (None, None, frozenset([5]))
    assert "no tokenizer.json" in caplog.text
    echo = curl(Address("http://[::1]:80"), "it's", False, texts).replace("curl", "printf '%s\\n'", 1)
    words = subprocess.run(["bash", "-c", echo], capture_output=True, text=True).stdout.splitlines()
    assert words[1] == "http://[::1]:80/v1/completions"
    assert json.loads(words[-1]) == {"model": "it's", "max_tokens": 32, "prompt": [1, 2, 3]}


def test_a_free_port_is_found_for_zero():
    with bind("127.0.0.1", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[1] > 0
