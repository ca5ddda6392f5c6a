"""Comparisons with another program or another checkpoint: transformers, and a wide copy of quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.cli.check.measures import LeftOut, Line, Measure, Measuring, estimated_kl, perplexity

if TYPE_CHECKING:
    from weft.offline.llm import LLM

NAME = "transformers"
GREEDY = 24
# Largest mean difference of log-probabilities that rounding explains, and of a greedy token from the best one.
DIFFERENCES = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}
TIES = {"float32": 0.01, "bfloat16": 0.5, "float16": 0.1}
# transformers holds a second copy of the weights, and needs room to load it.
COPIES = 2.5
# What a format may cost is for the user to judge: beyond this it is no number of a model any more.
MOST_LOST = 1e30


def transformers_lines(llm: LLM, folder: Path, dtype: str) -> Iterator[Line]:
    """Compare scores of texts and greedy answers with what transformers computes in float32 on this CPU."""
    from weft.device.devices import free_bytes

    if find_spec(NAME) is None:
        yield LeftOut(NAME, "it is not installed")
        return
    if not (folder / "config.json").is_file():
        yield LeftOut(NAME, "it reads folders of safetensors only")
        return
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if COPIES * size > free_bytes():
        yield LeftOut(NAME, f"a second copy of {size / 2**30:.1f} GiB of weights does not fit into free memory")
        return
    try:
        oracle = load_oracle(folder)
    except Exception as error:  # whatever a model that it does not know raises
        yield LeftOut(NAME, f"it does not load the model: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    measuring = Measuring(llm, NAME)
    differences, ties = [], []
    for tokens in measuring.texts():
        own, theirs = measuring.scores(tokens[:1], tokens[1:]), oracle_scores(oracle, tokens)
        differences += [abs(a - float(row[token])) for a, row, token in zip(own, theirs, tokens[1:])]
        params = SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True)
        [answer] = llm.generate([tokens], params, use_tqdm=False, cache_salt=measuring.new_salt())
        rows = oracle_scores(oracle, [*tokens, *answer.token_ids])[len(tokens) - 1 :]
        ties += [float(row.max() - row[token]) for row, token in zip(rows, answer.token_ids)]
    mean = sum(differences) / len(differences)
    yield Measure(f"{NAME}, log-probabilities", mean, DIFFERENCES[dtype], f"largest {max(differences):.1e}")
    same = sum(each == 0 for each in ties)
    yield Measure(f"{NAME}, greedy tokens", max(ties), TIES[dtype], f"{same} of {len(ties)} are its best ones")


def load_oracle(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def oracle_scores(oracle: Any, tokens: list[int]) -> Any:
    """Return log-probabilities of all tokens at every position: row i is about the token behind token i."""
    import torch

    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def against_lines(llm: LLM, options: Options, other: str) -> Iterator[Line]:
    """Compare a checkpoint with a wide one of the same model."""
    from weft.offline.llm import LLM as Engine

    with Engine.from_options(
        replace(options, model=other, quantize="off", quantize_head=False), progress=False
    ) as wide:
        measuring = Measuring(wide, "wide")
        prompts, answers = measuring.texts(), []
        for result in measuring.answers(prompts, measuring.new_salt(), draft=0):
            answers.append((result.prompt_token_ids, result.token_ids))
        sampled = [score for prompt, answer in answers for score in measuring.scores(prompt, list(answer))]
        given = [score for text in measuring.text_scores() for score in text]
    measuring = Measuring(llm, "narrow")
    if measuring.texts() != prompts:
        yield Measure("the same tokenizer", 1, 0, f"{other} reads the texts as other tokens")
        return
    found = [score for prompt, answer in answers for score in measuring.scores(prompt, list(answer))]
    own = [score for text in measuring.text_scores() for score in text]
    yield Measure("KL against it", estimated_kl(sampled, found), MOST_LOST, f"{len(found)} tokens that it sampled")
    yield Measure(
        "perplexity", perplexity(own), MOST_LOST, f"{perplexity(given):.4g} there, {len(own)} tokens of texts"
    )
