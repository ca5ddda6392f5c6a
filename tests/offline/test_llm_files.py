"""`LLM.save`, `LLM.load`, and the same verbs of `AsyncLLM`: a prompt travels in a signed file. Tiny hybrid models."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.models.llm import SETTINGS, greedy, make
from weft import LLM, AsyncLLM, OptionError, RequestError
from weft.base import prefix_keys
from weft.base.prefix_keys import make_key, read_prefix_keys, read_signing_key
from weft.cli.main import main
from weft.offline.keywords import options_of
from weft.offline.saved import PromptKeys

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("own", "other"):
        assert main(["cache", "--make-key", str(folder / name)]) == 0
    return {name: str(folder / name) for name in ("own", "other")}


@pytest.fixture(scope="module", params=[False, True], ids=["usual", "exact"])
def pair(request: pytest.FixtureRequest, keys: dict[str, str]):
    """One that saves, and one that loads."""
    more = {"verify_import": "all"} if request.param else {}
    with make(exact=request.param, prefix_key=keys["own"]) as first:  # noqa: SIM117
        with make(exact=request.param, trusted_prefix_keys=keys["own"], **more) as second:
            yield first, second


def test_what_one_saves_the_other_need_not_compute(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    first, second = pair
    first.save(tmp_path / "prompt", LONG)
    loaded = second.load(tmp_path / "prompt")
    length = len(loaded.prompt_token_ids)
    assert loaded.cached_tokens == length - length % 64
    assert loaded.verified_tokens == (loaded.cached_tokens if second.config.exact else 0)
    [there] = second.generate(LONG, greedy(max_tokens=20), use_tqdm=False)
    [here] = first.generate(LONG, greedy(max_tokens=20), use_tqdm=False)
    assert there.prompt_token_ids == loaded.prompt_token_ids
    assert there.token_ids == here.token_ids
    assert there.cached_tokens == loaded.cached_tokens
    [more] = second.generate({"prompt_token_ids": [*loaded.prompt_token_ids, 5, 6]}, greedy(max_tokens=2), False)
    assert more.cached_tokens == loaded.cached_tokens


def test_an_answer_is_saved_with_its_prompt(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    first, second = pair
    [whole] = first.generate(LONG + "So.", greedy(max_tokens=80), use_tqdm=False, cache_salt="mine")
    saved = first.save(tmp_path / "answer", whole)
    assert saved.prompt_token_ids == whole.prompt_token_ids + whole.token_ids
    loaded = second.load(tmp_path / "answer", cache_salt="mine")
    assert loaded.prompt_token_ids == saved.prompt_token_ids
    [on] = first.fork(whole, sampling_params=greedy(max_tokens=10))
    [there] = second.fork(whole, sampling_params=greedy(max_tokens=10))
    assert there.token_ids == on.token_ids
    assert there.cached_tokens >= loaded.cached_tokens - 64
    assert there.recomputed_tokens == len(there.prompt_token_ids) - there.cached_tokens


def test_no_salt_but_its_own_hits_a_file(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    first, second = pair
    first.save(tmp_path / "salted", LONG + "Salt.", cache_salt="mine")
    for salt in (None, "yours"):
        with pytest.raises(RequestError, match="another tenant or salt"):
            second.load(tmp_path / "salted", cache_salt=salt)
        [result] = second.generate(LONG + "Salt.", greedy(max_tokens=1), use_tqdm=False, cache_salt=salt)
        assert result.cached_tokens < 192 or salt is None, "LONG itself may be there without a salt"


def check_signatures(pair: tuple[LLM, LLM], keys: dict[str, str], path: Path) -> None:
    first, second = pair
    first.save(path, LONG + "Signed.")
    whole = path.read_bytes()
    for changed in (whole[:4500] + bytes([whole[4500] ^ 1]) + whole[4501:], whole + b"x", whole[:-1], b""):
        path.write_bytes(changed)
        with pytest.raises(RequestError, match=r"not signed by a trusted key, or was changed|too short"):
            second.load(path)
    path.write_bytes(whole)
    with path.open("r+b") as file:
        prefix_keys.sign(file, read_signing_key("prefix_key", keys["other"]))
    with pytest.raises(RequestError, match="not signed by a trusted key"):
        second.load(path)
    path.write_bytes(whole)
    assert second.load(path).cached_tokens


def test_only_what_a_trusted_key_has_signed_is_loaded(pair, keys: dict[str, str], tmp_path: Path) -> None:
    check_signatures(pair, keys, tmp_path / "signed")


def an_import_skips_the_signature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptKeys, "check", lambda self, path: None)


def a_signature_covers_the_first_block_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_keys, "PIECE_BYTES", 0)


@pytest.mark.parametrize("plant", [an_import_skips_the_signature, a_signature_covers_the_first_block_only])
def test_planted_bugs_of_signatures_are_caught(plant, pair, keys, monkeypatch, tmp_path: Path) -> None:
    plant(monkeypatch)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        check_signatures(pair, keys, tmp_path / "signed")


def test_without_keys_nothing_is_saved_or_loaded(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    first, second = pair
    with pytest.raises(RequestError, match="needs prefix_key"):
        second.save(tmp_path / "no", LONG)
    first.save(tmp_path / "yes", LONG + "Keys.")
    with pytest.raises(RequestError, match="needs trusted_prefix_keys"):
        first.load(tmp_path / "yes")
    with pytest.raises(RequestError, match="pass a new path"):
        first.save(tmp_path / "yes", LONG)


def test_key_files_are_read_line_by_line_and_not_shown(keys: dict[str, str], tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_text("# two\n" + "".join(Path(keys[name]).read_text() for name in keys))
    both.chmod(0o600)
    own, other = read_prefix_keys("x", str(both))
    assert own != other
    assert own.secret.hex() not in repr(own)
    with pytest.raises(OptionError, match="must have one key, got 2"):
        read_signing_key("x", str(both))
    both.write_text("not a key")
    with pytest.raises(OptionError, match="line 1: a key has 64 hexadecimal letters"):
        read_prefix_keys("x", str(both))
    both.write_text("# none")
    with pytest.raises(OptionError, match="must have 1 to 64 keys, got 0"):
        read_prefix_keys("x", str(both))
    assert os.stat(keys["own"]).st_mode & 0o777 == 0o600
    with pytest.raises(OptionError, match="pass a new path"):
        make_key(Path(keys["own"]))


def test_verifying_needs_exact_answers_and_a_share() -> None:
    with pytest.raises(OptionError, match="verify_import needs --exact"):
        options_of({**SETTINGS, "exact": False, "verify_import": "all"})
    for wrong in ("some", "0", "1.5", -1, True):
        with pytest.raises(OptionError, match="verify_import must be all, off, or a share"):
            options_of({**SETTINGS, "exact": True, "verify_import": wrong})


def test_mutated_files_are_refused_in_one_line(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    first, second = pair
    path, random = tmp_path / "mutated", Random(0)
    first.save(path, LONG + "Mutated.")
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(30):
        changed = whole.copy()
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        path.write_bytes(changed.tobytes())
        with pytest.raises(RequestError) as refused:
            second.load(path)
        assert "\n" not in str(refused.value)


def test_asyncio_programs_have_the_same_verbs(keys: dict[str, str], tmp_path: Path) -> None:
    async def run() -> None:
        options = {**SETTINGS, "prefix_key": keys["own"], "trusted_prefix_keys": keys["own"]}
        async with AsyncLLM(progress=False, **options) as llm:
            assert (await llm.retain(LONG, 100)).token_ids == []
            async for result in llm.generate(LONG, greedy(max_tokens=70), retain=100):
                whole = result
            first, second = await llm.fork(whole, 60, 2, greedy(max_tokens=10))
            assert first.token_ids == second.token_ids == whole.token_ids[60:70]
            assert second.recomputed_tokens <= 64
            await llm.save(tmp_path / "async", whole)
            assert await llm.reset_prefix_cache()
            loaded = await llm.load(tmp_path / "async")
            assert loaded.prompt_token_ids == whole.prompt_token_ids + whole.token_ids
            [again] = await llm.fork(whole, 60, 1, greedy(max_tokens=10))
            assert again.token_ids == first.token_ids
            assert again.cached_tokens
            with pytest.raises(RequestError, match="another tenant"):
                await llm.load(tmp_path / "async", cache_salt="other")
            with pytest.raises(RequestError, match="pass a new path"):
                await llm.save(tmp_path / "async", LONG)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_generate_goes_on_from_a_file(keys: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "story"
    with LLM(progress=False, memory="32MiB", prefix_key=keys["own"]) as llm:
        llm.save(path, LONG * 2)
    given = ["generate", "--from", str(path), "--max-tokens", "5", "--temperature", "0", "--memory", "32MiB"]
    assert main([*given, " And then"]) == 2
    assert "trusted_prefix_keys" in capsys.readouterr().err
    assert main([*given, "--trusted-prefix-keys", keys["own"], " And then"]) == 0
    assert re.search(r"; [1-9]\d* of \d+ prompt tokens cached", capsys.readouterr().err)
