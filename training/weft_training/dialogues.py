"""Dialogues with a teacher: a small instruct model answers everyday questions, served by Weft itself.

    python -m weft_training.dialogues DATA --teacher FOLDER --seconds 180

The teacher is SmolLM2-135M-Instruct (Apache-2.0). Answers that are cut off, miss the point or repeat themselves are
dropped. Several calls with seeds of their own may run at once. Without a teacher it writes the dialogues that are made
by rule.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm
from weft.text.template import ChatTemplate

from weft_training import calls
from weft_training.made import conversation, instructions
from weft_training.made.exchange import Exchange
from weft_training.questions import GO_ON, Question, question
from weft_training.template import JINJA, written

SYSTEM = "You are a friendly assistant. Answer in a few short and simple sentences."
ANSWER_TOKENS = 180
AT_ONCE = 16384
# Low: so small a teacher says wild things when it is left to chance. Questions bring the variety.
TEMPERATURES = (0.2, 0.4, 0.6)
MADE = 420_000
CALLS = 30_000
INSTRUCTED = 60_000
# A teacher that speaks of itself, or of writing instead of writing.
OFF = re.compile(
    r"(?i)as an ai|assistant|smollm|hugging face|language model|i'm sorry|here's|here is|certainly|here to|i can help"
    r"|happy to|assist you|sure,|of course|my name is|classic example|http|^yes, i can|\*"
)
SPELLED = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "-", "\u2013": "-", "\u2026": "..."}
)


def taught(teacher: str, seconds: float, seed: int, device: str, memory: str) -> Iterator[list[Exchange]]:
    """Conversations of one to three exchanges, for so long. Later turns find the earlier ones in the cache."""
    from weft import LLM

    random = Random(seed)
    llm = LLM(
        teacher,
        device=device,
        dtype="bfloat16",
        max_length=2048,
        max_sequences="auto" if device == "cpu" else 512,
        memory=memory,
    )
    began = time.monotonic()
    with tqdm(desc="conversations") as bar:
        while time.monotonic() - began < seconds:
            open_ones: list[list[Exchange]] = [[] for _ in range(AT_ONCE)]
            while open_ones and time.monotonic() - began < seconds:
                open_ones, ended = _one_turn(llm, open_ones, random)
                bar.update(len(ended))
                yield from ended
            yield from open_ones


def _one_turn(
    llm: Any, open_ones: list[list[Exchange]], random: Random
) -> tuple[list[list[Exchange]], list[list[Exchange]]]:
    """Every conversation asked and answered once more: those that go on, and those that ended here."""
    from weft import SamplingParams

    asked = [question(random) if not done else Question(random.choice(GO_ON), ()) for done in open_ones]
    params = [
        SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=random.choice(TEMPERATURES), top_p=0.9, seed=random.getrandbits(60)
        )
        for _ in open_ones
    ]
    messages = [_messages(done, each.text) for done, each in zip(open_ones, asked)]
    going: list[list[Exchange]] = []
    ended: list[list[Exchange]] = []
    for done, each, result in zip(open_ones, asked, llm.chat(messages, params, use_tqdm=False)):
        answer = result.text.strip().translate(SPELLED)
        if result.finish_reason != "stop" or not is_good(answer, each.about, each.text):
            if done:
                ended.append(done)
            continue
        done.append((each.kept_as or each.text, answer))
        (going if len(done) < 3 and random.random() < 0.35 else ended).append(done)
    return going, ended


def _messages(done: list[Exchange], said: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for user, assistant in done:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*messages, {"role": "user", "content": said}]


def is_good(answer: str, about: Sequence[str] = (), said: str = "") -> bool:
    """Whole sentences to the point that say nothing twice, nor what was said before.

    >>> is_good("A cat is a small animal.", ["cat"]), is_good("A dog is.", ["cat"]), is_good("Yes yes yes yes yes.")
    (True, False, False)
    """
    words = answer.lower().split()
    if not 3 <= len(words) <= 130 or not answer.isascii() or OFF.search(answer) or answer[-1] not in '.!?"':
        return False
    if about and not any(word.lower() in answer.lower() for word in about):
        return False
    if answer.strip(" .!?").lower() in said.lower() or sum(map(str.isupper, answer)) > 0.2 * len(answer):
        return False
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", answer) if s]
    starts = [" ".join(s.lower().split()[:4]) for s in sentences]
    if len(set(sentences)) < len(sentences) or max(map(starts.count, starts)) > 2:
        return False
    triples = list(zip(words, words[1:], words[2:]))
    return len(set(words)) >= 0.45 * len(words) and len(set(triples)) >= 0.92 * len(triples)


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return chat_template().render(messages, tools=tools, add_generation_prompt=False)


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(JINJA, {})


def write(file: Path, conversations: Iterable[object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with file.open("w") as out:
        for each in conversations:
            out.write(json.dumps(each) + "\n")
            count += 1
    print(f"{file.name}: {count} conversations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--teacher", help="folder of the teacher's checkpoint; without one, only what needs none")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the teacher is asked")
    parser.add_argument("--memory", default="auto", help="as `weft generate` takes it: where several share one GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    folder = asked.data / "dialogues"
    if asked.teacher:
        told = taught(asked.teacher, asked.seconds, asked.seed, asked.device, asked.memory)
        write(folder / f"taught.{asked.seed}.jsonl", told)
        return
    random = Random(asked.seed)
    write(folder / "made.jsonl", (conversation(random) for _ in range(MADE)))
    random = Random(asked.seed + 1)
    write(folder / "calls.jsonl", ({"text": rendered(*calls.conversation(random))} for _ in range(CALLS)))
    random = Random(asked.seed + 2)
    given = (instructions.conversation(random) for _ in range(INSTRUCTED))
    write(folder / "instructed.jsonl", ({"text": written(exchanges, system)} for system, exchanges in given))


if __name__ == "__main__":
    main()
