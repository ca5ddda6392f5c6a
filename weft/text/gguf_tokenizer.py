"""The tokenizer in the metadata of a GGUF file: vocabulary, merges, and the name of how text is split first.

Two kinds are read: BPE over bytes, and SentencePiece's merges with a fallback to bytes. They are built from the same
parts as the model's own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from weft.base.errors import ModelError
from weft.text.patterns import LINEAR

# Types of tokens, by their number in files.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Further tokens that end an answer.
ENDS = ("eos", "eot", "eom")
# Splits by the name in `tokenizer.ggml.pre`: a pattern, whether words of the vocabulary are not merged, and whether BOS
# is added unless the file says otherwise.
PATTERNS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        (LINEAR["llama 3"], True, True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (LINEAR["llama 3"], False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (LINEAR["qwen2"], False, False)),
    "qwen35": (LINEAR["qwen3.5"], False, False),
    "tekken": (LINEAR["mistral tekken"], True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (LINEAR["gpt-4o"], False, False)),
    "kimi-k2": (LINEAR["kimi"], False, False),
}
# Splits of older models: single digits, or none, before those of GPT-2.
DIGITS = {"gpt-2": False, "smollm": True, "starcoder": True, "refact": True}
COMPOSED = ("qwen2", "qwen35")
SPACE = "\u2581"
# Longer ones are never found by merging, only whole.
LONGEST_MERGED = 256


def tokenizer_of(path: Path, metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]] | None:
    """Return the tokenizer and its named special tokens; None if the file has none."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{path}: tokenizer {kind!r:.80} is not supported, only gpt2 (BPE) and llama (SentencePiece); pass "
            "--tokenizer with the folder or hub id of the original model"
        )
    tokens = listed(path, metadata, "tokens", str)
    kinds = (
        listed(path, metadata, "token_type", int, len(tokens))
        if "tokenizer.ggml.token_type" in metadata
        else [1] * len(tokens)
    )
    found = byte_pairs(path, metadata, tokens, kinds) if kind == "gpt2" else pieces(path, metadata, tokens, kinds)
    for special in (True, False):
        wanted = CONTROL if special else USER_DEFINED
        added = [
            AddedToken(text, special=special, normalized=False)
            for text, each in zip(tokens, kinds)
            if each == wanted and text and found.token_to_id(text) is not None
        ]
        (found.add_special_tokens if special else found.add_tokens)(added)
    specials = {
        own: tokens[number]
        for name, own in SPECIALS.items()
        if (number := token_id(path, metadata, name, tokens)) is not None
    }
    default = PATTERNS.get(str(metadata.get("tokenizer.ggml.pre")), ("", False, kind == "llama"))[2]
    around(found, metadata, specials, default)
    return found, specials


def listed(path: Path, metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    """Return a list of values of one type."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not all(isinstance(each, kind) for each in value):
        raise ModelError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__}, got {value!r:.80}")
    if length is not None and len(value) != length:
        raise ModelError(f"{path}: tokenizer.ggml.{name} must have {length} entries, got {len(value)}")
    return value


def token_id(path: Path, metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.{name}_token_id must be one of {len(tokens)} tokens, got {value!r:.80}"
        )
    return value


def end_ids(path: Path, metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return frozenset()
    found = [token_id(path, metadata, name, tokens) for name in ENDS]
    return frozenset(number for number in found if number is not None)


def vocabulary(path: Path, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Return all tokens but those that only fill the embedding up."""
    found: dict[str, int] = {}
    for number, (text, kind) in enumerate(zip(tokens, kinds)):
        if kind != UNUSED and found.setdefault(text, number) != number:
            raise ModelError(f"{path}: token {text!r:.80} has the ids {found[text]} and {number}")
    return found


def byte_pairs(
    path: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """Return BPE over bytes."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PATTERNS and name not in DIGITS:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre {name!r:.80} is not known, so its tokens would be wrong; known are "
            f"{', '.join([*PATTERNS, *DIGITS])}; pass --tokenizer with the folder or hub id of the original model"
        )
    merges = []
    for text in listed(path, metadata, "merges", str):
        left, separator, right = text.partition(" ")
        if not separator or not left or not right:
            raise ModelError(f"{path}: tokenizer.ggml.merges must be pairs of tokens, got {text!r:.80}")
        merges.append((left, right))
    pattern, whole, _ = PATTERNS.get(str(name), ("", False, False))
    found = tokenizers.Tokenizer(models.BPE(vocab=vocabulary(path, tokens, kinds), merges=merges, ignore_merges=whole))
    if name in COMPOSED:
        found.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    if DIGITS.get(str(name)):
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.decoder = decoders.ByteLevel()
    return found


def pieces(
    path: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """Return SentencePiece's merges: pieces that two others make, the best score first."""
    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    # Runs of spaces are stored as such, but are pieces.
    spelled = [SPACE * len(text) if " " in text and not text.strip(" ") else text for text in tokens]
    scores = (
        [-float(n) for n in range(len(tokens))] if is_gemma else listed(path, metadata, "scores", float, len(tokens))
    )
    vocab = vocabulary(path, spelled, kinds)
    unknown = next((text for text, kind in zip(spelled, kinds) if kind == UNKNOWN), None)
    merges = list(implied_merges(vocab, dict(zip(spelled, scores))))
    found = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    replaced = normalizers.Replace(" ", SPACE)
    found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if prefixed else replaced
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return found


def implied_merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Return all pairs of pieces that make a third one, the best scores first, then by the pair.

    >>> list(implied_merges({"a": 0, "b": 1, "ab": 2, "aab": 3, "aa": 4}, {"ab": 1.0, "aab": 0.5, "aa": 2.0}))
    [('a', 'a'), ('a', 'b'), ('aa', 'b'), ('a', 'ab')]
    """
    found = [
        (-scores.get(text, 0.0), -cut, -(len(text) - cut), vocab[text[:cut]], vocab[text[cut:]], text, cut)
        for text in vocab
        if len(text) <= LONGEST_MERGED
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    return ((text[:cut], text[cut:]) for *_, text, cut in sorted(found))


def around(
    found: tokenizers.Tokenizer, metadata: Mapping[str, Any], specials: Mapping[str, str], bos_is_default: bool
) -> None:
    """Make a prompt start with BOS, and end with EOS, where the file says so."""
    start = metadata.get("tokenizer.ggml.add_bos_token", bos_is_default) is True and "bos_token" in specials
    end = metadata.get("tokenizer.ggml.add_eos_token", False) is True and "eos_token" in specials
    first, last = ([specials[name]] if there else [] for name, there in (("bos_token", start), ("eos_token", end)))
    names = {text: found.token_to_id(text) for text in (*first, *last)}
    known = [(text, number) for text, number in names.items() if number is not None]
    if known and len(known) == len(names):
        found.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B:1", *last], special_tokens=known
        )
