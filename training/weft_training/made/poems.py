"""Short rhyming poems, composed of couplets out of tables/poems.toml."""

from __future__ import annotations

from random import Random

from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import asked, filled, table, tidy

ASKED = (
    "Write a {sort}poem about {topic}.|Write a {sort}poem about {topic}, please.|"
    "Please write a {sort}poem about {topic}.|"
    "Can you write a {sort}poem about {topic}?|Could you write me a {sort}poem about {topic}?|"
    "Can you write a rhyme about {topic}?|Tell me a {sort}poem about {topic}.|I would like a {sort}poem about {topic}.|"
    "Do you know a {sort}poem about {topic}?|Make a {sort}rhyme about {topic}.|Compose a {sort}poem about {topic}.|"
    "A {sort}poem about {topic}, please.|Give me four lines about {topic} that rhyme."
)
ANY = (
    "Write a {sort}poem.|Can you write a {sort}poem?|Write me a poem, please.|Tell me a poem.|Can you make a rhyme?|"
    "I would like to hear a poem.|Please write a {sort}poem for me."
)
LEADS = ["", "", "", "", "", "Here is a {sort}poem about {topic}:\n\n", "Here is one about {topic}:\n\n"]
ANOTHER = (
    "Another one, please.|Another one!|Can you write another one?|One more, please.|Write another poem about {topic}.|"
    "Again, please.|Do you have another poem about {topic}?|Now a different one."
)
AND_ABOUT = (
    "And about {topic}?|And one about {topic}, please.|Now one about {topic}.|Now write one about {topic}.|"
    "Can you also write one about {topic}?|And what about {topic}?"
)


def verses(couplets: list[str]) -> str:
    """
    >>> verses(["the sea is wide, / the sea is blue."])
    'The sea is wide,\\nThe sea is blue.'
    """
    lines = [line.strip() for couplet in couplets for line in couplet.split(" / ")]
    return "\n".join(line if line.startswith('"') else line[0].upper() + line[1:] for line in lines)


def poem(random: Random) -> list[Exchange]:
    """Four lines; then sometimes another poem on the same topic, a longer one or a word about it."""
    entry = random.choice(table("poems")["poem"])
    slots = {"topic": entry["topic"], "sort": random.choice(["", "short ", "short ", "little ", "nice "])}
    couplets = random.sample(entry["couplets"], len(entry["couplets"]))
    said = filled(random, ASKED if random.random() < 0.92 else ANY, slots)
    lead = random.choice(LEADS).format_map(slots)
    exchanges = [(asked(random, said), lead + verses(couplets[:2]))]
    if random.random() < 0.35:
        exchanges.append(follow(random, entry["topic"], couplets))
    return exchanges


def follow(random: Random, topic: str, couplets: list[str]) -> Exchange:
    slots = {"topic": topic, "sort": ""}
    if random.random() < 0.6:
        return asked(random, filled(random, ANOTHER, slots)), verses(couplets[2:4])
    said, answer = random.choice(
        [
            ("Can you make it longer?|Please make it longer.|Add two more lines.", verses(couplets[:3])),
            ("That is beautiful!|I like it.|What a nice poem!|Nice, thank you.",
             "Thank you! I am glad that you like the poem about {topic}.|Thanks! {topic} is a good topic for a poem."),
            ("What is the poem about?|What was the poem about?", "The poem is about {topic}.|It is about {topic}."),
            ("Can you make it shorter?|Just two lines, please.|Make it shorter.", verses(couplets[:1])),
        ]
    )  # fmt: skip
    answer = answer if "\n" in answer else filled(random, answer, slots)
    return asked(random, tidy(filled(random, said, slots))), answer


def next_topic(random: Random) -> list[Exchange]:
    """A poem about one thing, then "And about the moon?"."""
    first, second = random.sample(table("poems")["poem"], 2)
    said = filled(random, ASKED, {"topic": first["topic"], "sort": "short "})
    more = filled(random, AND_ABOUT, {"topic": second["topic"]})
    return [(asked(random, said), verses(random.sample(first["couplets"], 2))),
            (asked(random, more), verses(random.sample(second["couplets"], 2)))]  # fmt: skip


MAKERS: dict[Maker, float] = {poem: 1.5, next_topic: 0.3}
