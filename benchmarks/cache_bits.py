"""Measure what smaller caches cost: the KL of answers, and the bytes of a cell and of a state.

    python -m benchmarks.cache_bits --with kv_dtype=fp8
    python -m benchmarks.cache_bits SmolLM2-135M-Instruct --text speech.txt --with kv_dtype=fp8
    python -m benchmarks.cache_bits --places 500 2000 3600 --answers 4 --answer 200 --with kv_dtype=fp8

The engine with default caches continues a text from several places, some times from each, with a temperature of 1. The
engine with `--with` then scores the same tokens, so every prompt and every answer is read from its smaller cache. Both
scores give an estimate of the KL divergence, term by term at least 0. A third line compares the first engine with
itself: its scores while it answered with those of a prompt. That is what rounding costs anyway. Without `--text`, the
model writes the text itself, with a temperature of 0.8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import LLM, SamplingParams
from weft.cli.check.measures import estimated_kl

BEGINNING = "Once upon a time"
# Scores of one answer.
Scores = list[float]


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    given: Scores


def main() -> int:
    arguments = arguments_of()
    options: dict[str, Any] = {
        "progress": False, "memory": arguments.memory, "dtype": arguments.dtype, "exact": False, "draft": "off"
    }  # fmt: skip
    with LLM(arguments.model, **options) as llm:
        text = text_of(llm, arguments)
        answers = [each for place in arguments.places for each in continue_from(llm, text[:place], arguments)]
        again = [scores_of(llm, each) for each in answers]
        sizes = {"as it is": sizes_of(llm)}
    changes = dict(each.split("=", 1) for each in arguments.change)
    with LLM(arguments.model, **{**options, **changes}) as llm:
        smaller = [scores_of(llm, each) for each in answers]
        sizes[" ".join(arguments.change)] = sizes_of(llm)
    found = {
        "model": arguments.model or "weft-small",
        "change": changes,
        "tokens": sum(len(each.tokens) for each in answers),
        "sizes": sizes,
        "kl_of_rounding": kl(answers, again),
        "kl": kl(answers, smaller),
        "kl_by_place": {
            place: kl(*zip(*((a, b) for a, b in zip(answers, smaller) if len(a.prompt) == place), strict=True))
            for place in arguments.places
        },
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return 0


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--with", dest="change", nargs="+", required=True, metavar="OPTION=VALUE")
    parser.add_argument("--text", help="a file to continue")
    parser.add_argument("--places", type=int, nargs="+", default=[200, 1000, 2000, 3000, 3700])
    parser.add_argument("--answers", type=int, default=2, help="from each place")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def text_of(llm: LLM, arguments: argparse.Namespace) -> list[int]:
    longest = max(arguments.places)
    if arguments.text:
        assert llm.tokenizer is not None
        text = llm.tokenizer.encode(Path(arguments.text).read_text())
    else:
        writing = SamplingParams(max_tokens=longest, temperature=0.8, seed=0, ignore_eos=True)
        [story] = llm.generate([BEGINNING], writing, use_tqdm=False)
        text = [*story.prompt_token_ids, *story.token_ids]
    if len(text) < longest:
        raise SystemExit(f"the text has {len(text)} tokens; {longest} are needed")
    return text


def continue_from(llm: LLM, prompt: list[int], arguments: argparse.Namespace) -> list[Answer]:
    found = []
    for seed in range(arguments.answers):
        params = SamplingParams(max_tokens=arguments.answer, logprobs=0, seed=seed, ignore_eos=True)
        [result] = llm.generate([prompt], params, use_tqdm=False)
        found.append(Answer(prompt, list(result.token_ids), [each.logprob for each in result.logprobs or ()]))
    return found


def scores_of(llm: LLM, answer: Answer) -> Scores:
    """Score an answer as a part of a prompt that is computed from its start."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(answer.prompt) - 1)
    [result] = llm.generate([answer.prompt + answer.tokens], params, use_tqdm=False, cache_salt="scores")
    return [each.logprob for each in (result.prompt_logprobs or [])[len(answer.prompt) :] if each is not None]


def kl(answers: Sequence[Answer], scores: Sequence[Scores]) -> float:
    given = [score for each in answers for score in each.given]
    return estimated_kl(given, [score for each in scores for score in each])


def sizes_of(llm: LLM) -> dict[str, int]:
    spec = llm.engine.ledger.spec
    return {"bytes of a page": spec.page_bytes, "bytes of a state": spec.state_bytes}


if __name__ == "__main__":
    sys.exit(main())
