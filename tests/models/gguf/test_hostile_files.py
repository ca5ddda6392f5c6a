"""Damaged and hostile GGUF files: each is loaded or refused in one line, quickly, and nothing outside it is read."""

from __future__ import annotations

import math
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.models.engines import TINY
from tests.support.models.gguf_files import convert, names_of, read, write
from tests.support.models.oracle import Oracle
from weft.base.errors import ModelError, WeftError
from weft.base.gguf.header import read_header
from weft.base.gguf.report import about
from weft.models.weights import load_model
from weft.text.suggestions import suggested_params
from weft.text.template import load_template
from weft.text.tokenizer import load_tokenizer

TYPES = ("Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "F16", "BF16")
FAMILIES = ("llama", "lfm2_moe", "qwen3_5", "granite_moe_hybrid", "nemotron_h", "gpt_oss", "gemma3")
LARGE = [struct.pack("<Q", value) for value in (1 << 63, 1 << 40, (1 << 64) - 1, 1 << 31, 1 << 20, 1, 0)]
SMALL = [struct.pack("<I", value) for value in (0, 1, 2, 3, 7, 8, 9, 1 << 31, (1 << 32) - 1, 1 << 20, 1 << 16)]
TEXTS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "ab"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 95],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "general.sampling.temp": 0.5,
}
# Of one file, on any machine: what is computed of a file of 200 kB.
SECONDS, MEGABYTES = 1.0, 300


def mutated(content: bytes, header: int, rng: random.Random) -> bytearray:
    """Change some bytes, mostly of the header, or cut the end off."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        end = header if rng.random() < 0.9 else len(found)
        place, kind = rng.randrange(4, end - 8), rng.random()
        if kind < 0.5:
            found[place] = rng.randrange(256)
        elif kind < 0.65:
            found[place : place + 8] = rng.choice(LARGE)
        elif kind < 0.95:
            found[place : place + 4] = rng.choice(SMALL)
        else:
            del found[rng.randrange(header, len(found)) :]
            return found
    return found


def complaint_of(part: Callable[[], object]) -> str | None:
    try:
        part()
    except WeftError as error:
        return str(error)
    return None


def read_all(file: Path) -> Counter[str]:
    """Do all that a server does with a file; count what worked. Errors of ours have one line."""

    def text() -> None:
        found = load_tokenizer(file)
        if found is None:
            # The file has another key in place of the one that says so.
            raise ModelError("no tokenizer")
        found.decode(found.encode("abc <s> x"))
        load_template(file, found.specials)
        suggested_params(file)

    parts = {
        "report": lambda: about(read_header(file), 1 << 33),
        "text": text,
        "model": lambda: load_model(file, torch.float32, progress=False),
    }
    worked: Counter[str] = Counter()
    for name, part in parts.items():
        complaint = complaint_of(part)
        assert complaint is None or ("\n" not in complaint and len(complaint) < 2000)
        worked[name if complaint is None else f"no {name}"] += 1
    return worked


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def check(family: str, count: int, seed: int, folder: Path) -> Counter[str]:
    checkpoint = Oracle(TINY[family]).save(folder / family)
    file = convert(checkpoint, folder / "whole.gguf", names_of(TYPES), TOKENIZER)
    assert read_all(file) == Counter(report=1, text=1, model=1)
    content, header, rng = file.read_bytes(), read_header(file).bytes, random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total: Counter[str] = Counter()
    damaged = folder / "damaged.gguf"
    for _ in range(count):
        damaged.write_bytes(mutated(content, header, rng))
        start = processor_seconds()
        total += read_all(damaged)
        # Of the processor, so that other programs do not count.
        assert processor_seconds() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_file_is_read_or_refused_in_one_line(family, tmp_path):
    total = check(family, 25, 1, tmp_path)
    assert total["no report"] > 3
    assert total["no model"] >= total["no report"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_damaged_files_are_read_or_refused_in_one_line(family, tmp_path):
    check(family, 10_000 // len(FAMILIES) + 1, 2, tmp_path)


@pytest.mark.parametrize("shape", [(4, 31, 64), (4 * 32 * 64,)], ids=["an odd number of channels", "one dimension"])
def test_experts_of_another_shape_are_one_line(shape, tmp_path):
    file = convert(Oracle(TINY["gpt_oss"]).save(tmp_path / "model"), tmp_path / "whole.gguf")
    metadata, tensors = read(file)
    kind, _, content = tensors["blk.0.ffn_gate_exps.weight"]
    tensors["blk.0.ffn_gate_exps.weight"] = (kind, shape, content[: 4 * math.prod(shape)])
    with pytest.raises(ModelError, match="shapes that do not fit gpt-oss") as error:
        load_model(write(tmp_path / "odd.gguf", metadata, tensors), torch.float32, progress=False)
    assert "\n" not in str(error.value)


def test_a_name_with_a_line_break_is_one_line(tmp_path):
    file = convert(Oracle(TINY["llama"]).save(tmp_path / "model"), tmp_path / "whole.gguf")
    metadata, tensors = read(file)
    tensors["blk.1\nattn_norm.weight"] = tensors.pop("blk.1.attn_norm.weight")
    with pytest.raises(ModelError, match="unexpected: ") as error:
        load_model(write(tmp_path / "odd.gguf", metadata, tensors), torch.float32, progress=False)
    assert "\n" not in str(error.value)
