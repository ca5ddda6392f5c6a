"""A server with a GGUF file of hundreds of megabytes holds little beside its weights, in all of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.gguf_files import SCALES, write
from tests.support.servers.serving import serving
from weft.base.gguf.header import TYPES

pytestmark = pytest.mark.slow

MEBIBYTE = 1 << 20
MEMORY = 256 * MEBIBYTE
# Of the file; and beside weights and memory.
MOST_OF_FILE, MOST_BESIDE = 1.15, 700 * MEBIBYTE
BY_NAME = {name: (per_block, size) for name, per_block, size in TYPES.values()}
TEXTS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "ab"]


def blocks(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> bytes:
    """Return random blocks with small scales."""
    per_block, size = BY_NAME[kind]
    found = rng.integers(0, 256, (rows * inputs // per_block, size), dtype=np.uint8)
    for place in SCALES[kind]:
        found[:, place : place + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return found.tobytes()


def llama_file(path: Path, kind: str, layers: int, hidden: int = 1024, inner: int = 4096) -> Path:
    """Write a Llama with a tied head of 65,536 tokens, all of whose matrices have one type."""
    rng, vocabulary = np.random.default_rng(0), 1 << 16
    tokens = [*TEXTS, *(f"word{number}" for number in range(vocabulary - len(TEXTS)))]
    metadata = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.context_length": 4096,
        "llama.embedding_length": hidden, "llama.feed_forward_length": inner, "llama.attention.head_count": 16,
        "llama.attention.head_count_kv": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (vocabulary - 3)],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    ones = np.ones(hidden, "<f4").tobytes()

    def tensors() -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
        yield "token_embd.weight", (kind, (vocabulary, hidden), blocks(kind, vocabulary, hidden, rng))
        yield "output_norm.weight", ("F32", (hidden,), ones)
        sizes = {"attn_q": (hidden, hidden), "attn_k": (hidden // 4, hidden), "attn_v": (hidden // 4, hidden),
                 "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
                 "ffn_down": (hidden, inner)}  # fmt: skip
        for layer in range(layers):
            for name in ("attn_norm", "ffn_norm"):
                yield f"blk.{layer}.{name}.weight", ("F32", (hidden,), ones)
            for name, shape in sizes.items():
                yield f"blk.{layer}.{name}.weight", (kind, shape, blocks(kind, *shape, rng))

    return write(path, metadata, dict(tensors()))


def processes(number: int) -> list[int]:
    """Return a process and all below it."""
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return [number, *(each for child in children for each in processes(int(child)))]


def held(number: int) -> int:
    """Return the bytes of memory of a process; of pages that several have, its share."""
    return int(Path(f"/proc/{number}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) << 10


def is_engine(number: int) -> bool:
    return "engine_process" in Path(f"/proc/{number}/cmdline").read_text()


def held_by_server(file: Path) -> tuple[int, int]:
    """Return what all processes hold, and what the one with the weights does.

    What processes of texts hold depends on when they read the tokenizer.
    """
    options = ["--port", "0", "--memory", "256MiB", "--threads", "1", "--max-length", "4096"]
    with serving(str(file), options=options) as served:
        body = {"model": "x", "prompt": "ab " * 300, "max_tokens": 8, "ignore_eos": True}
        _, models = served.call("/v1/models")
        for _ in range(3):
            status, answer = served.call("/v1/completions", body | {"model": models["data"][0]["id"]})
            assert status == 200, answer
        by_process = {number: held(number) for number in processes(served.process.pid)}
        [engine] = filter(is_engine, by_process)
        return sum(by_process.values()), by_process[engine]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_server_holds_the_file_once_and_little_more(kind, tmp_path):
    small, large = (
        llama_file(tmp_path / f"{layers}.gguf", kind, layers) for layers in (2, 20 if kind == "Q8_0" else 40)
    )
    sizes = [file.stat().st_size for file in (small, large)]
    (least, small_engine), (most, large_engine) = (held_by_server(file) for file in (small, large))
    weights, grown = sizes[1] - sizes[0], large_engine - small_engine
    print(f"{kind}: files {sizes}, held {[least, most]}: {grown / weights:.3f} of the file, "
          f"beside {(most - MEMORY - sizes[1]) / MEBIBYTE:.0f} MiB")  # fmt: skip
    assert weights > 200 * MEBIBYTE
    assert grown <= MOST_OF_FILE * weights
    for size, resident in zip(sizes, (least, most), strict=True):
        assert resident <= MOST_OF_FILE * size + MEMORY + MOST_BESIDE
