"""The model's own answers, which its MTP head learns to guess: `python -m weft_training.answers ANSWERS --seconds 60`.

What users say is drawn by rule, as in the dialogues of training. Weft answers turn by turn, each conversation once
greedily and once at a temperature. The file has whole texts, and which of their tokens the model has said. A hash of
what the user says decides whether a text is held out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weft import builtin

from weft_training import calls
from weft_training.dialogues import chat_template
from weft_training.made import conversation, instructions
from weft_training.made.stories import tale
from weft_training.pack import SYSTEMS, WITH_SYSTEM, fraction_of
from weft_training.template import END, written

if TYPE_CHECKING:
    from weft import LLM

# How often each kind of text is drawn.
CHATS, INSTRUCTED, CALLS = 0.78, 0.08, 0.04  # the rest: stories that begin without a question
HELD_OUT = 0.04
TEMPERATURES = (0.0, 0.7)
TURNS = 4
ANSWER_TOKENS = 256
MOST_TOKENS = 1024
AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Answers:
    """Texts one after another: `tokens[starts[n] : starts[n] + lengths[n]]`. `said`: whether each is of an answer."""

    tokens: Tensor
    said: Tensor
    lengths: Tensor
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


@dataclass(slots=True)
class Text:
    """A text that grows: what is still to be put in before each answer, and the tokens so far."""

    pieces: list[str]
    temperature: float
    held: bool
    tokens: list[int] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)

    def put(self, tokens: list[int], said: bool) -> None:
        self.tokens += tokens
        self.said += [said] * len(tokens)


def pieces(random: Random) -> list[str]:
    """What stands before each answer of a text: something that a user says, or the beginning of a story."""
    chance = random.random()
    if chance < CHATS:
        system = random.choice(SYSTEMS) if random.random() < WITH_SYSTEM else None
        return asked(conversation(random), system)
    if chance < CHATS + INSTRUCTED:
        system, exchanges = instructions.conversation(random)
        return asked(exchanges, system)
    if chance < CHATS + INSTRUCTED + CALLS:
        messages, tools = calls.conversation(random)
        ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        return [chat_template().render(messages[: random.choice(ends)], tools=tools, add_generation_prompt=True)]
    words = " ".join(tale(random).parts.values()).split()
    return [" ".join(words[: random.randint(3, 16)])]


def asked(exchanges: list[tuple[str, str]], system: str | None = None) -> list[str]:
    """
    >>> asked([("Hi", "Hello!"), ("Why?", "So.")])[1]
    '\\n<|im_start|>user\\nWhy?<|im_end|>\\n<|im_start|>assistant\\n'
    """
    whole = "".join(written([(said, "")], None if at else system) for at, (said, _) in enumerate(exchanges[:TURNS]))
    parts = whole.split(f"assistant\n{END}")[:-1]
    return [f"{part}assistant\n" for part in parts]


def answer(llm: LLM, texts: list[Text], random: Random) -> list[Text]:
    """Let every text go on by one piece and its answer; return those that have more to come."""
    from weft import SamplingParams

    for each in texts:
        each.put(llm.tokenizer.encode(each.pieces.pop(0)), said=False)
    fitting = [each for each in texts if len(each.tokens) + ANSWER_TOKENS <= MOST_TOKENS]
    params = [
        SamplingParams(temperature=each.temperature, max_tokens=ANSWER_TOKENS, seed=random.getrandbits(60))
        for each in fitting
    ]
    results = llm.generate([each.tokens for each in fitting], params, use_tqdm=False)
    for each, result in zip(fitting, results):
        each.put(result.token_ids, said=True)
    return [each for each, result in zip(fitting, results) if each.pieces and result.finish_reason == "stop"]


def gather(llm: LLM, seconds: float, seed: int, at_once: int = AT_ONCE) -> Answers:
    """Texts for as long as there is time; `at_once` conversations at least."""
    random, began = Random(seed), time.monotonic()
    found: list[Text] = []
    longest = 0.0
    while not found or time.monotonic() - began + longest < seconds:
        before = time.monotonic()
        drawn = [pieces(random) for _ in range(at_once)]
        held = [fraction_of("".join(each)) < HELD_OUT for each in drawn]
        going = [Text(list(each), t, own) for each, own in zip(drawn, held) for t in TEMPERATURES]
        found += going
        while going:
            going = answer(llm, going, random)
        longest = max(longest, time.monotonic() - before)
        print(f"{len(found)} texts after {time.monotonic() - began:.1f} s", flush=True)
    return joined(found)


def joined(found: list[Text]) -> Answers:
    return Answers(
        tokens=torch.tensor([token for each in found for token in each.tokens], dtype=torch.int32),
        said=torch.tensor([said for each in found for said in each.said]),
        lengths=torch.tensor([len(each.tokens) for each in found]),
        greedy=torch.tensor([each.temperature == 0 for each in found]),
        held=torch.tensor([each.held for each in found]),
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
    made = int(answers.said.sum())
    print(f"{asked_for.answers}: {len(answers.lengths)} texts, {made} tokens of answers", flush=True)


if __name__ == "__main__":
    main()
