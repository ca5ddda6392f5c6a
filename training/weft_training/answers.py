"""The model's own answers, which its MTP head learns to guess: `python -m weft_training.answers ANSWERS --seconds 60`.

Prompts are drawn by rule, as the dialogues of training are. Weft answers each of them twice, greedily and at a
temperature. The file has whole texts, each with the length of its prompt. The hash of a prompt decides whether its
texts are held out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weft import builtin

from weft_training import calls
from weft_training.dialogues import _template
from weft_training.made import conversation, instructions
from weft_training.made.stories import tale
from weft_training.pack import SYSTEMS, WITH_SYSTEM, fraction_of
from weft_training.template import START, written

if TYPE_CHECKING:
    from weft import LLM

# How often each kind of prompt is drawn.
CHATS, INSTRUCTED, CALLS = 0.72, 0.1, 0.1  # the rest: stories that begin without a question
HELD_OUT = 0.04
TEMPERATURES = (0.0, 0.7)
ANSWER_TOKENS = 256
MOST_TOKENS = 1024
AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Answers:
    """Texts one after another: `tokens[starts[n] : starts[n] + lengths[n]]`, of which `prompts[n]` are the prompt."""

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
    greedy: Tensor
    held: Tensor

    @property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def save(self, file: Path) -> None:
        save_file({name: getattr(self, name) for name in self.__slots__}, file)

    @classmethod
    def load(cls, file: Path) -> Answers:
        return cls(**load_file(file))


def prompt(random: Random) -> str:
    """A text that ends where the model goes on: an answer is asked for, or a story has begun."""
    chance = random.random()
    if chance < CHATS:
        system = random.choice(SYSTEMS) if random.random() < WITH_SYSTEM else None
        return asked(conversation(random), system, random)
    if chance < CHATS + INSTRUCTED:
        system, exchanges = instructions.conversation(random)
        return asked(exchanges, system, random)
    if chance < CHATS + INSTRUCTED + CALLS:
        messages, tools = calls.conversation(random)
        ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        return _template().render(messages[: random.choice(ends)], tools=tools, add_generation_prompt=True)
    words = " ".join(tale(random).parts.values()).split()
    return " ".join(words[: random.randint(3, 16)])


def asked(exchanges: list[tuple[str, str]], system: str | None, random: Random) -> str:
    """A conversation up to one of its questions.

    >>> asked([("Hi", "Hello!")], None, Random(0))
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    last = random.randrange(len(exchanges))
    return written([*exchanges[:last], (exchanges[last][0], "")], system).rsplit(START, 1)[0] + f"{START}assistant\n"


def answered(llm: LLM, prompts: list[str], random: Random) -> Iterator[dict[str, Any]]:
    """Every prompt with an answer at each temperature; without those that are too long to be computed."""
    from weft import SamplingParams

    encoded = [tokens for tokens in map(llm.tokenizer.encode, prompts) if len(tokens) <= MOST_TOKENS - ANSWER_TOKENS]
    requests = [(tokens, temperature) for tokens in encoded for temperature in TEMPERATURES]
    params = [
        SamplingParams(temperature=temperature, max_tokens=ANSWER_TOKENS, seed=random.getrandbits(60))
        for _, temperature in requests
    ]
    results = llm.generate([tokens for tokens, _ in requests], params, progress=False)
    for (tokens, temperature), result in zip(requests, results):
        held = fraction_of(llm.tokenizer.decode(tokens, skip_special=False)) < HELD_OUT
        text = [*tokens, *result.token_ids]
        yield {"text": text, "prompt": len(tokens), "greedy": temperature == 0, "held": held}


def gather(llm: LLM, seconds: float, seed: int, at_once: int = AT_ONCE) -> Answers:
    """Answers to as many prompts as there is time for; at least once to `at_once` of them."""
    random, began = Random(seed), time.monotonic()
    found: list[dict[str, Any]] = []
    longest = 0.0
    while not found or time.monotonic() - began + longest < seconds:
        before = time.monotonic()
        found += answered(llm, [prompt(random) for _ in range(at_once)], random)
        longest = max(longest, time.monotonic() - before)
        print(f"{len(found)} texts after {time.monotonic() - began:.1f} s", flush=True)
    return joined(found)


def joined(found: list[dict[str, Any]]) -> Answers:
    return Answers(
        tokens=torch.tensor([token for each in found for token in each["text"]], dtype=torch.int32),
        lengths=torch.tensor([len(each["text"]) for each in found]),
        prompts=torch.tensor([each["prompt"] for each in found]),
        greedy=torch.tensor([each["greedy"] for each in found]),
        held=torch.tensor([each["held"] for each in found]),
    )


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="the file to write")
    parser.add_argument("--model", default=str(builtin.FOLDER))
    parser.add_argument("--seconds", type=float, default=600.0, help="from the start of the program")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked_for = parser.parse_args()
    from weft import LLM

    # Few processors without a GPU multiply in bfloat16.
    rows, dtype = ("auto", "float32") if asked_for.device == "cpu" else (512, "auto")
    settings = {"device": asked_for.device, "dtype": dtype, "memory": asked_for.memory, "max_length": MOST_TOKENS}
    with LLM(asked_for.model, max_sequences=rows, progress=False, **settings) as llm:
        print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
        left = asked_for.seconds - (time.monotonic() - began)
        answers = gather(llm, left, asked_for.seed, asked_for.at_once)
    answers.save(asked_for.answers)
    made = int((answers.lengths - answers.prompts).sum())
    print(f"{asked_for.answers}: {len(answers.lengths)} texts, {made} tokens of answers", flush=True)


if __name__ == "__main__":
    main()
