"""A real S3-compatible store in a process of its own: objects go there and back, and engines share their work."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from tests.support.hashed.drops import drop
from tests.support.models import tiny_model
from tests.support.models.engines import Ask, model_of, serve, smallest_memory, spec_of, tokens
from tests.support.servers.serving import wait_for_log
from tests.support.tiers.disk_blocks import IDENTITY
from tests.support.tiers.disk_tier import save_all
from weft import LLM
from weft.base.config import EngineConfig
from weft.base.errors import InvalidOption
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.engine.loop import Engine
from weft.memory.keys import PrefixIdentity
from weft.memory.misses import Reason
from weft.memory.tiers.remote.store import ObjectMissing, S3Objects, StoreFailed
from weft.runner.runner import Runner

pytest.importorskip("obstore")
pytest.importorskip("moto")

ONE, TWO = b"1" * 32, b"2" * 32


@dataclass
class StoreProcess:
    process: subprocess.Popen[str]
    address: str
    url: str = ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def store_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    log = tmp_path_factory.mktemp("store") / "log"
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with log.open("w") as out, subprocess.Popen(command, stderr=out, stdout=out, text=True) as process:
        text = wait_for_log(process, log, "Press CTRL+C")
        address = re.search(r"Running on (http://[\d.:]+)", text)[1]
        assert httpx.put(f"{address}/weft-tests", timeout=60).status_code == 200
        try:
            yield StoreProcess(process, address)
        finally:
            process.kill()


@pytest.fixture
def s3(store_process: StoreProcess, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StoreProcess:
    """The store, with a place of its own for each test."""
    monkeypatch.setattr("weft.memory.tiers.tiers.LEAST_SECONDS_TO_ASK", 0.0)
    monkeypatch.setattr("weft.memory.tiers.remote.discovery.PATIENCE_SECONDS", 1e9)
    values = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in (values | {"AWS_ENDPOINT_URL": store_process.address, "AWS_ALLOW_HTTP": "true"}).items():
        monkeypatch.setenv(name, value)
    store_process.url = f"s3://weft-tests/some/place-{request.node.originalname}"
    return store_process


def test_objects_go_there_and_back(s3: StoreProcess) -> None:
    store = S3Objects(s3.url)
    store.put("a/b", b"some bytes")
    store.put("a/c", b"x" * 100_000)
    store.put("b/c", b"")
    assert bytes(store.get("a/b", 100)) == b"some bytes"
    assert len(store.get("a/c", 500)) == 500
    assert (store.has("a/b"), store.has("a/x")) == (True, False)
    with pytest.raises(ObjectMissing):
        store.get("a/x", 10)
    assert sorted(name for part in store.names("a/") for name in part) == ["a/b", "a/c"]
    store.drop(["a/b", "a/c", "a/gone"])
    assert [name for part in store.names("") for name in part] == ["b/c"]


def remote_engine(family: str, url: str) -> Engine:
    spec, memory = spec_of(family), smallest_memory(family, 420, 4)
    options = {"max_sequences": 4, "max_tokens_per_step": 512, "max_length": 420, "paranoid": True}
    config = EngineConfig(memory_bytes=memory, remote=True, **options)
    runner = Runner(model_of(family), spec, memory, config.max_sequences, threads=1)
    runner.tiers.add_remote(url, IDENTITY)
    return Engine(spec, runner, config, closing_seconds=300.0)


def test_an_llm_answers_from_the_store_and_another_model_does_not(s3: StoreProcess) -> None:
    options = {"threads": 1, "device": "cpu", "max_length": 600, "max_sequences": 4, "memory": "16MiB"}
    options |= {"progress": False, "remote": s3.url}
    prompt, greedy = tokens(200, 1), SamplingParams(max_tokens=4, temperature=0.0)
    results = []
    for dtype in ("float32", "float32", "bfloat16"):
        with LLM(**tiny_model.OPTIONS, **options, dtype=dtype) as llm:
            results.append(llm.generate([prompt], greedy)[0])
    assert [each.loaded_tokens for each in results] == [0, 192, 0]
    assert results[0].token_ids == results[1].token_ids


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidOption, match=r"weft-serve\[remote\]"):
        S3Objects("s3://bucket")


def test_a_prefix_is_dropped_by_the_headers_of_its_objects(s3: StoreProcess) -> None:
    shared = tokens(128, 1)
    one, other = Ask([*shared, *tokens(200, 2)]), Ask([*shared, *tokens(200, 3)])
    engine = remote_engine("falcon_h1", s3.url)
    for ask in (one, other):
        serve(engine, [ask])
    save_all(engine)
    keys = [PrefixIdentity(engine.ledger.cell).keys(np.array(ask.prompt, np.int32)) for ask in (one, other)]
    stored = {name.rsplit("/", 1)[1] for part in S3Objects(s3.url).names("") for name in part}
    assert all(key.hex() in stored for path in keys for key in path)
    # From the first cell on that only one of them has.
    assert drop(engine, prefix=keys[0][2])["erased"] is True
    left = {name.rsplit("/", 1)[1] for part in S3Objects(s3.url).names("") for name in part}
    assert left == stored - {key.hex() for key in keys[0][2:]}
    engine.close()
    engine = remote_engine("falcon_h1", s3.url)
    assert serve(engine, [other])[0].report.loaded_tokens == 320
    assert serve(engine, [one])[0].report.cached_tokens <= 128
    engine.close()


def test_engines_share_what_they_compute_and_go_on_without_the_store(s3: StoreProcess) -> None:
    mine, theirs = Ask(tokens(300, 1), salt=ONE), Ask(tokens(300, 2), salt=TWO)
    one = remote_engine("falcon_h1", s3.url)
    first = [serve(one, [ask])[0] for ask in (mine, theirs)]
    save_all(one)
    one.close()
    other = remote_engine("falcon_h1", s3.url)
    again = serve(other, [mine])[0]
    assert again.tokens == first[0].tokens
    assert again.report.loaded_tokens >= 192
    assert max(abs(x - y) for x, y in zip(again.logprobs, first[0].logprobs, strict=True)) < 1e-5
    assert drop(other, tenant=tenant_digest(ONE))["erased"] is True
    assert serve(other, [mine])[0].report.cached_tokens == 0
    # The last test of this file: no other one finds the store again.
    s3.kill()
    with pytest.raises(StoreFailed):
        S3Objects(s3.url).has("x")
    alone = serve(other, [theirs])[0]
    assert alone.tokens == first[1].tokens
    assert alone.report.miss is not None
    assert alone.report.miss.reason is Reason.REMOTE_SILENT
    other.close()
