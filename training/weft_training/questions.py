"""What a teacher model is asked: everyday questions and small stories out of lists of words, and ways to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from weft_training.made.facts import NAMES

COUNTED = """
apple banana cake carrot egg grape lemon mushroom nut onion orange pancake pear pizza potato salad sandwich tomato
vegetable ant bear bee bird butterfly camel cat chicken cow crab crocodile deer dog dolphin donkey duck eagle elephant
fish fox frog giraffe goat horse kangaroo lion monkey mouse octopus owl panda parrot penguin pig rabbit shark sheep
snail snake spider squirrel tiger turtle whale wolf zebra beach bridge castle city cloud desert farm field flower forest
garden hill island lake leaf mountain ocean planet rainbow river road rock star storm street tree valley village volcano
waterfall bag ball basket bath bed bell bicycle boat book bottle box brush bucket bus button camera candle car chair
clock coat computer cup desk dictionary door dress drum engine envelope fence fork fridge glass glove guitar hammer hat
house kettle key kitchen knife ladder lamp letter library lock magnet map mirror museum needle newspaper oven painting
park pen pencil phone piano picture plane plate pocket puzzle radio ring robot roof room rope school ship shirt shoe
shop sock spoon stamp station stove suitcase table telescope television tent theatre thermometer ticket toy train
umbrella vase violin wall watch wheel window zoo baker builder dentist doctor farmer firefighter friend gardener king
musician nurse painter pilot queen sailor scientist singer student teacher writer birthday breakfast dance dream game
heart holiday joke language poem season song sport story year
""".split()  # noqa: SIM905
UNCOUNTED = """
bread butter cheese chocolate coffee corn flour fruit garlic honey juice milk pasta pepper rice salt soup sugar tea
water yogurt grass ice lightning rain sand snow wind money paper soap exercise football gravity music sleep swimming
time weather fire gold wood wool electricity friendship happiness history science art reading writing cooking
""".split()  # noqa: SIM905
DESCRIBING = """
big small little old young brave shy happy sad clever lazy kind lonely hungry sleepy curious funny quiet loud strong
gentle magic golden silver red blue green broken lost forgotten friendly grumpy proud tiny giant wise silly fast slow
""".split()  # noqa: SIM905
DOING = (
    """
baking bread|cleaning a room|cooking rice|drawing a cat|drinking water|eating vegetables|falling asleep|feeding a cat
fixing a bicycle|flying a kite|getting up early|growing tomatoes|keeping a diary|learning a language|learning to cook
learning to swim|making a paper boat|making friends|making pancakes|making soup|making tea|packing a suitcase
painting a wall|planning a trip|planting a tree|playing chess|playing the guitar|reading a book|riding a bicycle
running in the park|saving money|singing a song|studying for a test|taking a photo|taking care of a dog
taking care of plants|telling a joke|walking in the forest|washing clothes|writing a letter|writing a story
brushing your teeth|catching a fish|choosing a gift|climbing a mountain|dancing|doing homework|folding a shirt
going camping|helping a neighbour|listening to music|making a salad|making a sandwich|meeting new people|riding a horse
sewing a button|sharing toys|swimming in the sea|visiting a museum|waiting for a bus|watching the stars
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
FEELINGS = "happy sad tired bored excited nervous angry lonely hungry thirsty cold proud afraid sick sleepy".split()  # noqa: SIM905
PLACES = (
    "a small village", "a big forest", "an old house", "a school", "the beach", "a farm", "the moon", "a busy city",
    "a quiet garden", "a castle", "an island", "the mountains", "a toy shop", "a kitchen", "a zoo", "a train",
)  # fmt: skip
ASK_THING = (
    "What is {a}?", "Tell me about {a}.", "What do you know about {a}?", "Explain what {a} is to a child.",
    "Describe {a} in two sentences.", "Tell me a fun fact about {a}.", "Give me a sentence with the word {word}.",
    "Write three sentences about {a}.", "Why is {a} important?", "What is special about {a}?",
    "Can you explain what {a} is?", "Write two sentences about {a}.", "What is the meaning of the word {word}?",
)  # fmt: skip
ASK_OBJECT = (
    "Where can I find {a}?", "What does {a} look like?", "What is {a} used for?", "How would you describe {a}?",
    "What is the difference between {a} and {b}?", "Which do you like more, {a} or {b}?", "Draw {a} with words.",
    "Why would somebody want {a}?", "What can I do with {a}?",
)  # fmt: skip
ASK_DOING = (
    "How do I get better at {doing}?", "Give me a tip for {doing}.", "Why is {doing} good for me?",
    "What do I need for {doing}?", "Is {doing} difficult?", "Do you like {doing}?",
    "What is the first step when {doing}?", "How long does {doing} take?", "I want to try {doing}. Any advice?",
    "Tell me about {doing}.", "What is fun about {doing}?", "Why do people like {doing}?",
)  # fmt: skip
ASK_FEELING = (
    "I feel {feeling} today.", "I am {feeling}. What can I do?", "What makes people {feeling}?",
    "My friend is {feeling}. How can I help?", "Why am I {feeling}?", "What should I do when I am {feeling}?",
    "How can I tell if someone is {feeling}?", "My dog looks {feeling}. What should I do?",
)  # fmt: skip
ASK_STORY = (
    "Write a tiny story in five sentences about {a}.", "Write a short story about {a} in four sentences.",
    "Tell me a very short story about {a} and {b}.", "Write a tiny story about {a} in {place}.",
    "Tell me a short bedtime story about {a}.", "Write a story in five sentences about {name} and {a}.",
    "Tell me a very short story about a girl named {name} who finds {a}.",
    "Write a short story in five sentences about a boy named {name} in {place}.",
    "Continue this story with four sentences: Once upon a time there was {a} in {place}.",
    "Continue this story with four sentences: One day {name} saw {a}.",
    "Finish the story in a few sentences: {name} wanted to find {a}.",
)  # fmt: skip
# Asked like this a teacher always tells the same story: it is asked for one about something.
ANY_STORY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Write a story.",
    "A story, please!",
)
GO_ON = (
    "Tell me more.", "Why?", "Can you give me an example?", "Can you say that in one sentence?",
    "That is interesting. What else?", "I did not know that. Go on.", "Can you explain it more simply?",
    "What happened next?", "Why is that?", "What else should I know?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    about: tuple[str, ...]  # words of which an answer to the point has at least one
    kept_as: str = ""  # what the conversation says instead, if anything


def question(random: Random) -> Question:
    """One question or request."""
    return random.choices(list(KINDS), list(KINDS.values()))[0](random)


def about_thing(random: Random) -> Question:
    if random.random() < 0.2:
        word = random.choice(UNCOUNTED)
        return Question(random.choice(ASK_THING).format(a=word, word=word), (word,))
    word, other = random.sample(COUNTED, 2)
    form = random.choice(ASK_THING + ASK_OBJECT)
    return Question(form.format(a=with_article(word), b=with_article(other), word=word), (word,))


def about_doing(random: Random) -> Question:
    doing = random.choice(DOING)
    stems = tuple(word.removesuffix("ing") if word.endswith("ing") else word for word in doing.split())
    return Question(random.choice(ASK_DOING).format(doing=doing), tuple(stem for stem in stems if len(stem) > 2))


def about_feeling(random: Random) -> Question:
    feeling = random.choice(FEELINGS)
    return Question(random.choice(ASK_FEELING).format(feeling=feeling), ())


def story(random: Random) -> Question:
    word, other = random.sample(COUNTED, 2)
    name, place = random.choice(NAMES), random.choice(PLACES)
    one = with_article(f"{random.choice(DESCRIBING)} {word}" if random.random() < 0.7 else word)
    text = random.choice(ASK_STORY).format(a=one, b=with_article(other), name=name, place=place)
    kept_as = random.choice(ANY_STORY) if random.random() < 0.15 and "Continue" not in text else ""
    return Question(text, tuple(each for each in (word, other, name) if each in text), kept_as)


KINDS: dict[Callable[[Random], Question], float] = {about_thing: 4, about_doing: 1.5, about_feeling: 0.7, story: 4}


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word
