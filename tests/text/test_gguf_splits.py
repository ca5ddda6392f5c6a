"""Every named split of a GGUF file gives the tokens of the published tokenizer, on random texts of many scripts.

The published tokenizers are spelled out here, as tokenizer.json and the public classes have them, and share nothing
with Weft's tables but the names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from tests.support.models.gguf_files import write
from weft.text.gguf_tokenizer import DIGITS, PATTERNS
from weft.text.tokenizer import load_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]
CONTROL, NORMAL, BYTE, UNKNOWN = 3, 1, 6, 2
TEXTS, MANY = 700, 20_000
# Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Bengali, Tamil, Thai, Tibetan, Georgian, Hangul,
# Ethiopic, Cherokee, Khmer, kana, Han, Yi, and characters outside of the basic plane.
SCRIPTS = (
    (0x21, 0x7F), (0x61, 0x7B), (0x41, 0x5B), (0xA1, 0x180), (0x180, 0x250), (0x250, 0x2B0), (0x300, 0x370),
    (0x370, 0x400), (0x400, 0x530), (0x531, 0x590), (0x591, 0x5F5), (0x600, 0x700), (0x900, 0x980), (0x980, 0xA00),
    (0xB80, 0xC00), (0xE00, 0xE80), (0xF00, 0xFC0), (0x10A0, 0x1100), (0x1100, 0x1200), (0x1200, 0x1380),
    (0x13A0, 0x1400), (0x1780, 0x1800), (0x1C80, 0x1CC0), (0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x20D0),
    (0x2100, 0x2400), (0x2600, 0x27C0), (0x2C00, 0x2E00), (0x3000, 0x3040), (0x3040, 0x3100), (0x3400, 0x3440),
    (0x4E00, 0x4F00), (0xA000, 0xA040), (0xA720, 0xA800), (0xAC00, 0xAD00), (0xFB00, 0xFE00), (0xFF00, 0xFFF0),
    (0x10400, 0x10450), (0x12000, 0x12040), (0x1D400, 0x1D500), (0x1F300, 0x1F650), (0x20000, 0x20040),
)  # fmt: skip
WORDS = [
    "the", "Paris", "don't", "WE'LL", "you'Re", "it\u2019s", "nai\u0308ve", "na\u00efve", "e\u0301te\u0301",
    "HTTPServer", "camelCase", "\u043f\u0440\u0438\u0432\u0435\u0442", "\u4e16\u754c", "\u65e5\u672c\u8a9e\u306e",
    "12345", "1234567890", "3.14", "\u0663\u0664\u0665", "\u00bd\u2167", "x=f(y);", "//path/to", "\n\n", "\r\n",
    "\t\t", "   ", "\u00a0", "\u3000", "\u2028", "\u0085", "a/b\n/", "...\n", "\U0001f469\u200d\U0001f4bb",
    "\U0001f1e9\U0001f1ea", "<|end|>", "<s>", "\u017f'\u017f", "'s", "'T", " 'd", "\u01c5abc", "\u02b0", "_x_1",
]  # fmt: skip


@lru_cache(maxsize=4)
def corpus(seed: int, count: int) -> tuple[str, ...]:
    """Return texts: words in a row, characters of one script with digits and spaces, and of any scripts."""
    rng = random.Random(seed)
    everything = [chr(code) for low, high in SCRIPTS for code in range(low, high)]
    found = []
    for number in range(count):
        low, high = SCRIPTS[number % len(SCRIPTS)]
        own = [*map(chr, range(low, high)), " ", " ", "\n", "7", "'", "."]
        kinds = (
            lambda: "".join(each + rng.choice(("", " ", "  ")) for each in rng.choices(WORDS, k=rng.randint(1, 12))),
            lambda own=own: "".join(rng.choices(own, k=rng.randint(1, 50))),
            lambda: "".join(rng.choices([*everything, *" \n\r\t"], k=rng.randint(1, 30))),
        )
        found.append(kinds[number // len(SCRIPTS) % 3]())
    return tuple(found)


def split(pattern: str) -> dict[str, Any]:
    """Return the steps of a tokenizer.json that splits by a pattern."""
    isolated = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [isolated, bytes_only(False)]}


def bytes_only(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_only(True)]}
# By name: steps before merging, whether text is composed first, and whether whole words need no merges.
PUBLISHED: dict[str, tuple[dict[str, Any], bool, bool]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        (split(LLAMA_3), False, True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (split(LLAMA_3), False, False)),
    "qwen2": (split(QWEN_2), True, False),
    "deepseek-r1-qwen": (split(QWEN_2), False, False),
    "qwen35": (split(QWEN_3_5), True, False),
    "tekken": (split(TEKKEN), False, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (split(GPT_4O), False, False)),
    "kimi-k2": (split(KIMI), False, False),
    "gpt-2": (bytes_only(True), False, False),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (SINGLE_DIGITS, False, False)),
}


@lru_cache(maxsize=1)
def learned() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and merges. Some words are in the vocabulary, and no merges lead there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(1, 1500), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokenizer.get_vocab(), [pair for number, pair in enumerate(merges) if number % 11]


def published(name: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json."""
    steps, is_composed, keeps_words = PUBLISHED[name]
    vocab, merges = learned()
    stated = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if is_composed else None,
        "pre_tokenizer": steps,
        "post_processor": None,
        "decoder": bytes_only(True),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": keeps_words},
    }
    found = Tokenizer.from_str(json.dumps(stated))
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return found


def file_of(folder: Path, tokens: Sequence[str], kinds: Sequence[int], **more: Any) -> Path:
    found = {"tokens": list(tokens), "token_type": list(kinds), "bos_token_id": 1, "eos_token_id": 2, **more}
    arch = found.pop("arch", "llama")
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    return write(folder / "t.gguf", {"general.architecture": arch, **metadata}, {})


def bytes_file(name: str, folder: Path) -> Path:
    vocab, merges = learned()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [CONTROL if text in SPECIALS else NORMAL for text in tokens]
    return file_of(folder, tokens, kinds, model="gpt2", pre=name, merges=[" ".join(pair) for pair in merges])


def check(path: Path, expected: Callable[[str], list[int]], texts: Sequence[str]) -> None:
    found = load_tokenizer(path)
    assert found is not None
    for text in texts:
        assert found.encode(text, special=False) == expected(text), repr(text)


def ids_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_all_names_are_among_the_published():
    assert PUBLISHED.keys() == {*PATTERNS, *DIGITS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_the_published_tokenizer(name, tmp_path):
    check(bytes_file(name, tmp_path), ids_of(published(name)), corpus(2, TEXTS))


def test_the_texts_tell_all_published_tokenizers_apart():
    kinds = {json.dumps(kind): name for name, kind in PUBLISHED.items()}
    assert len(kinds) == 10
    tokenizers = map(published, kinds.values())
    found = {json.dumps([each.ids for each in one.encode_batch(list(corpus(2, TEXTS)))]) for one in tokenizers}
    assert len(found) == len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_the_published_tokenizer_on_many_texts(name, tmp_path):
    check(bytes_file(name, tmp_path), ids_of(published(name)), corpus(3, MANY))


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer"), ("gpt-2", "GPT2Tokenizer")]
)
def test_tokens_are_those_of_public_classes(name, kind, tmp_path):
    transformers = pytest.importorskip("transformers", "5.23")
    vocab, merges = learned()
    theirs = getattr(transformers, kind)(vocab=vocab, merges=merges, unk_token="<unk>", eos_token="</s>")
    theirs.add_special_tokens({"additional_special_tokens": SPECIALS})
    check(bytes_file(name, tmp_path), lambda text: theirs.encode(text, add_special_tokens=False), corpus(4, TEXTS))


@lru_cache(maxsize=1)
def pieces() -> tuple[list[str], list[int], list[float]]:
    """Return pieces, their kinds, and scores in the order in which they were learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=2500, show_progress=False)
    tokenizer.train_from_iterator([text for text in corpus(1, 1500) if "<" not in text], trainer)
    learnt = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    # Single characters come last in published files, and some are missing: those become bytes.
    single = [text for text in learnt if len(text) == 1]
    tokens = [
        *SPECIALS,
        *(f"<0x{n:02X}>" for n in range(256)),
        *(text for text in learnt if len(text) > 1),
        *single[::2],
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260)]
    return tokens, kinds, [0.0] * 260 + [-float(n) for n in range(len(tokens) - 260)]


def merged(text: str, tokens: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """Return SentencePiece's tokens of a text: of adjacent pieces, those merge whose result has the best score."""
    parts = list(text)
    while True:
        found = [
            (-scores[tokens[pair]], place) for place, pair in enumerate(map("".join, pairwise(parts))) if pair in tokens
        ]
        if not found:
            break
        place = min(found)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    known = [[tokens[part]] if part in tokens else [tokens[f"<0x{n:02X}>"] for n in part.encode()] for part in parts]
    return [number for each in known for number in each]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_merge_by_score(arch, prefixed, tmp_path):
    tokens, kinds, scores = pieces()
    path = file_of(
        tmp_path, tokens, kinds, model="llama", scores=scores, add_space_prefix=prefixed, arch=arch, add_bos_token=True
    )
    numbers = {text: number for number, text in enumerate(tokens)}

    def expected(text: str) -> list[int]:
        marked = text.replace(" ", "\u2581")
        return merged(f"\u2581{marked}" if prefixed else marked, numbers, scores)

    check(path, expected, [text for text in corpus(5, TEXTS) if "<" not in text])
