"""An engine in a thread or a process of its own writes prompts to files and reads them, for a front beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.servers.backends import SMALL, ask, both, collect, in_loop, real, started
from weft.backends.codec import EngineWriter, decode_command
from weft.base.errors import RequestError
from weft.base.prefix_keys import make_key
from weft.engine.events import FinishReason
from weft.engine.protocol import Refuse, SavePrompt
from weft.wire.frames import HEADER_BYTES

PROMPT = [n * n % 250 for n in range(150)]


@both
@in_loop
async def test_a_prompt_goes_to_a_file_and_comes_back(kind: str, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    path = str(tmp_path / "prompt")
    async with started(real(kind, replace(SMALL, prefix_key=str(tmp_path / "key")))) as backend:
        files = backend.files
        [output], _ = await collect(await files.submit(ask(PROMPT, 0), path))
        assert output.finish is FinishReason.LENGTH
        [failed], _ = await collect(await files.submit(ask(PROMPT, 0), path))
        assert failed.finish is FinishReason.ERROR
        assert "cannot be created" in failed.error
        assert await backend.flush() == 0
        assert await files.load_prompt(path, b"", 0.0) == {"tokens": 150, "cached_tokens": 128, "verified_tokens": 0}
        _, report = await collect(await backend.submit(ask(PROMPT, 3)))
        assert report.cached_tokens == 128
        for name, salt, text in ((path, b"other", "another tenant"), (path + "x", b"", "cannot be read")):
            with pytest.raises(RequestError, match=text):
                await files.load_prompt(name, salt, 0.0)
        with pytest.raises(RequestError, match="max_tokens must be 0"):
            await files.submit(ask(PROMPT, 1), path + "y")


def test_a_prompt_to_save_that_cannot_be_read_is_refused_by_its_number() -> None:
    command = SavePrompt(3, ask(PROMPT, 0, priority=1 << 40), "/tmp/prompt")
    found = decode_command(EngineWriter().command(command)[HEADER_BYTES:])
    assert isinstance(found, Refuse)
    assert found.number == 3


@both
@in_loop
async def test_without_keys_an_engine_has_no_files(kind: str, tmp_path: Path) -> None:
    async with started(real(kind)) as backend:
        with pytest.raises(RequestError, match="--prefix-key"):
            await backend.files.submit(ask(PROMPT, 0), str(tmp_path / "prompt"))
        with pytest.raises(RequestError, match="--trusted-prefix-keys"):
            await backend.files.load_prompt(str(tmp_path / "prompt"), b"", 0.0)
