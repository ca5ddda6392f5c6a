"""How a checkpoint makes embeddings: the files of `sentence_transformers`, the configuration of a class head, or a GGUF
file's own field. Nothing of it runs code, and every file is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weft.base.errors import ModelError
from weft.base.gguf.header import is_gguf, read_header
from weft.base.vectors import Pooling, ScoreFunction, VectorFacts
from weft.models.config import read_config, shown
from weft.models.heads import labels_of
from weft.models.model import CausalModel

MOST_MODULES = 16
MOST_PROMPTS = 64
MOST_PROMPT_CHARACTERS = 1 << 14
FILE_BYTES = 4 << 20
POOLINGS = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
# The fields of older files, one flag for each.
FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
# As llama.cpp numbers them.
GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
# What is done with the output of a class head, by the problem that it was trained for.
PROBLEMS = {
    "regression": ScoreFunction.NONE,
    "multi_label_classification": ScoreFunction.SIGMOID,
    "single_label_classification": ScoreFunction.SOFTMAX,
}


def vector_facts(place: Path, config: Mapping[str, Any], model: CausalModel) -> VectorFacts:
    """Return what the vectors of a model are. `place` is its folder, configuration or GGUF file."""
    size, generates = int(config["hidden_size"]), model.generates
    if model.class_head is not None:
        labels = labels_of(config)
        return VectorFacts(len(labels), generates, labels, activation_of(config, len(labels)), normalises=False)
    if is_gguf(place):
        return of_gguf(place, size)
    folder = place if place.is_dir() else place.parent
    if not (folder / "modules.json").is_file():
        return VectorFacts(size, generates)
    prompts, default = prompts_in(folder)
    facts = VectorFacts(size, generates, prompts=prompts, default_prompt=default, stated=True)
    return of_modules(folder, facts)


def of_modules(folder: Path, facts: VectorFacts) -> VectorFacts:
    """Return the facts with what the modules of a folder do, one after the other."""
    found = {"normalises": False}
    refused: str | None = None
    for kind, path in modules_in(folder):
        if kind == "Pooling":
            read = pooling_of(read_config(folder / path / "config.json", FILE_BYTES))
            if isinstance(read, str):
                refused = refused or read
            else:
                found |= read
        elif kind == "Normalize":
            found["normalises"] = True
        elif kind == "LogitScore":
            # A reranker that answers with a word: it has no embeddings of its own.
            alone = read_config(folder / path / "config.json", FILE_BYTES).get("false_token_id") is None
            why = "its LogitScore compares no two tokens, which is not supported" if alone else None
            return msgspec.structs.replace(facts, stated=False, unscored=why)
        elif kind != "Transformer":
            refused = refused or f"modules.json has a {kind:.80}, which is not supported"
    if read_config_or_nothing(folder / "sentence_bert_config.json").get("do_lower_case") is True:
        refused = refused or "sentence_bert_config.json asks for lower-case texts, which is not supported"
    return msgspec.structs.replace(facts, **found, refused=refused)


def modules_in(folder: Path) -> list[tuple[str, str]]:
    """Return the last word of each module's type, and its folder."""
    listed = read_list(folder / "modules.json")
    found = []
    for module in listed:
        kind, path = (module.get(name) for name in ("type", "path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or not re.fullmatch(r"(\w[\w-]*)?", path):
            raise ModelError(f"{folder}/modules.json must list modules with a type and a folder, got {shown(module)}")
        found.append((kind.rpartition(".")[2], path))
    return found


def pooling_of(config: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the facts of a pooling's configuration, or why it is not supported.

    >>> pooling_of({"pooling_mode_lasttoken": True, "include_prompt": False})
    {'pooling': <Pooling.LAST: 'last'>, 'counts_prompts': False}
    >>> pooling_of({"pooling_mode": "cls"})
    "pooling must be of the last token or a mean, got cls; a causal model's first token knows no other"
    """
    stated = config.get("pooling_mode")
    modes = stated if isinstance(stated, list) else [stated] if stated is not None else []
    modes += [FLAGS.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        given = " and ".join(str(mode).removeprefix("pooling_mode_").removesuffix("_token") for mode in modes) or "none"
        why = "; a causal model's first token knows no other" if given == "cls" else ""
        return f"pooling must be of the last token or a mean, got {given:.80}{why}"
    return {"pooling": POOLINGS[modes[0]], "counts_prompts": config.get("include_prompt", True) is not False}


def prompts_in(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the named prompts of a model, and the name of its default."""
    path = folder / "config_sentence_transformers.json"
    config = read_config_or_nothing(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    known = isinstance(prompts, dict) and len(prompts) <= MOST_PROMPTS
    if not known or not all(isinstance(text, str) and len(text) <= MOST_PROMPT_CHARACTERS for text in prompts.values()):
        raise ModelError(
            f"{path}: prompts must map up to {MOST_PROMPTS} names to texts of up to {MOST_PROMPT_CHARACTERS} "
            f"characters, got {shown(prompts)}"
        )
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name must be one of its prompts, got {shown(default)}")
    return prompts, default


def activation_of(config: Mapping[str, Any], labels: int) -> ScoreFunction:
    """Return what is done with the output of a class head: as its files say, or as cross-encoders do it."""
    own = config.get("sentence_transformers")
    name = str(own.get("activation_fn") or "").rpartition(".")[2] if isinstance(own, Mapping) else ""
    if name in ("Identity", "Sigmoid"):
        return ScoreFunction.NONE if name == "Identity" else ScoreFunction.SIGMOID
    return PROBLEMS.get(str(config.get("problem_type"))) or (
        ScoreFunction.SIGMOID if labels == 1 else ScoreFunction.SOFTMAX
    )


def of_gguf(file: Path, size: int) -> VectorFacts:
    metadata = read_header(file).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if not isinstance(number, int) or number not in GGUF_POOLINGS:
        return VectorFacts(size)
    name = GGUF_POOLINGS[number]
    if name not in POOLINGS:
        return VectorFacts(size, refused=f"pooling must be of the last token or a mean, got {name}")
    return VectorFacts(size, pooling=POOLINGS[name], stated=True)


def read_config_or_nothing(path: Path) -> dict[str, Any]:
    return read_config(path, FILE_BYTES) if path.is_file() else {}


def read_list(path: Path) -> list[Any]:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES + 1)
    try:
        found = json.loads(content) if len(content) <= FILE_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, list) or len(found) > MOST_MODULES:
        raise ModelError(f"{path} must be a list of up to {MOST_MODULES} modules")
    return found
