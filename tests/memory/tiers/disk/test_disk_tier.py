"""What a CPU engine's memory evicts is answered from a file, also by the next process, and never wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from time import sleep

import numpy as np
import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.models.disk_llm import PROMPTS
from tests.support.models.engines import Ask, serve, tokens
from tests.support.servers.http_server import serving
from tests.support.servers.serving import serving as serving_process
from tests.support.tiers.disk_tier import disk_engine, save_all
from weft import LLM
from weft.base.errors import InvalidOption
from weft.base.options import Options, SizingFacts, resolve
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.cli.main import main
from weft.engine.request import Request
from weft.memory.audit import audit
from weft.memory.misses import Reason
from weft.memory.tiers.disk.file import DiskFile
from weft.server.settings import ServerSettings

SMALL_ON_DISK = [*tiny_model.ARGUMENTS, "--port", "0", "--memory", "2MiB", "--threads", "1", "--max-length", "600"]
SMALL_ON_DISK += ["--dtype", "float32"]


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3", "llama"])
def test_a_restarted_engine_answers_from_the_file(family: str, tmp_path: Path) -> None:
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(4)]
    engine = disk_engine(family, tmp_path / "tier")
    first = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    engine.close()
    engine = disk_engine(family, tmp_path / "tier", depth=1)
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    engine.close()
    assert [a.tokens for a in again] == [a.tokens for a in first]
    assert all(a.report.loaded_tokens >= 192 for a in again)
    for a, b in zip(first, again, strict=True):
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-5


def test_units_that_were_damaged_on_disk_are_computed_again(tmp_path: Path) -> None:
    path, prompts = tmp_path / "tier", [tokens(300 + 10 * seed, seed) for seed in range(4)]
    engine = disk_engine("falcon_h1", path)
    layout = engine.copier._copies.disk.layout
    first = [serve(engine, [Ask(prompt)])[0].tokens for prompt in prompts]
    engine.close()
    damaged = bytearray(path.read_bytes())
    for place in range(layout.payload_offset + 1000, len(damaged), 4096):
        damaged[place] ^= 1
    path.write_bytes(damaged)
    engine = disk_engine("falcon_h1", path)
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    assert [a.tokens for a in again] == first
    assert [a.report.loaded_tokens for a in again] == [0] * 4
    assert engine.ledger.tiers is not None
    assert engine.ledger.tiers.links[0].failures == 4
    engine.close()
    # They were saved again, so nothing is damaged any more.
    assert not engine.ledger.tiers.links[0].saves.damaged
    engine = disk_engine("falcon_h1", path)
    assert all(serve(engine, [Ask(prompt)])[0].report.loaded_tokens >= 192 for prompt in prompts)
    engine.close()


def test_an_llm_serves_hits_after_a_restart_and_another_model_refuses_its_file(tmp_path: Path) -> None:
    options = {"threads": 1, "device": "cpu", "max_length": 600, "max_sequences": 4, "progress": False}
    options |= {"disk": str(tmp_path / "tier"), "disk_size": "8MiB", "memory": "16MiB"}
    prompt, greedy = tokens(200, 1), SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(**tiny_model.OPTIONS, **options) as llm:
        before = llm.generate([prompt], greedy)[0]
        with pytest.raises(InvalidOption, match="in use by another process"):
            LLM(**tiny_model.OPTIONS, **options)
    with LLM(**tiny_model.OPTIONS, **options) as llm:
        after = llm.generate([prompt], greedy)[0]
    assert after.token_ids == before.token_ids
    assert (before.loaded_tokens, after.loaded_tokens) == (0, 192)
    with pytest.raises(InvalidOption, match="belongs to another model"):
        LLM(**tiny_model.OPTIONS | {"dtype": "bfloat16"}, **options)


def test_a_file_still_belongs_to_its_model_when_drafts_are_turned_on(tmp_path: Path) -> None:
    options = {"threads": 1, "device": "cpu", "max_length": 600, "max_sequences": 4, "progress": False}
    options |= {"disk": str(tmp_path / "tier"), "disk_size": "8MiB", "memory": "16MiB"}
    prompt, greedy = tokens(200, 1), SamplingParams(max_tokens=4, temperature=0.0)
    answers = []
    for draft in ("off", "suffix"):
        with LLM(**tiny_model.OPTIONS, **options, draft=draft) as llm:
            answers.append(llm.generate([prompt], greedy)[0])
    assert [answer.loaded_tokens for answer in answers] == [0, 192]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_server_that_stops_closes_its_file_and_the_next_one_answers_from_it(tmp_path: Path) -> None:
    options = {"max_length": 600, "max_sequences": 4, "memory": "16MiB"}
    options |= {"disk": str(tmp_path / "tier"), "disk_size": "8MiB"}
    body = {"prompt": tokens(200, 1), "max_tokens": 1}
    details = []
    for _ in range(2):
        with serving(ServerSettings(model_name="tiny"), **options) as server:
            details.append(server.post("/v1/completions", body)["usage"]["prompt_tokens_details"])
    assert [each.get("loaded_tokens") for each in details] == [None, 192]


def test_a_start_decodes_no_header_and_a_lookup_those_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(300, seed) for seed in range(6)]
    engine = disk_engine("llama", tmp_path / "tier")
    for prompt in prompts:
        serve(engine, [Ask(prompt)])
    engine.close()
    decoded: list[int] = []
    original = DiskFile.header
    monkeypatch.setattr(DiskFile, "header", lambda self, row: decoded.append(row) or original(self, row))
    engine = disk_engine("llama", tmp_path / "tier")
    assert not decoded
    tiers, rows = engine.ledger.tiers, engine.copier._copies.disk.rows
    assert tiers is not None
    assert len(rows) >= 24
    link = tiers.links[0]
    keys = engine.add(Request(np.array(prompts[0], np.int32), SamplingParams(max_tokens=1)))
    assert link.deepest(engine._sequences[keys].keys, 300).depth == 4
    assert len(decoded) == 4
    audit(engine.ledger)
    tiers.restore_all()
    audit(engine.ledger)
    assert len(decoded) == len(rows) == len(link.lower.trie)
    engine.close()


def test_a_disk_is_refused_where_it_cannot_work() -> None:
    facts = SizingFacts(1 << 30, None, lambda size: size, 1)
    assert resolve(Options(disk="tier", disk_size="1GiB"), facts)[0].disk_bytes == 1 << 30
    gpu = replace(facts, device="cuda", free_host_bytes=1 << 34)
    both, _ = resolve(Options(disk="tier", disk_size="2GiB", host_memory="1GiB"), gpu)
    assert (both.host_bytes, both.disk_bytes) == (1 << 30, 2 << 30)
    with pytest.raises(InvalidOption, match="disk needs --disk-size"):
        resolve(Options(disk="tier"), facts)
    with pytest.raises(InvalidOption, match="disk_size needs --disk"):
        Options(disk_size="1GiB")
    with pytest.raises(InvalidOption, match="disk needs the cache"):
        resolve(Options(disk="tier", disk_size="1GiB", cache=False), facts)


def test_what_cannot_be_loaded_from_disk_is_a_miss_with_that_reason(tmp_path: Path) -> None:
    engine = disk_engine("llama", tmp_path / "tier")
    prompt = tokens(300, 1)
    serve(engine, [Ask(prompt)])
    save_all(engine)
    engine.ledger.cache.clear()
    assert engine.ledger.tiers is not None
    match = engine.ledger.match([], 0)
    keys = list(engine.ledger.tiers.links[0].lower.trie.nodes)
    assert engine.ledger.tiers.explain(keys, 64 * len(keys), match).reason is Reason.IN_DISK
    assert np.all([len(key) == 32 for key in keys])
    engine.close()


def test_the_command_shows_verifies_and_drops_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tier"
    engine = disk_engine("llama", path)
    both = [Ask(tokens(300, 1), salt=b"one"), Ask(tokens(300, 2), salt=b"two")]
    for ask in both:
        serve(engine, [ask])
    engine.close()
    one, two = (tenant_digest(salt).hex() for salt in (b"one", b"two"))
    assert main(["cache", str(path), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["tenants"]) == {one, two}
    assert report["damaged_units"] == 0
    assert main(["cache", str(path), "--list", "9"]) == 0
    assert capsys.readouterr().out.count("256 tokens") == 2
    assert main(["cache", str(path), "--prefix", "0" * 16]) == 2
    assert "needs --export-to" in capsys.readouterr().err
    assert main(["cache", str(path), "--drop", one, "--list", "9", "--json"]) == 0
    # What is left, not what was there before.
    report = json.loads(capsys.readouterr().out)
    assert set(report["tenants"]) == {two}
    assert [(each["tokens"], each["tenant"]) for each in report["prefixes"]] == [(256, two)]
    assert main(["cache", str(path), "--drop", one]) == 2
    assert "must be a tenant of this file" in capsys.readouterr().err
    engine = disk_engine("llama", path)
    assert [serve(engine, [ask])[0].report.loaded_tokens for ask in both] == [0, 256]
    engine.close()


def kill_engines(path: Path, rounds: int) -> int:
    """Kill a process that answers from a file, again and again; return how many tokens it loaded in all."""
    answers: dict[int, list[int]] = {}
    random, loaded = Random(7), 0
    for seed in range(rounds):
        command = [sys.executable, "-m", "tests.support.models.disk_llm", str(path), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(random.randint(2, 12)):
                line = process.stdout.readline()
                assert line, "the engine could not start"
                number, tokens_, from_disk = json.loads(line)
                assert answers.setdefault(number, tokens_) == tokens_, "another answer than before"
                loaded += from_disk
            process.kill()
    return loaded


@pytest.mark.slow
def test_twenty_killed_engines_leave_a_file_that_serves(tmp_path: Path) -> None:
    assert kill_engines(tmp_path / "tier", 20) > 1000


def kill_servers(path: Path, rounds: int) -> int:
    """Kill front and engine of a server while clients wait, again and again; return how many tokens it loaded."""
    disk = ["--disk", str(path), "--disk-size", "4MiB", "--max-sequences", "2"]
    answers: dict[int, str] = {}
    random, loaded = Random(11), 0
    for _ in range(rounds):
        with serving_process(*disk, options=SMALL_ON_DISK) as served, ThreadPoolExecutor(2) as clients:
            numbers = [random.randrange(len(PROMPTS)) for _ in range(random.randint(2, 12))]
            for number in numbers:
                status, answer = served.call("/v1/completions", asked(number))
                assert status == 200, answer
                text = answer["choices"][0]["text"]
                assert answers.setdefault(number, text) == text, "another answer than before"
                loaded += answer["usage"]["prompt_tokens_details"].get("loaded_tokens", 0)
            left = [clients.submit(served.call, "/v1/completions", asked(number)) for number in range(2)]
            sleep(random.uniform(0, 0.1))
            for process in (*served.children, served.process.pid):
                os.kill(process, signal.SIGKILL)
            assert all(isinstance(each.exception(), OSError) or each.result()[0] == 200 for each in left)
    return loaded


def asked(number: int) -> dict[str, object]:
    return {"prompt": PROMPTS[number], "max_tokens": 6, "temperature": 0.0}


@pytest.mark.slow
def test_twenty_killed_servers_leave_a_file_that_serves(tmp_path: Path) -> None:
    loaded = kill_servers(tmp_path / "tier", 20)
    print(f"20 killed servers: {loaded} tokens loaded, no other answer, no failed start")
    assert loaded > 1000


def test_what_was_flushed_is_not_found_after_a_restart(tmp_path: Path) -> None:
    engine = disk_engine("llama", tmp_path / "tier")
    serve(engine, [Ask(tokens(300, 1))])
    save_all(engine)
    engine.flush()
    assert not engine.idle, "the file still has to forget it"
    engine.close()
    engine = disk_engine("llama", tmp_path / "tier")
    assert serve(engine, [Ask(tokens(300, 1))])[0].report.cached_tokens == 0
    engine.close()
