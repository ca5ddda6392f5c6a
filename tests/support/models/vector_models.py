"""Tiny checkpoints for embeddings and classes, as others write them, and what the public implementation computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models import tiny_model
from tests.support.models.oracle import Oracle, TinyModel
from tests.support.models.plain_models import LLAMA, QWEN3

QUERY = "Instruct: Given a question, find what answers it.\nQuery: "
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "memory": "16MiB", "threads": 1, "max_length": 2000, "device": "cpu",
}  # fmt: skip


class VectorOracle:
    """A decoder of the public implementation, and a class head if there are `labels`."""

    def __init__(self, tiny: TinyModel, labels: Sequence[str] = (), **changes: Any) -> None:
        import transformers

        oracle = Oracle(tiny.variant(vocab_size=259, **changes))
        self.model: Any = oracle.model.model
        self.labels = labels
        if labels:
            config = oracle.model.config
            config.id2label = dict(enumerate(labels))
            name = tiny.model_class.replace("ForCausalLM", "ForSequenceClassification")
            classified = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
            classified.model.load_state_dict(self.model.state_dict())
            self.model = classified

    def save(self, folder: Path, **fields: Any) -> Path:
        self.model.save_pretrained(folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        for each in tiny_model.FOLDER.glob("*token*"):
            shutil.copy(each, folder)
        return folder

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden]: the final states, or with a class head its outputs, of a text alone."""
        ids = torch.tensor([list(tokens)])
        if not self.labels:
            return self.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return self.model.score(self.model.model(input_ids=ids, use_cache=False).last_hidden_state)[0]

    def last(self, text: str) -> Tensor:
        return torch.nn.functional.normalize(self.hidden(text.encode())[-1], dim=0)

    def mean(self, text: str, first: int = 0) -> Tensor:
        return self.hidden(text.encode())[first:].mean(0)


def pooled(
    folder: Path, pooling: dict[str, Any], normalises: bool = True, prompts: dict[str, str] | None = None
) -> None:
    """Write the files of sentence_transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    if prompts is not None:
        stated = {"prompts": prompts, "default_prompt_name": None}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))


LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


def qwen3_embedding(folder: Path) -> VectorOracle:
    """Like Qwen3-Embedding: a decoder without prefix in its names, tied, the last token, normalised, two prompts."""
    oracle = VectorOracle(QWEN3, tie_word_embeddings=True)
    oracle.save(folder, architectures=["Qwen3ForCausalLM"])
    pooled(folder, LAST, prompts={"query": QUERY, "document": ""})
    return oracle


def llama_mean(folder: Path, **pooling: Any) -> VectorOracle:
    """A decoder alone whose embeddings are means, not normalised."""
    oracle = VectorOracle(LLAMA)
    oracle.save(folder)
    pooled(folder, MEAN | pooling, normalises=False, prompts={"query": QUERY})
    return oracle
