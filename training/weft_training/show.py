"""What a trained model says, and how it came there: `python -m weft_training.show MODEL --log RUN/log.jsonl ...`.

Into docs/lab/weft-small.md: talks of fixed words and seeds, drawn as the model's own settings say, every one of them shown; and
the curve of the run's log as a picture. Replaces what stands between the marks of the page. Chooses nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import builtin
from weft.simulate.plots import lines

if TYPE_CHECKING:
    from weft import LLM

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "weft-small.md"
PICTURE = "model-bits.svg"
ANSWER_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Talk:
    about: str
    said: tuple[str, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


FORECAST = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "The weather of tomorrow in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TALKS = (
    Talk("A greeting", ("Hello",)),
    Talk("A greeting with a name, recalled", ("Hi, I am Clara.", "What is my name?")),
    Talk("Who it is", ("Who are you?", "What can you do?")),
    Talk("Small talk", ("Good morning! How are you today?", "I am a bit tired.", "Thank you, bye!")),
    Talk("Everyday things", ("What is an umbrella for?",)),
    Talk("Everyday things", ("Why do people drink water?",)),
    Talk("Everyday things", ("What is the difference between a cat and a dog?", "Tell me more.")),
    Talk("Everyday things", ("How do I make tea?",)),
    Talk("Everyday things", ("Give me three tips for learning to swim.",)),
    Talk("Everyday things", ("What is rain?", "Can you say that in one sentence?")),
    Talk("Facts", ("What is the capital of Japan?", "And of Norway?")),
    Talk("Facts", ("What colour is a ripe tomato?",)),
    Talk("Counting", ("Count from 3 to 12.", "Now count down from 10 to 5.")),
    Talk("Counting in steps", ("Please count from 0 to 50 in steps of five.",)),
    Talk("Sums", ("What is 7 plus 5?", "How much is 9 times 6?")),
    Talk("Days", ("Which day comes after Friday?", "What are the days of the week?")),
    Talk("A story", ("Tell me a short story about a fox.",)),
    Talk("A story", ("Tell me a story.", "What happened then?")),
    Talk("A story to be continued", ("Continue the story: Once upon a time there was a small boat on a big lake.",)),
    Talk("A story to be continued", ("Continue the story: It was raining, and Tom could not find his hat.",)),
    Talk("A small function", ("Write a Python function that adds two numbers.",)),
    Talk("A small function", ("Write a function that counts the vowels of a text.", "Thanks!")),
    Talk("A small function", ("Can you write a Python function that tells whether a number is prime?",)),
    Talk("A small function", ("Write a Python function that returns every second item of a list.",)),
    Talk("A function that it was not taught", ("Write a Python function that adds up the even digits of a number.",)),
    Talk("A feeling", ("I feel lonely today.", "What can I do?")),
    Talk("A poem", ("Write a short poem about the sea.",)),
    Talk("What it cannot know", ("What is the weather today?",)),
    Talk("Beyond its size", ("Explain how a nuclear reactor works.",)),
    Talk("Instructions", ("What is a library?",), system="You are a pirate. Answer in one short sentence."),
    Talk("A function that is listed, and not forced", ("Will it rain in Rome tomorrow?",), tools=(FORECAST,)),
    Talk("Everyday things", ("What should I eat for breakfast?", "Why is that good for me?")),
    Talk("Everyday things", ("Which is heavier, a car or a feather?",)),
    Talk("Everyday things", ("Can you help me to write a short note to my teacher?",)),
    Talk("A worry", ("My cat does not want to eat.", "Thank you.")),
    Talk("A story", ("Tell me a story about a robot and the moon.", "Who helped the robot?")),
    Talk(
        "Five turns",
        ("Hello! My name is Ben.", "What do you know about bees?", "Why?", "Count from 1 to 5.", "What is my name?"),
    ),
)


def talk(llm: LLM, each: Talk, seed: int) -> tuple[list[str], list[str]]:
    """A conversation as lines of Markdown, and how each answer ended."""
    messages = [{"role": "system", "content": each.system}] if each.system else []
    told = [f"> **system:** {each.system}", ">"] if each.system else []
    ends = []
    for turn, said in enumerate(each.said):
        messages.append({"role": "user", "content": said})
        params = replace(llm.suggested, max_tokens=ANSWER_TOKENS, seed=1000 * seed + turn)
        [answer] = llm.chat(messages, params, tools=each.tools or None, use_tqdm=False)
        messages.append({"role": "assistant", "content": answer.text})
        ends.append(str(answer.finish_reason))
        cut = "" if answer.finish_reason == "stop" else f" *(cut after {len(answer.token_ids)} tokens)*"
        told += [f"> **user:** {said}", ">", *quoted(f"**{builtin.NAME}:** {readable(answer.text)}{cut}"), ">"]
    return told[:-1], ends


def readable(answer: str) -> str:
    """An answer as Markdown that shows all of it: code begins on a line of its own, and tags are no HTML.

    >>> readable("Hi!"), readable("<tool_call>")
    ('Hi!', '\\n\\n```text\\n<tool_call>\\n```')
    """
    if "<" in answer and "```" not in answer:
        answer = f"```text\n{answer}\n```"
    return f"\n\n{answer}" if answer.startswith("```") else answer


def quoted(text: str) -> list[str]:
    """
    >>> quoted("one\\n\\ntwo")
    ['> one', '>', '> two']
    """
    return [f"> {line}".rstrip() for line in text.splitlines()]


def samples(llm: LLM) -> str:
    parts, ends = [], []
    for number, each in enumerate(TALKS, start=1):
        told, ended = talk(llm, each, number)
        parts += [f"### {number}. {each.about}", "", *told, ""]
        ends += ended
    way = ", ".join(f"{name} {getattr(llm.suggested, name):g}" for name in ("temperature", "top_p"))
    stopped = ends.count("stop")
    head = (
        f"{len(TALKS)} conversations, {len(ends)} answers, drawn once with fixed seeds ({way}; at most {ANSWER_TOKENS} "
        f"tokens), all shown. {stopped} of the {len(ends)} answers ended by themselves."
    )
    return "\n".join([head, "", *parts]).rstrip()


def read_logs(files: list[Path]) -> list[dict[str, Any]]:
    """One stage after another: the steps of a later one are counted on."""
    found: list[dict[str, Any]] = []
    for file in files:
        before = found[-1]["step"] if found else 0
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        found += [entry | {"step": before + entry["step"]} for entry in entries]
    return found


def courses(log: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Bits per byte of held-out text over steps, by source.

    >>> courses([{"step": 5, "loss": 1.0}, {"step": 200, "bits_made": 0.5}])
    {'made': [(200, 0.5)]}
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in log:
        for name, value in entry.items():
            if name.startswith("bits_"):
                found.setdefault(name.removeprefix("bits_"), []).append((entry["step"], value))
    return found


def figures(log: list[dict[str, Any]]) -> str:
    """The last bits per byte of every source, and what the run took, as far as its log tells."""
    paced = [entry for entry in log if "tokens_per_second" in entry]
    steps = log[-1]["step"]
    told = f"{steps} steps"
    if paced:
        rate = sorted(entry["tokens_per_second"] for entry in paced)[len(paced) // 2]
        told += f" at {rate:,.0f} tokens a second (median)"
    rows = [f"| {name} | {points[-1][1]:.3f} |" for name, points in courses(log).items()]
    picture = f"![Bits per byte of held-out text over the steps of training]({PICTURE})"
    return "\n".join([f"After {told}:", "", "| held-out text | bits per byte |", "|---|---:|", *rows, "", picture])


def put(page: str, mark: str, text: str) -> str:
    """The page with a text between the marks of that name.

    >>> put("a\\n<!-- x -->\\nold\\n<!-- /x -->\\nb", "x", "new")
    'a\\n<!-- x -->\\nnew\\n<!-- /x -->\\nb'
    """
    first, last = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    before, found, rest = page.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SystemExit(f"the page has no place for {mark}")
    return before + first + text + last + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of the model; without one, that of the package")
    parser.add_argument("--log", type=Path, nargs="+", help="log.jsonl of each stage; else figures and picture stay")
    parser.add_argument("--into", type=Path, default=PAGE)
    asked = parser.parse_args()
    page = asked.into.read_text()
    if asked.log:
        log = read_logs(asked.log)
        page = put(page, "figures", figures(log))
        drawn = lines("Held-out text", courses(log), "step", "bits per byte")
        asked.into.with_name(PICTURE).write_text(drawn)
    from weft import LLM

    with LLM(asked.model, progress=False) as llm:
        page = put(page, "samples", samples(llm))
    asked.into.write_text(page)
    print(f"{asked.into}: {len(TALKS)} conversations")


if __name__ == "__main__":
    main()
