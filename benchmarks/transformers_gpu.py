"""Compare Weft with Hugging Face transformers on a GPU: same configuration, random weights, one batch of requests.

    python -m benchmarks.transformers_gpu               LFM2-1.2B
    python -m benchmarks.transformers_gpu nemotron-nano-9b-v2

32 prompts of 512 random tokens with answers of 256 tokens, greedy, bfloat16. A rate is the tokens of all answers over
the whole time, prefill included. transformers' `generate` runs with its defaults, once to warm up and once measured. It
is stopped after two minutes; its rate then counts the tokens generated so far.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import torch

from benchmarks.gpu import Ask, Attempts, arguments_of, fresh, keep, machine, play, random_prompt, run, start, warm_up
from weft.models.config import read_config, text_part
from weft.models.finding import find_checkpoint

ROWS, PROMPT, ANSWER = 32, 512, 256
MOST_SECONDS = 120.0


def main() -> int:
    return run(arguments_of("transformers_gpu", __doc__, 480, models=("lfm2-1.2b",)), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    answer = 64 if arguments.quick else ANSWER
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors}
    with attempts.part("weft"):
        found["weft"] = with_weft(model, arguments, answer)
    keep(found, arguments)
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    with attempts.part("transformers"):
        found["transformers"] = with_transformers(model, arguments, answer)
    return found


def with_weft(model: str, arguments: argparse.Namespace, answer: int) -> float:
    """Return tokens per second."""
    with start(model, arguments, depth=1, max_sequences=ROWS, max_length=1024) as llm:
        warm_up(llm, rows=(1, ROWS))
        asks = [Ask(random_prompt(llm, PROMPT, n), answer) for n in range(ROWS)]
        seconds = play(fresh(llm), asks)
    return ROWS * answer / seconds


def with_transformers(model: str, arguments: argparse.Namespace, answer: int) -> float:
    """Return tokens per second."""
    import transformers

    found = find_checkpoint(model, with_weights=False)
    fields = text_part(read_config(found if found.is_file() else found / "config.json"))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = getattr(torch, arguments.dtype)
    with torch.device(arguments.device):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        prompts = torch.randint(config.vocab_size // 2, config.vocab_size, (ROWS, PROMPT))
        mask = torch.ones_like(prompts)

    def generate(tokens: int) -> float:
        began = time.perf_counter()
        answers = theirs.generate(
            prompts,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            max_time=MOST_SECONDS,
            pad_token_id=0,
        )
        # Synchronise with the device.
        int(answers[0, -1])
        return (answers.shape[1] - PROMPT) * ROWS / (time.perf_counter() - began)

    with torch.inference_mode():
        generate(4)
        return generate(answer)


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}, {ROWS} rows, {PROMPT} tokens in")
    for name in ("weft", "transformers"):
        if name in found:
            print(f"  {name:14} {found[name]:>8.0f} tokens/s")
    if "weft" in found and "transformers" in found:
        print(f"  {found['weft'] / found['transformers']:.1f} times as fast")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
