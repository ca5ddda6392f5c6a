"""The tokenizer of a checkpoint as metadata of a GGUF file, and back: the inverse of `gguf_tokenizer.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from weft.base.errors import ModelError
from weft.text.gguf_tokenizer import CONTROL, PATTERNS, SPECIALS, UNUSED, USER_DEFINED, tokenizer_of

BYTE, NORMAL, UNKNOWN = 6, 1, 2
# Names of splits by their pattern; where several share one, those without further rules.
PREFERRED = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "kimi-k2")
NO_TOKENIZER = {"tokenizer.ggml.model": "none"}


def tokenizer_metadata(folder: Path, arch: str, vocabulary: int, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer. Programs other than Weft need one to answer text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return NO_TOKENIZER
    stated = json.loads(path.read_text())
    model, backend = stated["model"], tokenizers.Tokenizer.from_str(path.read_text())
    if model.get("type") != "BPE":
        raise ModelError(f"{path}: a {model.get('type')!r:.80} tokenizer cannot be written, only BPE")
    is_pieces = bool(model.get("byte_fallback"))
    tokens, kinds = listed(backend, vocabulary, is_pieces, model.get("unk_token"))
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    found: dict[str, Any] = {"model": "llama" if is_pieces else "gpt2", "tokens": tokens, "token_type": kinds}
    if is_pieces:
        found["scores"] = scores_of(tokens, merges)
        found["add_space_prefix"] = "Prepend" in json.dumps(stated.get("normalizer") or {})
        found["pre"] = "default"
    else:
        found["pre"] = split_name(path, stated, arch)
        found["merges"] = merges
    specials = named(folder, backend)
    for name, own in SPECIALS.items():
        if own in specials:
            found[f"{name}_token_id"] = specials[own]
    if ends:
        found["eos_token_id"] = ends[0]
    if len(ends) > 1:
        found["eot_token_id"] = ends[1]
    first = backend.encode("a").ids[:1]
    found["add_bos_token"] = bool(first) and first == [specials.get("bos_token")]
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    template = template_of(folder)
    return metadata if template is None else {**metadata, "tokenizer.chat_template": template}


def listed(
    backend: tokenizers.Tokenizer, vocabulary: int, is_pieces: bool, unknown: str | None
) -> tuple[list[str], list[int]]:
    """Return all tokens in the order of their ids, as many as the embedding has, and what each of them is."""
    by_id = {number: text for text, number in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    tokens, kinds = [], []
    for number in range(max(vocabulary, max(by_id, default=0) + 1)):
        text = by_id.get(number)
        tokens.append(f"[PAD{number}]" if text is None else text)
        if text is None:
            kinds.append(UNUSED)
        elif number in added:
            kinds.append(CONTROL if added[number].special else USER_DEFINED)
        elif is_pieces and len(text) == 6 and text.startswith("<0x"):
            kinds.append(BYTE)
        else:
            kinds.append(UNKNOWN if is_pieces and text == unknown else NORMAL)
    return tokens, kinds


def scores_of(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores by which pieces merge in the order of the merges."""
    ranks = {"".join(each.split(" ", 1)): number for number, each in reversed(list(enumerate(merges)))}
    return [-float(ranks.get(text, len(merges))) for text in tokens]


def split_name(path: Path, stated: Mapping[str, Any], arch: str) -> str:
    """Return the name of how text is split first."""
    step = stated.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    patterns = [each["pattern"].get("Regex") for each in steps if each.get("type") == "Split"]
    kinds = [each.get("type") for each in steps]
    if patterns:
        own = [name for name, (pattern, _, _) in PATTERNS.items() if [pattern] == patterns]
        if arch in own or arch.removesuffix("moe") in own:
            return arch if arch in own else arch.removesuffix("moe")
        preferred = [name for name in PREFERRED if name in own]
        if preferred:
            return preferred[0]
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    elif kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    raise ModelError(f"{path}: no GGUF file can name how this tokenizer splits text ({', '.join(map(str, kinds))})")


def named(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of named special tokens."""
    path = folder / "tokenizer_config.json"
    stated = json.loads(path.read_text()) if path.is_file() else {}
    found = {}
    for own in SPECIALS.values():
        token = stated.get(own)
        text = token.get("content") if isinstance(token, dict) else token
        number = backend.token_to_id(text) if isinstance(text, str) else None
        if number is not None:
            found[own] = number
    return found


def template_of(folder: Path) -> str | None:
    """Return the chat template of a folder."""
    file, beside = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    stated = json.loads(beside.read_text()).get("chat_template") if beside.is_file() else None
    return stated if isinstance(stated, str) else None


def save_tokenizer(folder: Path, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write the tokenizer and template of a GGUF file as a checkpoint has them."""
    found = tokenizer_of(path, metadata)
    if found is None:
        return
    backend, specials = found
    backend.save(str(folder / "tokenizer.json"))
    stated: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        stated["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(stated, indent=2))
