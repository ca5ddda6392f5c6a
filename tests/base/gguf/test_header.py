"""Headers of GGUF files: what is read, and that a damaged or hostile file is one line and nothing more."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from tests.support.models.gguf_files import entry, split, text, write
from weft.base.errors import ModelError
from weft.base.gguf.header import TYPES, read_header, read_one
from weft.base.gguf.places import chosen, local_file

MUTATIONS = 1500
METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.negative": -3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "b", "ä"],
    "tokenizer.ggml.scores": [0.5, 1.5, -1.0],
}
TENSORS = {"a.weight": ("F32", (2, 3), bytes(24)), "b.weight": ("Q8_0", (4, 64), bytes(4 * 68))}


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "model.gguf", METADATA, TENSORS)


def test_metadata_and_tensors_are_read(file):
    header = read_one(file)
    assert header.metadata == METADATA
    found = header.tensors["b.weight"]
    assert (found.type, found.shape, found.bytes, found.offset % 32) == ("Q8_0", (4, 64), 4 * 68, 0)
    assert found.offset + found.bytes <= file.stat().st_size


def test_sizes_of_all_types_are_those_of_the_public_package():
    gguf = pytest.importorskip("gguf")
    for number, (name, per_block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (per_block, size))


def test_a_split_model_is_one_and_another_part_of_it_is_refused(tmp_path):
    first = split(tmp_path / "model.gguf", METADATA, TENSORS, 2)
    header = read_header(first)
    assert set(header.tensors) == set(TENSORS)
    assert header.tensors["b.weight"].file.name == "model-00002-of-00002.gguf"
    with pytest.raises(ModelError, match="pass the first one"):
        read_header(tmp_path / "model-00002-of-00002.gguf")
    (tmp_path / "alone").mkdir()
    first = split(tmp_path / "alone/model.gguf", METADATA, TENSORS, 2)
    first.with_name("model-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        read_header(first)


def test_every_truncation_is_one_line(file, tmp_path):
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    end = max(each.offset + each.bytes for each in read_one(file).tensors.values())
    for size in range(end):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError) as error:
            read_one(cut)
        assert "\n" not in str(error.value)


def test_mutated_headers_are_read_or_refused_in_one_line_and_stay_inside_the_file(file, tmp_path):
    whole, mutated, rng = file.read_bytes(), tmp_path / "mutated.gguf", random.Random(7)
    large = [struct.pack("<Q", value) for value in (1 << 63, 1 << 40, (1 << 64) - 1, 1 << 31, 0)]
    refused: list[str] = []
    for _ in range(MUTATIONS):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(4, len(content) - 8)
            if rng.random() < 0.5:
                content[place] = rng.randrange(256)
            else:
                content[place : place + 8] = rng.choice(large)
        mutated.write_bytes(content)
        try:
            header = read_one(mutated)
        except ModelError as error:
            refused.append(str(error))
            continue
        assert all(each.offset > 0 and each.offset + each.bytes <= len(content) for each in header.tensors.values())
    assert len(refused) > MUTATIONS / 4
    assert all("\n" not in message and len(message) < 1000 for message in refused)


def header_of(keys: int, body: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


HOSTILE = {
    "a list of strings without an end": header_of(1, text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)),
    "a list of numbers without an end": header_of(1, text("a") + struct.pack("<IIQ", 9, 0, 1 << 62)),
    "a list of lists": header_of(1, text("a") + struct.pack("<IIQ", 9, 9, 3)),
    "a long string": header_of(1, text("a") + struct.pack("<IQ", 8, 1 << 62)),
    "many keys": header_of(1 << 60, b""),
    "many tensors": header_of(0, b"", 1 << 60),
    "a key twice": header_of(2, 2 * (text("a") + entry(1))),
    "no UTF-8": header_of(1, text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"),
    "a large tensor": header_of(0, text("a") + struct.pack("<I4QIQ", 4, *[1 << 62] * 4, 0, 0), 1),
    "many dimensions": header_of(0, text("a") + struct.pack("<I", 1 << 31), 1),
    "a tensor beyond the end": header_of(0, text("a") + struct.pack("<IQIQ", 1, 64, 0, 1 << 63), 1),
    "an unknown type": header_of(0, text("a") + struct.pack("<IQIQ", 1, 64, 99, 0), 1),
    "half a block": header_of(0, text("a") + struct.pack("<IQIQ", 1, 33, 8, 0), 1) + bytes(99),
    "alignment zero": header_of(1, text("general.alignment") + entry(0)),
    "another version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "another file": b"PK" + bytes(99),
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_one_line_and_takes_no_memory(content, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelError) as error:
        read_one(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert most < 1 << 20


def test_a_list_may_not_take_much_more_memory_than_its_file(tmp_path):
    path = tmp_path / "bytes.gguf"
    body = text("a") + struct.pack("<IIQ", 9, 0, (1 << 24) + 1) + bytes((1 << 24) + 1)
    path.write_bytes(header_of(1, body))
    with pytest.raises(ModelError, match="more than 16777216 entries"):
        read_one(path)


# files of a repository or folder ------------------------------------------------------------------------------------

NAMES = [
    "README.md", "a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf",
    "mmproj-a-Q8_0.gguf",
]  # fmt: skip


def test_a_tag_or_a_name_chooses_a_file_with_all_its_parts():
    assert chosen(NAMES, "", "o/a") == ["a-Q4_K_M.gguf"]
    assert chosen(NAMES, "q4_k_s", "o/a") == ["a-Q4_K_S.gguf"]
    assert chosen(NAMES, "Q8_0", "o/a") == ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]
    assert chosen(NAMES, "a-Q4_K_S.gguf", "o/a") == ["a-Q4_K_S.gguf"]


@pytest.mark.parametrize("wanted", ["Q4_K", "Q2_K", "b.gguf"])
def test_what_chooses_no_file_is_refused_with_the_names(wanted):
    with pytest.raises(ModelError, match=r"o/a has no file for .*a-Q4_K_M\.gguf, a-Q4_K_S\.gguf, a-Q8_0"):
        chosen(NAMES, wanted, "o/a")


def test_a_folder_with_one_model_is_that_model(file, tmp_path):
    assert local_file(tmp_path) == file
    (tmp_path / "mmproj-model.gguf").touch()
    assert local_file(tmp_path) == file
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"has several models.*model\.gguf, other\.gguf"):
        local_file(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert local_file(tmp_path) is None
