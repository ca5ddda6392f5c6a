"""Saved prompts are hit in the engine that loads them, for their own tenant only; forged files are refused."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.drops import drop
from tests.support.hashed.rolling import oracle, rolling_spec
from tests.support.hashed.saving import IDENTITY, SavingDevice, SavingRoundingDevice, ask, load, run, save, saved_model
from tests.support.hashed.workloads import Run, Workload, check_answers, drive, random_workload
from weft.base.config import EngineConfig
from weft.base.errors import InvalidField, RequestError
from weft.base.tenants import tenant_digest
from weft.engine.events import FinishReason, Output
from weft.engine.loop import Engine
from weft.engine.saved import prompts
from weft.engine.saved.prompts import SavedPrompts
from weft.memory.audit import audit
from weft.memory.identity import Identity
from weft.memory.keys import PrefixIdentity
from weft.memory.misses import Reason
from weft.memory.saved import carriages
from weft.memory.saved.carried import Carried
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.format import BLOCK, ENTRY, checksum, decode
from weft.memory.tiers.disk.prefix_file import TOKENS_AT, read_tokens_head

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "400")) // 20
MODELS = {
    "hybrid": {},
    "heavy states": {"heavy": True},
    "windows and states": {"window": 7},
    "windows": {"recurrent": False, "window": 9},
    "pages": {"recurrent": False},
    "states": {"full": False},
}
PROMPT = [n * n % 97 for n in range(130)]


def make(exact: bool = False, memory: int = 1 << 18, identity: Identity = IDENTITY, **spec: object) -> Engine:
    shape = rolling_spec(**spec)
    config = EngineConfig(memory_bytes=memory, max_length=400, max_sequences=8, exact=exact, paranoid=True)
    device = (SavingRoundingDevice if exact else SavingDevice)(shape, memory, 8)
    if exact:
        config, identity = replace(config, form="test"), replace(identity, exact=True)
    return Engine(shape, device, config, saves=saved_model(identity))


@pytest.mark.parametrize("exact", [False, True], ids=["usual", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_a_saved_prompt_is_hit_where_it_was_loaded(model: str, exact: bool, tmp_path: Path) -> None:
    spec, path = MODELS[model], tmp_path / "prompt"
    assert save(make(exact, **spec), ask(PROMPT, 0), path).finish is FinishReason.LENGTH
    assert path.stat().st_mode & 0o777 == 0o600
    other = make(exact, **spec)
    found = load(other, path, share=float(exact))
    assert found["tokens"] == len(PROMPT)
    assert found["cached_tokens"] == 128
    assert found["verified_tokens"] == 128 * exact
    expected = oracle(other.ledger.spec, PROMPT, 9, exact=exact)
    [(tokens, report)] = run(other, ask(PROMPT, 9))
    assert tokens == expected
    assert report.cached_tokens == 128
    audit(other.ledger)
    assert not list(other.ledger.carried.held())
    other.flush()
    assert other.ledger.arena.used_slabs == 0


@pytest.mark.parametrize("exact", [False, True], ids=["usual", "exact"])
def test_an_answer_is_saved_with_its_prompt_and_forked_elsewhere(exact: bool, tmp_path: Path) -> None:
    first, second, path = make(exact), make(exact), tmp_path / "prompt"
    [(answer, _)] = run(first, ask(PROMPT, 60, keeps_answer=True))
    save(first, ask(PROMPT, 0, answered=np.array(answer[:50], np.int32)), path)
    assert load(second, path, share=float(exact))["tokens"] == 180
    [(tokens, report)] = run(second, ask(PROMPT, 10, answered=np.array(answer[:50], np.int32)))
    assert tokens == answer[50:]
    assert report.cached_tokens == 176, "the last multiple of a cell before the end"


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_share_of_a_file_is_computed_again(share: float, tmp_path: Path) -> None:
    for model in ("hybrid", "pages", "windows"):
        path, other = tmp_path / model, make(exact=True, **MODELS[model])
        save(make(exact=True, **MODELS[model]), ask(PROMPT, 0), path)
        found = load(other, path, share=share)
        assert 0 < found["verified_tokens"] < 128
        assert other.stats()["files"]["verified_tokens"] == found["verified_tokens"]
        [(tokens, report)] = run(other, ask(PROMPT, 5))
        assert (tokens, report.cached_tokens) == (oracle(other.ledger.spec, PROMPT, 5, exact=True), 128)


# refusals -------------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, salt: bytes = b"", exact: bool = False, **spec: object) -> Path:
    path = tmp_path / "saved"
    save(make(exact, **spec), ask(PROMPT, 0, salt=salt), path)
    return path


def refused(engine: Engine, path: Path, text: str, salt: bytes = b"", share: float = 0.0) -> None:
    before = len(engine.ledger.cache.trie)
    error = load(engine, path, salt, share)["error"]
    assert text in error, error
    assert "\n" not in error
    assert len(engine.ledger.cache.trie) == before
    assert not list(engine.ledger.carried.held())
    audit(engine.ledger)


def check_other_tenants(tmp_path: Path) -> None:
    path = saved(tmp_path, salt=b"one")
    for salt in (b"", b"two", b"One"):
        engine = make()
        answer = load(engine, path, salt)
        assert run(engine, ask(PROMPT, 3, salt=salt))[0][1].cached_tokens == 0, "another tenant's prompt was hit"
        assert "another tenant" in answer["error"]


def test_a_file_of_another_tenant_never_hits(tmp_path: Path) -> None:
    check_other_tenants(tmp_path)


def test_a_file_of_the_same_tenant_with_another_salt_never_hits(tmp_path: Path) -> None:
    key = bytes(range(32))
    engine, path = make(), saved(tmp_path, salt=key + b"one")
    refused(engine, path, "the file is damaged, or has other units", salt=key + b"two")
    assert "error" not in load(engine, path, key + b"one")
    assert run(engine, ask(PROMPT, 3, salt=key + b"two"))[0][1].cached_tokens == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": b"v" * 16}, "the weights or their dtype differ"),
        ({"configuration": b"d" * 16}, "the configuration differs"),
        ({"layout": b"m" * 16}, "the layout of memory differs"),
        ({"revisions": "test 2"}, "computed by test 1, and this is test 2"),
    ],
)
def test_a_file_of_another_model_dtype_or_version_never_hits(change: dict, text: str, tmp_path: Path) -> None:
    engine = make(identity=replace(IDENTITY, **change))
    refused(engine, saved(tmp_path), text)
    assert run(engine, ask(PROMPT, 3))[0][1].cached_tokens == 0


def test_an_exact_engine_takes_no_other_files_and_only_it_verifies(tmp_path: Path) -> None:
    path = saved(tmp_path)
    refused(make(exact=True), path, "--exact off")
    refused(make(), path, "verifying needs --exact", share=1.0)


def test_what_is_too_large_too_short_or_not_there_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    refused(make(memory=1 << 13), path, "this engine imports up to")
    refused(make(), tmp_path / "nothing", "cannot be read")
    short = Engine(
        rolling_spec(),
        SavingDevice(rolling_spec(), 1 << 18, 8),
        EngineConfig(memory_bytes=1 << 18, max_length=100, max_sequences=8),
        saves=saved_model(),
    )
    refused(short, path, "has 130 tokens; this engine takes up to 100")
    with pytest.raises(InvalidField, match="must have at least 4 tokens"):
        make().add(ask([1, 2, 3], 0), save_to=tmp_path / "short")
    with pytest.raises(InvalidField, match="max_tokens must be 0"):
        make().add(ask(PROMPT, 1), save_to=tmp_path / "long")
    shape = rolling_spec()
    engine = Engine(
        shape, SavingDevice(shape, 1 << 16, 8), EngineConfig(memory_bytes=1 << 16, max_length=400, max_sequences=8)
    )
    with pytest.raises(RequestError, match="--prefix-key"):
        engine.begin_load(1, path, b"", 0.0)


def test_tokens_beyond_the_vocabulary_are_refused_before_they_are_computed(tmp_path: Path) -> None:
    """A signer may write any; the engine's step would fail for all."""
    path = tmp_path / "wild"
    engine = make()
    prompt = [*PROMPT[:50], 5]
    save(engine, ask(prompt, 0), path)
    raw = bytearray(path.read_bytes())
    raw[-4:] = np.array([97], "<i4").tobytes()
    head = read_tokens_head(bytes(raw[:BLOCK]))
    raw[TOKENS_AT:BLOCK] = replace(head, checksum=checksum(bytes(raw[-204:]))).encode().ljust(BLOCK - TOKENS_AT, b"\0")
    path.write_bytes(raw)
    refused(make(), path, "tokens beyond the vocabulary, whose ids are 0 to 96")


def test_an_engine_without_host_memory_refuses_files_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    path = saved(tmp_path)

    def allocate(self: object, size_bytes: int) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(SavingDevice, "allocate", allocate)
    engine = make()
    refused(engine, path, "no host memory for prompts in files: none left")
    ended = save(engine, ask(PROMPT, 0), tmp_path / "out")
    assert ended.finish is FinishReason.ERROR
    assert not (tmp_path / "out").exists()
    assert run(engine, ask(PROMPT, 5))[0][0] == oracle(engine.ledger.spec, PROMPT, 5)


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    engine = make()
    ended = save(engine, ask(PROMPT, 0), path)
    assert ended.finish is FinishReason.ERROR
    assert "cannot be created" in ended.error
    assert path.read_text() == "mine"


def test_a_dropped_tenants_prompts_go_nowhere(tmp_path: Path) -> None:
    path, engine = saved(tmp_path, salt=b"one"), make()
    engine.begin_load(7, path, b"one", 0.0)
    engine.step()
    drop(engine, tenant=tenant_digest(b"one"))
    assert "being dropped" in engine.take_loaded()[7]["error"]
    number = engine.add(ask(PROMPT, 0, salt=b"one"), save_to=tmp_path / "out")
    while not engine.saved.busy:
        engine.step()
    drop(engine, tenant=tenant_digest(b"one"))
    while not engine.idle:
        engine.step()
    assert not (tmp_path / "out").exists()
    engine.forget(number)
    assert run(engine, ask(PROMPT, 3, salt=b"one"))[0][1].cached_tokens == 0


def test_an_import_that_was_evicted_is_a_miss_with_a_reason_of_its_own(tmp_path: Path) -> None:
    engine = make(memory=1 << 16)
    assert load(engine, saved(tmp_path))["cached_tokens"] == 128
    assert run(engine, ask(PROMPT, 1))[0][1].miss.reason is Reason.NOTHING_MORE
    engine.flush()
    # A flush forgets why; eviction does not.
    load(engine, tmp_path / "saved")
    for number in range(40):
        run(engine, ask([(number + n) * (n + 3) % 97 for n in range(150)], 1))
    assert run(engine, ask(PROMPT, 1))[0][1].miss.reason is Reason.IMPORT_EVICTED


# mutations ------------------------------------------------------------------------------------------------------------


def resealed(data: bytearray) -> bytearray:
    """The same file with right checksums of headers and units, as one who can sign would write it."""
    place = BLOCK
    while place + ENTRY <= len(data):
        header = decode(bytes(data[place : place + ENTRY]))
        if header is None:
            break
        body = bytes(data[place + ENTRY : place + ENTRY + header.size])
        data[place : place + ENTRY] = replace(header, checksum=checksum(body)).encode()
        place += ENTRY + header.size
    return data


def mutated(whole: bytes, random: Random) -> bytearray:
    data = bytearray(whole)
    for _ in range(random.randint(1, 3)):
        kind = random.random()
        place = random.randrange(len(data)) if data else 0
        if kind < 0.4:
            data[place] ^= 1 << random.randrange(8)
        elif kind < 0.55:
            del data[place:]
        elif kind < 0.7:
            data += random.randbytes(random.randint(1, 400))
        elif kind < 0.85:
            size = random.randint(1, 600)
            data[place : place + size] = random.randbytes(size)
        else:
            del data[place : place + random.choice([4, 256, 384, 128])]
        data = data or bytearray(b"x")
    return data


def check_mutations(tmp_path: Path, count: int) -> None:
    whole, random, path = saved(tmp_path, window=7).read_bytes(), Random(count), tmp_path / "mutated"
    engine = make(window=7)
    slabs = engine.ledger.arena.used_slabs
    accepted = 0
    for _ in range(count):
        data = mutated(whole, random)
        path.write_bytes(data)
        found = load(engine, path)
        if "error" in found:
            assert "\n" not in found["error"]
            assert len(found["error"]) < 400
            assert engine.ledger.arena.used_slabs == slabs, "a refused file leaves memory taken"
            assert len(engine.ledger.cache.trie) == 0
        else:
            # Bytes that mean nothing: behind what the first block says.
            assert data[BLOCK:] == whole[BLOCK:]
            accepted += 1
            engine.flush()
    assert accepted < count / 4
    audit(engine.ledger)


def test_mutated_files_are_refused_in_one_line(tmp_path: Path) -> None:
    check_mutations(tmp_path, 300)


@pytest.mark.slow
def test_ten_thousand_mutated_files_are_refused_in_one_line(tmp_path: Path) -> None:
    check_mutations(tmp_path, 10_000)


def forged(whole: bytes, kind: str, number: int) -> bytearray:
    """The file with one byte of a unit's payload changed, and right checksums."""
    data, place, seen = bytearray(whole), BLOCK, 0
    while (header := decode(bytes(data[place : place + ENTRY]))) is not None:
        if header.kind == kind:
            if seen == number:
                data[place + ENTRY] ^= 1
                return resealed(data)
            seen += 1
        place += ENTRY + header.size
    raise AssertionError("no such unit")


def check_forgeries(tmp_path: Path, model: str = "windows and states") -> None:
    spec = MODELS[model]
    whole, path = saved(tmp_path, exact=True, **spec).read_bytes(), tmp_path / "forged"
    for kind, number in (("page", 0), ("page", 31), ("state", 0), ("window", 1)):
        path.write_bytes(forged(whole, kind, number))
        engine = make(exact=True, **spec)
        refused(engine, path, "other states than its tokens compute", share=1.0)
        [(tokens, report)] = run(engine, ask(PROMPT, 5))
        assert report.cached_tokens == 0
        assert tokens == oracle(engine.ledger.spec, PROMPT, 5, exact=True)


def test_a_forged_unit_is_found_by_computing_it_again(tmp_path: Path) -> None:
    check_forgeries(tmp_path)


# random traffic -------------------------------------------------------------------------------------------------------


class CarryingEngine(Engine):
    """Saves prompts of its traffic and loads what was saved, between any two steps, and drops them."""

    folder: Path
    share = 0.0

    def __init__(self, spec: MemorySpec, device: object, config: EngineConfig) -> None:
        super().__init__(spec, device, config, saves=saved_model(replace(IDENTITY, exact=config.exact)))
        self.random = Random("carry")
        self.prompts: list[tuple[np.ndarray, bytes]] = []
        self.saves: dict[int, Path] = {}
        self.whole: list[tuple[Path, bytes]] = []
        self.number = 0
        self.answered: dict[int, dict] = {}

    def add(self, request, constraint=None, save_to=None):
        if save_to is None and request.answered is None and len(request.salt) < 32:
            self.prompts.append((request.prompt, request.salt))
        return super().add(request, constraint, save_to)

    def step(self) -> list[Output]:
        if self.prompts and self.number < 12 and self.random.random() < 0.3:
            self._carry()
        if self.random.random() < 0.03:
            self.begin_drop(1000 + self.number, tenant_digest(self.random.choice([b"", b"tenant"])))
        outputs = super().step()
        self.take_dropped()
        self.answered |= self.take_loaded()
        own = [each for each in outputs if each.sequence not in self.saves]
        for each in outputs:
            if each.sequence in self.saves and each.finish is FinishReason.LENGTH:
                self.whole.append((self.saves[each.sequence], self.salts[each.sequence]))
        return own

    def _carry(self) -> None:
        self.number += 1
        if self.whole and self.random.random() < 0.6:
            path, salt = self.random.choice(self.whole)
            self.begin_load(self.number, path, salt, self.share if self.config.exact else 0.0)
            return
        prompt, salt = self.random.choice(self.prompts)
        request = ask(prompt.tolist(), 0, salt=salt)
        path = self.folder / f"{secrets.token_hex(8)}"
        try:
            number = self.add(request, save_to=path)
        except RequestError:
            return
        self.saves[number] = path
        self.salts = {**getattr(self, "salts", {}), number: salt}


def check_traffic(folder: Path, seed: int, count: int, exact: bool = False, share: float = 0.0) -> int:
    CarryingEngine.folder, CarryingEngine.share = folder, share
    workload: Workload = random_workload(seed, count, exact=exact, form="test" if exact else "")
    config, kind = workload.config, SavingRoundingDevice if exact else SavingDevice
    device = kind(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
    done = Run(CarryingEngine(workload.spec, device, config), device)
    drive(workload, done)
    assert not list(done.engine.ledger.carried.held())
    audit(done.engine.ledger)
    check_answers(workload, done)
    return sum("error" not in each for each in done.engine.answered.values())


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10))
def test_answers_are_the_oracles_whatever_is_saved_loaded_and_dropped(tmp_path_factory, part, seed, count) -> None:
    check_traffic(tmp_path_factory.mktemp("carried"), seed_of(part, seed), count)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_exact_answers_are_the_oracles_whatever_is_verified(tmp_path_factory, part, seed, share) -> None:
    check_traffic(tmp_path_factory.mktemp("carried"), seed_of(part, seed), 8, exact=True, share=share)


# planted bugs ---------------------------------------------------------------------------------------------------------


def a_file_of_another_tenant_hits(patch: pytest.MonkeyPatch) -> None:
    """It is read as its own tenant's, and published as the importer's."""
    original = SavedPrompts.open_file

    def open_file(self, number, path, salt, tenant, share):
        job = original(self, number, path, b"one", tenant_digest(b"one"), share)
        job.keys = PrefixIdentity(4, salt).keys(job.reader.tokens)
        return job

    patch.setattr(SavedPrompts, "open_file", open_file)


def verifying_compares_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(carriages, "same_bytes", lambda computed, given: True)


def verifying_chooses_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prompts, "chosen_stretches", lambda cells, cell, points, share: [])


def memory_stays_taken_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Carried, "release", lambda self, path: None)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (a_file_of_another_tenant_hits, check_other_tenants),
        (verifying_compares_nothing, check_forgeries),
        (verifying_chooses_nothing, check_forgeries),
        (memory_stays_taken_after_a_refusal, lambda path: check_mutations(path, 20)),
    ],
    ids=lambda each: each.__name__,
)
def test_planted_bugs_of_files_are_caught(plant: Callable, check: Callable, monkeypatch, tmp_path: Path) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check(tmp_path)
