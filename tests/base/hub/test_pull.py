"""`weft pull` from a stand-in hub over loopback: short names, resuming, checksums, tokens, offline caches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.stand_in import Hub, standing_in
from tests.support.models import tiny_model
from weft.base.hub.checksums import damaged
from weft.base.hub.short_names import SHORT_NAMES, short_name_of
from weft.models.catalogue import hub_ids

NAME = "openai/gpt-oss-20b"
WEIGHTS = bytes(range(256)) * 60_000
FILES = {path.name: path.read_bytes() for path in tiny_model.FOLDER.iterdir() if path.is_file()}
FILES |= {"model.safetensors": WEIGHTS, "original/other.bin": b"not asked for"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with standing_in(
        {NAME: dict(FILES), "some/quants-GGUF": {"a-Q4_K_M.gguf": WEIGHTS, "a-Q8_0.gguf": b"8" * 2000}}
    ) as found:
        yield found


class Puller:
    """Runs commands of `weft` with a cache of their own; nothing is known of any hub but this one."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self._variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment = ours | self._variables | variables
        command = [sys.executable, "-m", "weft", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def pull(self, name: str, **variables: str) -> Path:
        done = self.run("pull", name, **variables)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def refused(self, *arguments: str, **variables: str) -> str:
        done = self.run(*arguments, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        [line] = done.stderr.splitlines()
        return line


@pytest.fixture
def puller(hub: Hub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path / "cache")


@pytest.mark.thorough
def test_a_short_name_is_downloaded_once_and_then_used_offline(hub, puller):
    folder = puller.pull("gpt-oss:20b")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert not (folder / "original").exists()
    asked = len(hub.downloads())
    assert puller.pull(NAME) == folder
    assert len(hub.downloads()) == asked
    assert puller.pull("gpt-oss:20b", HF_HUB_OFFLINE="1") == folder
    assert puller.pull("gpt-oss:20b", HF_ENDPOINT="http://127.0.0.1:1") == folder


def test_a_download_that_breaks_off_is_resumed(hub, puller):
    # The client writes blocks of 10 MB, and tries again by itself or at the next call.
    hub.cut = 12_000_000
    puller.run("pull", NAME)
    folder = puller.pull(NAME)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    spans = [span for name, span in hub.downloads() if name == "model.safetensors"]
    assert spans[0] is None
    assert any(span and int(span.removeprefix("bytes=").partition("-")[0]) > 0 for span in spans[1:]), spans


def test_a_damaged_file_is_found_by_its_checksum_and_downloaded_again(hub, puller):
    folder = puller.pull(NAME)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(b"x" + WEIGHTS[1:])
    small = (folder / "config.json").resolve()
    small.write_bytes(FILES["config.json"] + b" ")
    assert set(damaged(folder)) == {blob, small}
    assert puller.pull(NAME) == folder
    assert list(damaged(folder)) == []
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.thorough
def test_what_the_hub_itself_sends_wrong_is_refused(hub, puller):
    hub.spoilt = True
    assert "files differ from their checksums after a second download" in puller.refused("pull", NAME)


def test_a_token_is_sent_and_asked_for(hub, puller):
    hub.token = "hf_secret"
    line = puller.refused("pull", NAME)
    assert f"{NAME} is neither a local folder nor a model at {hub.url}; a private one needs HF_TOKEN" in line
    assert (puller.pull(NAME, HF_TOKEN="hf_secret") / "config.json").is_file()


@pytest.mark.parametrize("command", ["pull", pytest.param("serve", marks=pytest.mark.thorough)])
def test_a_hub_that_cannot_be_reached_is_said_to_be_so_and_no_other_model_is_suggested(puller, command):
    line = puller.refused(command, "LiquidAI/LFM2-1.2", HF_ENDPOINT="http://127.0.0.1:1")
    assert "neither a local folder nor in the cache, and the hub at http://127.0.0.1:1 cannot be reached" in line
    assert "did you mean" not in line
    line = puller.refused(command, "LiquidAI/LFM2-1.2", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set; unset it, or pass a folder" in line


def test_an_unknown_id_of_a_hub_that_answers_names_what_may_be_meant(puller):
    assert "did you mean LiquidAI/LFM2-1.2B?" in puller.refused("pull", "LiquidAI/LFM2-1.2")


def test_one_file_of_many_is_pulled_by_its_tag_also_offline(hub, puller):
    file = puller.pull("some/quants-GGUF:Q4_K_M")
    assert (file.name, file.read_bytes()) == ("a-Q4_K_M.gguf", WEIGHTS)
    assert [name for name, _ in hub.downloads()] == ["a-Q4_K_M.gguf"]
    assert puller.pull("some/quants-GGUF:Q4_K_M", HF_HUB_OFFLINE="1") == file


def test_every_listed_checkpoint_has_a_short_name():
    assert sorted(SHORT_NAMES.values()) == sorted(hub_ids())
    assert all(short_name_of(hub_id) in SHORT_NAMES for hub_id in hub_ids())
    assert [name for name in SHORT_NAMES if name != name.lower() or "/" in name] == []


def test_files_of_ones_own_are_never_taken_for_downloads(tmp_path):
    (tmp_path / ("0" * 64)).write_bytes(b"mine")
    assert list(damaged(tmp_path)) == []
