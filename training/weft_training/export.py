"""Export of a run as a checkpoint in Weft's package: `python -m weft_training.export RUN --tokenizer DATA/tokenizer`.

Writes what `weft serve` and transformers load alike: config, generation settings, tokenizer with its chat template,
weights in bfloat16 in files of bounded size, a model card and the licence. Trains nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from weft import builtin

from weft_training.architecture import CONTEXT, configuration
from weft_training.template import END, JINJA, OVER, START

ROOT = Path(__file__).parents[2]
FILE_BYTES = 24 << 20
WHOLE_BYTES = 50 << 20
# How answers are drawn when nobody says otherwise: so small a model goes astray when drawn from freely.
DRAWING = {"do_sample": True, "temperature": 0.3, "top_p": 0.9}
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

The small model that comes with Weft: {count:.1f} million parameters, {layers} layers (Gated DeltaNet and full
attention, three to one; the `Qwen3_5` text architecture), a context of {context} tokens, byte-level BPE of
{vocabulary} entries. It greets, answers simple questions, counts, tells short stories and writes small Python
functions; it is often wrong, and knows little.

`weft serve` serves it; `AutoModelForCausalLM.from_pretrained` of transformers loads the same folder. What it was
trained on, under which licences and for how long, what it cannot do, and conversations with it are in Weft's
`docs/lab/weft-small.md`.

Weights: Apache-2.0, as Weft itself.
"""


def weights_of(run: Path) -> dict[str, Tensor]:
    """A finished run's model, or a running one's as it was last saved; in bfloat16, tied weights once."""
    for finished in (run / "model" / "model.safetensors", run / "model.safetensors"):
        if finished.exists():
            found = load_file(finished)
            break
    else:
        state = load_file(run / "state.safetensors")
        found = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
    return {name: t.to(torch.bfloat16).contiguous() for name, t in found.items() if name != "lm_head.weight"}


def split(weights: dict[str, Tensor], most: int = FILE_BYTES) -> list[dict[str, Tensor]]:
    """In their order, as many in each part as its bytes allow.

    >>> [list(part) for part in split({n: torch.zeros(4) for n in "abc"}, most=32)]
    [['a', 'b'], ['c']]
    """
    parts: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in weights.items():
        if held + tensor.nbytes > most and parts[-1]:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += tensor.nbytes
    return parts


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    parts = split(weights)
    places = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        (folder / file).chmod(0o644)
        places |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def write_settings(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    end, over = tokenizer.token_to_id(END), tokenizer.token_to_id(OVER)
    kind = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16"}
    config = kind | configuration(end, over)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [end, over], "pad_token_id": over, **DRAWING})
    texts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": OVER,
        "additional_special_tokens": [START, END],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": JINJA,
    }
    write_json(folder / "tokenizer_config.json", texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    return config


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def export(run: Path, tokenizer: Path, into: Path) -> None:
    """The whole folder, beside the old one until it is complete."""
    new = into.with_name(into.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    weights = weights_of(run)
    config = write_settings(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), new)
    write_weights(weights, new)
    card = {
        "name": builtin.NAME,
        "count": sum(t.numel() for t in weights.values()) / 1e6,
        "layers": config["num_hidden_layers"],
        "context": config["max_position_embeddings"],
        "vocabulary": config["vocab_size"],
    }
    (new / "README.md").write_text(CARD.format(**card))
    shutil.copy(ROOT / "LICENSE", new / "LICENSE")
    size = sum(file.stat().st_size for file in new.iterdir())
    if size > WHOLE_BYTES:
        raise SystemExit(f"{size / 2**20:.1f} MiB: more than the {WHOLE_BYTES >> 20} that the package has room for")
    if into.is_symlink():
        into.unlink()
    shutil.rmtree(into, ignore_errors=True)
    new.rename(into)
    for file in sorted(into.iterdir()):
        print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file.name}")
    print(f"{size / 2**20:7.2f} MiB  in {into}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a training; finished or not")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the folder with its tokenizer.json")
    parser.add_argument("--into", type=Path, default=builtin.FOLDER)
    asked = parser.parse_args()
    export(asked.run, asked.tokenizer, asked.into)


if __name__ == "__main__":
    main()
