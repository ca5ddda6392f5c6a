"""Tokenizers of GGUF files give the tokens of the model's own tokenizer, on texts of many languages."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tests.support.models.gguf_files import write
from weft.base.errors import ModelError
from weft.text.gguf_tokenizer import DIGITS, PATTERNS
from weft.text.suggestions import suggested_params
from weft.text.template import load_template
from weft.text.tokenizer import Tokenizer as Ours
from weft.text.tokenizer import end_tokens, load_tokenizer

SCRIPTS = (
    (0x20, 0x7F),
    (0xA0, 0x250),
    (0x370, 0x500),
    (0x590, 0x5F0),
    (0x900, 0x970),
    (0x3040, 0x30FF),
    (0x4E00, 0x4E80),
)
WORDS = [
    "the",
    "Paris",
    "don't",
    "WE'LL",
    "naïve",
    "été",
    "привет",
    "世界",
    "日本語",
    "12345",
    "3.14",
    "x=f(y);",
    "\n\n",
    "\t",
    "  ",
    "🙂",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]
CONTROL, NORMAL, USER, UNUSED = 3, 1, 4, 5


@cache
def corpus(seed: int, count: int) -> list[str]:
    """Texts of words and of random characters, composed as most text is."""
    rng = random.Random(seed)
    characters = [chr(code) for low, high in SCRIPTS for code in range(low, high)]
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(count)]
    texts += ["".join(rng.choices([*characters, "\n", " ", "\r\n"], k=rng.randint(1, 60))) for _ in range(count)]
    return [unicodedata.normalize("NFC", text) for text in texts]


def trained(steps: list[Any]) -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a vocabulary that was learned with this split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(1, 300), trainer)
    vocab = tokenizer.get_vocab()
    state = tokenizer.model.__getstate__().decode()
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in json.loads(state)["merges"]]
    return sorted(vocab, key=vocab.__getitem__), merges


def metadata_of(tokens: list[str], **more: Any) -> dict[str, Any]:
    kinds = [CONTROL if text in SPECIALS else NORMAL for text in tokens]
    found = {"tokens": tokens, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, **more}
    return {"general.architecture": "llama"} | {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def ours(path: Path) -> Ours:
    found = load_tokenizer(path)
    assert found is not None
    return found


ORACLE = [name for name in (*PATTERNS, *DIGITS) if name in (
    "llama-bpe", "lfm2", "falcon-h1", "dbrx", "tekken", "qwen2", "qwen35", "gpt-4o", "gpt-2")]  # fmt: skip


@pytest.mark.parametrize("name", ORACLE)
def test_byte_pairs_are_those_of_the_public_reader(name, tmp_path):
    transformers = pytest.importorskip("transformers", "5.23")
    pattern = PATTERNS[name][0] if name in PATTERNS else None
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokens, merges = trained([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    path = write(tmp_path / "t.gguf", metadata_of(tokens, model="gpt2", pre=name, merges=merges), {})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    found = ours(path)
    for text in corpus(2, 400):
        assert found.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        assert found.decode(found.encode(text, special=False)) == text


@pytest.mark.parametrize("name", DIGITS)
def test_digits_stand_alone_where_the_model_has_them_so(name, tmp_path):
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokens, merges = trained(steps)
    path = write(tmp_path / "t.gguf", metadata_of(tokens, model="gpt2", pre=name, merges=merges), {})
    expected = Tokenizer(
        models.BPE(vocab={text: n for n, text in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    )
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [*([pre_tokenizers.Digits(individual_digits=True)] if name != "gpt-2" else []), *steps]
    )
    found = ours(path)
    for text in ["12345", *corpus(3, 200)]:
        assert found.encode(text, special=False) == expected.encode(text).ids


@pytest.mark.parametrize("name", PATTERNS)
def test_every_named_split_keeps_all_text_in_linear_time(name, tmp_path):
    tokens, merges = trained([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    path = write(tmp_path / "t.gguf", metadata_of(tokens, model="gpt2", pre=name, merges=merges), {})
    found = ours(path)
    assert found.is_linear
    for text in corpus(4, 100):
        assert found.decode(found.encode(text, special=False)) == text


def sentence_pieces() -> tuple[list[str], list[float], list[int]]:
    steps = [pre_tokenizers.Metaspace(prepend_scheme="never")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.train_from_iterator(corpus(1, 300), trainers.BpeTrainer(vocab_size=700, show_progress=False))
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens = [*SPECIALS, *(f"<0x{n:02X}>" for n in range(256)), *(text for text in pieces if text not in SPECIALS)]
    kinds = [2, CONTROL, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * (len(tokens) - 260)]
    return tokens, [-float(n) for n in range(len(tokens))], kinds


@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_are_those_of_the_public_reader(prefixed, tmp_path):
    transformers = pytest.importorskip("transformers", "5.23")
    tokens, scores, kinds = sentence_pieces()
    more = {"model": "llama", "scores": scores, "token_type": kinds, "add_space_prefix": prefixed}
    path = write(tmp_path / "t.gguf", metadata_of(tokens, **more), {})
    found = ours(path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in corpus(2, 300):
        if prefixed and not text.startswith(" "):
            assert found.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        decoded = found.decode(found.encode(text, special=False))
        # Decoding one piece after another keeps the space that encoding put before the first.
        assert decoded.removeprefix(" " if prefixed else "") == text


def test_special_tokens_ends_template_and_sampling_are_the_files(tmp_path):
    tokens, merges = trained([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    kinds = [CONTROL if text in SPECIALS else NORMAL for text in tokens]
    kinds[-1] = USER
    more = {
        "model": "gpt2",
        "pre": "gpt-2",
        "merges": merges,
        "add_bos_token": True,
        "eot_token_id": 3,
        "token_type": kinds,
    }
    metadata = metadata_of(tokens, **more) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 7,
    }
    path = write(tmp_path / "t.gguf", metadata, {})
    found = ours(path)
    assert found.specials["bos_token"] == "<s>"
    assert found.encode("a<|end|>") == [1, *found.encode("a", special=False), 3]
    assert end_tokens(path) == found.end_tokens == {2, 3}
    template = load_template(path, found.specials)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert (suggested_params(path).temperature, suggested_params(path).top_k) == (0.5, 7)


WRONG = {
    "an unknown split": ({"pre": "llama-9"}, "llama-9' is not known"),
    "no split": ({"pre": None}, "None is not known"),
    "another kind": ({"model": "bert"}, "'bert' is not supported"),
    "a merge of one token": ({"merges": ["ab"]}, "must be pairs of tokens"),
    "a merge of unknown tokens": ({"merges": ["zzz yyy"]}, "cannot use"),
    "a token twice": ({"tokens": ["a", "a"]}, "has the ids 0 and 1"),
    "an id beyond the end": ({"bos_token_id": 1 << 20}, "must be one of"),
    "types of other tokens": ({"token_type": [1]}, "must have"),
    "numbers as tokens": ({"tokens": [1, 2]}, "must be a list of str"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_is_not_understood_is_refused_in_one_line(change, message, tmp_path):
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    metadata = metadata_of(tokens, model="gpt2", pre="gpt-2", merges=["a b"])
    for name, value in change.items():
        metadata[f"tokenizer.ggml.{name}"] = value
        if name == "tokens":
            metadata["tokenizer.ggml.token_type"] = [1] * len(value)
    path = write(tmp_path / "t.gguf", {name: value for name, value in metadata.items() if value is not None}, {})
    with pytest.raises(ModelError, match=message) as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)
