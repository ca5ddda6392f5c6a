"""Simple questions about everyday things: what they are and for, why and how things happen, how something is done.

What is said stands in tables/: things and measures (frames in everyday_things.py), classes, whys, topics, howto. An
answer may be followed by "Tell me more." or "What is the first step?", answered from the entry that was spoken of.
"""

from __future__ import annotations

from random import Random
from typing import Any

from weft_training.made import everyday_classes as classes
from weft_training.made import everyday_things as things
from weft_training.made.everyday_words import NUMBERS, capital, leading, small, spoken, table
from weft_training.made.exchange import Exchange, Maker, one

MORE = [
    "Tell me more.",
    "Can you tell me more?",
    "More, please.",
    "Go on.",
    "What else?",
    "Can you say more about that?",
]
SHORTER = ["Can you say that in one sentence?", "In one sentence, please.", "Say it in one sentence.",
           "Shorter, please.",
           "Can you make it shorter?"]  # fmt: skip


def sure(random: Random, answer: str) -> str:
    return random.choice([answer, answer, answer, f"Sure. {answer}", f"Of course. {answer}"])


def further(random: Random, more: str) -> Exchange:
    """One more sentence, asked for or doubted."""
    if random.random() < 0.2:
        return random.choice(["Really?", "Is that true?", "Are you sure?"]), f"Yes. {more}"
    return random.choice(MORE), sure(random, more)


def why(random: Random) -> list[Exchange]:
    """Why something is so, from whys.toml."""
    entry: dict[str, Any] = random.choice(table("whys")["why"])
    ask, said, because = entry["ask"], entry["said"], random.choice(entry["because"])
    frame = random.choice(["Why {ask}?"] * 6 + ["Can you tell me why {said}?", "Do you know why {said}?",
                          "Explain why {said}.", "Tell me why {said}.", "What is the reason that {said}?",
                          "Can you explain why {said}?", "How come {said}?"])  # fmt: skip
    whole = f"{capital(said)} because {because}."
    answer = random.choice([whole, whole, f"Because {because}.", f"{capital(because)}. That is why {said}."])
    told = random.random() < 0.35 and "That is why" not in answer
    exchanges = [(spoken(random, frame.format(ask=ask, said=said)), f"{answer} {entry['more']}" if told else answer)]
    if told and random.random() < 0.3:
        exchanges.append((random.choice(SHORTER), whole))
    elif not told and random.random() < 0.35:
        exchanges.append(further(random, entry["more"]))
    return exchanges


def asked(random: Random) -> list[Exchange]:
    """How, when, what happens: a question and its answers, from whys.toml."""
    entry: dict[str, Any] = random.choice(table("whys")["asked"])
    question, said = entry["ask"], entry["said"]
    frame = random.choice([question] * 3 + [f"Can you tell me {said}?", f"Do you know {said}?", f"Explain {said}.",
                          f"Tell me {said}.", f"Can you explain {said}?", f"I want to know {said}."])  # fmt: skip
    answer, more = random.choice(entry["answers"]), entry["more"]
    if random.random() < 0.3:
        return [(spoken(random, frame), f"{answer} {more}")]
    exchanges = [(spoken(random, frame), answer)]
    if random.random() < 0.4:
        exchanges.append(further(random, more))
    return exchanges


def topic(random: Random) -> list[Exchange]:
    """A large subject in two or three plain sentences, from topics.toml."""
    entry: dict[str, Any] = random.choice(table("topics")["topic"])
    name, be = entry["name"], "are" if entry.get("many") else "is"
    first, how, more = entry["what"], entry["how"], entry["more"]
    frames = ["What {be} {x}?", "What {be} {x}?", "Explain {x}.", "Explain {x} in simple words.", "Tell me about {x}.",
              "Can you explain {x} to me?", "What do you know about {x}?", "Explain {x} to a child.",
              "Can you tell me what {x} {be}?", "I do not understand {x}. Can you explain?"]  # fmt: skip
    answer = random.choice([f"{first} {how}", f"{first} {how}", f"{first} {more}"])
    if entry.get("works", True) and random.random() < 0.45:
        frames = [
            "How {do} {x} work?",
            "How {do} {x} work?",
            "Explain how {x} work{s}.",
            "Can you explain how {x} work{s}?",
            "Tell me how {x} work{s}.",
            "Do you know how {x} work{s}?",
            "Explain in two sentences how {x} work{s}.",
        ]
        answer = random.choice([f"{first} {how}", f"{first} {how}", leading(name, how)])
    do, s = ("do", "") if be == "are" else ("does", "s")
    said = random.choice(frames).format(x=name, be=be, do=do, s=s)
    answer = f"{first} {how}" if "two sentences" in said else answer
    exchanges = [(spoken(random, said), answer)]
    if random.random() < 0.35:
        exchanges.append((random.choice(MORE), sure(random, more if more not in answer else how)))
    elif random.random() < 0.2:
        exchanges.append((random.choice(SHORTER), first))
    return exchanges


def mine(text: str) -> str:
    """
    >>> mine("brush your teeth")
    'brush my teeth'
    """
    return text.replace("yourself", "myself").replace("your", "my")


def in_order(random: Random, steps: list[str]) -> str:
    """First, then, after that, finally."""
    turn = random.randrange(3)
    between = [["Then ", "Next, ", "After that, "][(turn + i) % 3] for i in range(len(steps) - 2)]
    words = ["First, ", *between, "Finally, "]
    return " ".join(word + small(step) for word, step in zip(words, steps, strict=True))


def numbered(steps: list[str]) -> str:
    return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))


def steps_told(random: Random, entry: dict[str, Any]) -> Exchange:
    """How it is done: all the steps in order, or some of the tips."""
    do, doing, steps, ordered = entry["do"], entry["doing"], entry["steps"], entry.get("ordered", True)
    said = random.choice([f"How do I {mine(do)}?", f"How do I {mine(do)}?", f"How can I {mine(do)}?",
                          f"How do you {do}?",
                          f"What is the best way to {do}?", f"Tell me how to {do}.", f"Explain how to {do}.",
                          f"I want to {mine(do)}. How do I start?", f"Can you tell me how to {do}?",
                          f"How should I {mine(do)}?", f"I need help with {mine(doing)}."])  # fmt: skip
    chosen = steps if ordered else steps[:1] + random.sample(steps[1:], random.choice([1, 2]))
    if random.random() < 0.2:
        listing = random.choice([f"Here is how to {do}:", f"To {do}, do this:", "You can do it like this:"])
        return said, f"{listing}\n{numbered(steps)}"
    if ordered:
        return said, in_order(random, steps)
    return said, random.choice(["", f"To {do}, start like this: "]) + " ".join(chosen)


def tips(random: Random, entry: dict[str, Any]) -> Exchange:
    """Exactly as many tips as were asked for."""
    do, doing, steps = entry["do"], entry["doing"], entry["steps"]
    count = random.randint(2, min(5, len(steps)))
    word = random.choice([NUMBERS[count], NUMBERS[count], str(count)])
    said = random.choice([f"Give me {word} tips for {doing}.", f"Give me {word} tips to {do}.",
                          f"What are {word} tips for {doing}?",
                          f"Tell me {word} things that help with {doing}.", f"List {word} tips for {doing}.",
                          f"Name {word} tips for {doing}.", f"Can you give me {word} tips for {doing}?"])  # fmt: skip
    chosen = [steps[i] for i in sorted(random.sample(range(len(steps)), count))]
    lead = random.choice(["", "", f"Here are {NUMBERS[count]} tips for {doing}:\n"])
    return spoken(random, said), random.choice([lead + numbered(chosen), lead + numbered(chosen), " ".join(chosen)])


def small_question(random: Random, entry: dict[str, Any]) -> Exchange:
    """What is needed, what comes first, whether it is hard, some advice."""
    do, doing, steps, level = entry["do"], entry["doing"], entry["steps"], entry["level"]
    first, other = steps[0], random.choice(steps[1:])
    hard = {"easy": f"No, {doing} is easy.", "practice": f"It takes some practice, but {doing} is not too hard.",
            "hard": f"Yes, {doing} is not easy, but you can learn it step by step."}[level]  # fmt: skip
    need = f"To {do}, you need {entry['need']}."
    return random.choice([
        (random.choice([f"What do I need to {mine(do)}?", f"What do you need to {do}?",
                        f"What do I need for {mine(doing)}?"]),
         random.choice([need, f"You need {entry['need']}.", f"For {doing} you need {entry['need']}."])),
        (random.choice([f"What is the first step to {do}?", f"What should I do first to {mine(do)}?",
                        f"How do I start {mine(doing)}?"]),
         random.choice([first, f"Start like this: {small(first)}", f"The first step is this: {small(first)}"])),
        (random.choice([f"Is {doing} difficult?", f"Is it hard to {do}?", f"Is {doing} hard?"]),
         f"{hard} {random.choice([first, other])}"),
        (random.choice([f"Any advice for {doing}?", f"Do you have advice on {doing}?",
                        f"I want to {mine(do)}. Any advice?",
                        f"What should I know about {doing}?", f"Give me a tip for {doing}."]),
         random.choice([other, first, f"Yes. {other}", f"Here is a tip: {small(other)}"])),
    ])  # fmt: skip


def how_to(random: Random) -> list[Exchange]:
    """Something that people do, from howto.toml; sometimes with a question that depends on it."""
    entry: dict[str, Any] = random.choice(table("howto")["howto"])
    first = random.choice([steps_told, steps_told, steps_told, tips, tips, small_question])(random, entry)
    exchanges = [first]
    if random.random() < 0.4:
        exchanges.append(how_to_after(random, entry, first[1]))
    return exchanges


def how_to_after(random: Random, entry: dict[str, Any], told: str) -> Exchange:
    """A question after an answer, in which "it" is what was spoken of."""
    doing, steps = entry["doing"], entry["steps"]
    left = [step for step in steps if step not in told and small(step) not in told]
    frames = [
        (["What do I need?", "What do I need for that?", "Do I need anything?"], f"You need {entry['need']}."),
        (["What is the first step?", "How do I start?", "What comes first?"],
         random.choice([steps[0], f"The first step is this: {small(steps[0])}"])),
        (["What is the last step?", "What comes last?"], f"The last step is this: {small(steps[-1])}"),
        (["Is it difficult?", "Is that hard?", "Is it hard?"],
         {"easy": f"No, {doing} is easy.", "practice": f"A little, but {doing} gets easier with practice.",
          "hard": f"Yes, {doing} takes time, but you can learn it step by step."}[entry["level"]]),
    ]  # fmt: skip
    if "hard" in told or "easy" in told:
        frames.pop()
    if not entry.get("ordered", True):
        frames.pop(2)
    if left:
        more = random.choice(left)
        frames.append((["Any other advice?", "Any more tips?", "One more tip, please.", "What else can I do?",
                        "Anything else?"], random.choice([more, f"Yes. {more}"])))  # fmt: skip
    asked_after, answer = random.choice(frames)
    return random.choice(asked_after), answer


MAKERS: dict[Maker, float] = {
    things.thing_asked: 3, things.valued: 0.3, things.difference: 0.7, one(things.alive): 0.15,
    one(things.sentence): 0.3, things.kinds: 0.4, one(things.measured): 0.4, classes.class_asked: 0.3,
    one(classes.belongs): 0.3, one(classes.called): 0.5, why: 1.3, asked: 1.0, topic: 0.7, how_to: 1.4,
}  # fmt: skip
