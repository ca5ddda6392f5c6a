"""Dialogues with a teacher: a small instruct model answers everyday questions, served by Weft itself.

    python -m training.dialogues DATA --teacher FOLDER --count 200000

The teacher is SmolLM2-135M-Instruct (Apache-2.0). Answers that are cut off, empty or repeat themselves are dropped.
Also writes the dialogues that are made by rule, and those of the package of short exchanges.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tqdm import tqdm

from training.made import Exchange, conversation
from training.questions import GO_ON, question

SYSTEM = "You are a friendly assistant. Answer in a few short and simple sentences."
ANSWER_TOKENS = 160
AT_ONCE = 8192
MADE = 400_000


def taught(teacher: str, count: int, seed: int, device: str) -> Iterator[list[Exchange]]:
    """Conversations of one to three exchanges. Later turns find the earlier ones in the cache."""
    from weft import LLM, SamplingParams

    random = Random(seed)
    llm = LLM(teacher, device=device, dtype="bfloat16", max_length=2048)
    for _ in tqdm(range(0, count, AT_ONCE), desc="dialogues", unit_scale=AT_ONCE):
        open_ones: list[list[Exchange]] = [[] for _ in range(AT_ONCE)]
        for turn in range(3):
            asked = [GO_ON[random.randrange(len(GO_ON))] if turn else question(random) for _ in open_ones]
            messages = [_messages(done, said) for done, said in zip(open_ones, asked)]
            params = [
                SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.7, top_p=0.95, seed=random.getrandbits(60))
                for _ in open_ones
            ]
            results = llm.chat(messages, params, progress=False)
            going: list[list[Exchange]] = []
            for done, said, result in zip(open_ones, asked, results):
                answer = result.text.strip()
                if result.finish_reason != "stop" or not is_good(answer):
                    if done:
                        yield done
                    continue
                done.append((said, answer))
                if turn < 2 and random.random() < 0.4:
                    going.append(done)
                else:
                    yield done
            open_ones = going
            if not open_ones:
                break


def _messages(done: list[Exchange], said: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for user, assistant in done:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*messages, {"role": "user", "content": said}]


def is_good(answer: str) -> bool:
    """
    >>> is_good("A cat is a small animal."), is_good("Yes yes yes yes yes yes yes yes"), is_good("")
    (True, False, False)
    """
    words = answer.lower().split()
    if not 2 <= len(words) <= 140 or "as an ai" in answer.lower():
        return False
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", answer) if s]
    return len(set(words)) >= 0.35 * len(words) and len(set(sentences)) == len(sentences)


def short_talk(file: Path) -> Iterator[list[Exchange]]:
    """Question and answer pairs out of the YAML of the package of short exchanges, read line by line."""
    for line in file.open():
        said: str | None = None
        for entry in json.loads(line)["text"].splitlines():
            found = re.match(r"^(- - |  - )(.+)$", entry)
            if found is None:
                continue
            text = found[2].strip().strip("'\"")
            if found[1] == "- - ":
                said = text
            elif said is not None and text:
                yield [(said[0].upper() + said[1:], text)]


def write(file: Path, conversations: Iterable[list[Exchange]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with file.open("w") as out:
        for exchanges in conversations:
            out.write(json.dumps(exchanges) + "\n")
            count += 1
    print(f"{file.name}: {count} conversations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--teacher", help="folder of the teacher's checkpoint; without one, only what needs none")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    folder = asked.data / "dialogues"
    random = Random(asked.seed)
    write(folder / "made.jsonl", (conversation(random) for _ in range(MADE)))
    if (asked.data / "text" / "talk.jsonl").exists():
        write(folder / "talk.jsonl", short_talk(asked.data / "text" / "talk.jsonl"))
    if asked.teacher:
        write(folder / "taught.jsonl", taught(asked.teacher, asked.count, asked.seed, asked.device))


if __name__ == "__main__":
    main()
