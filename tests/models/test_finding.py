"""What stands for a model, and what is refused before torch is imported: paths, adapters, formats of other programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from weft.base.errors import ModelError
from weft.models.finding import find_checkpoint, local_checkpoint
from weft.models.notices import report_parts

# The loading of torch takes seconds.
SHOWN = """
import sys
from weft.cli.main import main
for command in ("serve", "chat", "generate", "doctor"):
    code = main([command, *(["hello", "--model"] if command == "generate" else []), sys.argv[1]])
    print(command, code, [name for name in ("torch", "transformers") if name in sys.modules], flush=True)
"""


def write(folder: Path, **files: dict) -> str:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.thorough
def test_an_adapter_is_recognised_before_anything_large_is_loaded(tmp_path):
    adapter = {"base_model_name_or_path": "LiquidAI/LFM2-1.2B", "peft_type": "LORA"}
    folder = write(tmp_path / "lora", adapter_config=adapter)
    done = subprocess.run([sys.executable, "-c", SHOWN, folder], capture_output=True, text=True)
    told = f"{folder} is a LoRA adapter of LiquidAI/LFM2-1.2B, not a model; merge it into its model"
    assert (done.stdout + done.stderr).count(told) == 4
    ends = [line for line in done.stdout.splitlines() if line.endswith("]")]
    assert ends[:3] == ["serve 2 []", "chat 2 []", "generate 2 []"]
    # The doctor reports the machine first.
    assert ends[3].startswith("doctor 1 ")


def test_a_folder_of_mlx_is_recognised_and_one_in_16_bits_is_not_refused(tmp_path):
    config = json.loads((tiny_model.FOLDER / "config.json").read_text())
    sizes = {"bits": 4, "group_size": 64}
    folder = write(tmp_path / "mlx", config=config | {"quantization": sizes, "quantization_config": sizes})
    with pytest.raises(ModelError, match="is quantised by MLX"):
        find_checkpoint(folder, with_weights=True)
    assert local_checkpoint(tiny_model.FOLDER, True) == tiny_model.FOLDER


def test_a_folder_of_another_tool_is_recognised(tmp_path):
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(ModelError, match="quantised by bitsandbytes, which is not supported"):
        local_checkpoint(write(tmp_path / "four_bits", config=config), True)


@pytest.mark.parametrize("name", ["./nosuchdir", "../no/such", "~/nosuchdir", "/no/such"])
def test_what_begins_like_a_path_is_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for with_weights in (True, False):
        with pytest.raises(ModelError, match=f"there is no folder {name}"):
            local_checkpoint(name, with_weights)


def test_a_hub_id_is_left_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_checkpoint("nosuch/dir", True) is None
    (tmp_path / "nosuch" / "dir").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"nosuch/dir has no config\.json"):
        local_checkpoint("nosuch/dir", True)
    (tmp_path / "nosuch" / "dir" / "config.json").touch()
    assert local_checkpoint("nosuch/dir", True) == Path("nosuch/dir")


def test_a_file_that_cannot_be_read_is_no_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is a LoRA adapter, not a model"):
        local_checkpoint(tmp_path, True)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert local_checkpoint(tmp_path, True) == tmp_path


def test_a_checkpoint_with_other_inputs_is_said_to_serve_text_only(caplog):
    report_parts({"text_config": {}, "vision_config": {"hidden_size": 8}, "audio_config": {"hidden_size": 8}})
    assert caplog.messages == ["this checkpoint also reads images and sound; only its text part is served"]
    caplog.clear()
    report_parts({"text_config": {}})
    assert caplog.messages == []
