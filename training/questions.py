"""What a teacher model is asked: everyday questions out of short lists of words, and ways to go on."""

from __future__ import annotations

from random import Random

THINGS = """
apple banana bread butter cake carrot cheese chocolate coffee corn egg fish flour fruit garlic grape honey juice lemon
lunch meat milk mushroom noodle nut onion orange pancake pasta pear pepper pizza potato rice salad salt sandwich soup
sugar tea tomato vegetable water yogurt ant bear bee bird butterfly camel cat chicken cow crab crocodile deer dog
dolphin donkey duck eagle elephant fox frog giraffe goat horse kangaroo lion monkey mouse octopus owl panda parrot
penguin pig rabbit shark sheep snail snake spider squirrel tiger turtle whale wolf zebra beach bridge castle city
cloud desert earth farm field fire flower forest garden grass hill ice island lake leaf lightning moon mountain ocean
planet rain rainbow river road rock sand sea sky snow star storm street sun tree valley village volcano waterfall wind
bag ball basket bath bed bell bicycle boat book bottle box brush bucket bus button camera candle car chair clock coat
computer cup desk dictionary door dress drum engine envelope fence fork fridge glass glove guitar hammer hat house
kettle key kitchen knife ladder lamp letter library lock magnet map mirror money museum needle newspaper oven painting
paper park pen pencil phone piano picture plane plate pocket puzzle radio ring robot roof room rope school scissors
ship shirt shoe shop soap sock spoon stamp station stove suitcase table telescope television tent theatre thermometer
ticket toy train umbrella vase violin wall watch wheel window zoo baker builder dentist doctor farmer firefighter
friend gardener king musician nurse painter pilot police officer queen sailor scientist singer student teacher writer
birthday breakfast dance dream exercise football game gravity heart holiday joke language music poem season sleep song
sport story summer swimming temperature time weather winter year
""".split()  # noqa: SIM905
DOING = (
    """
baking bread|cleaning a room|cooking rice|drawing a cat|drinking water|eating vegetables|falling asleep|feeding a cat
fixing a bicycle|flying a kite|getting up early|growing tomatoes|keeping a diary|learning a language|learning to cook
learning to swim|making a paper boat|making friends|making pancakes|making soup|making tea|packing a suitcase
painting a wall|planning a trip|planting a tree|playing chess|playing the guitar|reading a book|riding a bicycle
running in the park|saving money|singing a song|studying for a test|taking a photo|taking care of a dog
taking care of plants|telling a joke|walking in the forest|washing clothes|writing a letter|writing a story
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
FEELINGS = "happy sad tired bored excited nervous angry lonely hungry thirsty cold proud".split()  # noqa: SIM905
ASK_THING = (
    "What is {a}?", "Tell me about {a}.", "What do you know about {the}?", "Why do people like {the}?",
    "Explain what {a} is to a child.", "Describe {a} in two sentences.", "What can you do with {a}?",
    "Where can I find {a}?", "Write a short story about {a}.", "Tell me a fun fact about {the}.",
    "Write a short poem about {a}.", "Give me a sentence with the word {word}.", "What does {a} look like?",
    "Write three sentences about {a}.", "What is the difference between {a} and {b}?",
    "Write a short story about {a} and {b}.", "Which do you like more, {a} or {b}?", "What is {a} used for?",
    "Continue the story: Once upon a time there was {a}.", "Is {a} bigger than {b}?",
)  # fmt: skip
ASK_DOING = (
    "How do I get better at {doing}?", "Give me three tips for {doing}.", "Why is {doing} good for me?",
    "What do I need for {doing}?", "Is {doing} difficult?", "Tell me a story about {doing}.", "Do you like {doing}?",
    "What is the first step when {doing}?", "How long does {doing} take?", "I want to try {doing}. Any advice?",
)  # fmt: skip
ASK_FEELING = (
    "I feel {feeling} today.", "I am {feeling}. What can I do?", "What makes people {feeling}?",
    "My friend is {feeling}. How can I help?", "Why am I {feeling}?", "Tell me a story about someone who is {feeling}.",
)  # fmt: skip
GO_ON = (
    "Tell me more.", "Why?", "Can you give me an example?", "Can you say that in one sentence?", "Thank you!",
    "That is interesting. What else?", "I did not know that. Go on.", "Really?", "Can you explain it more simply?",
)  # fmt: skip


def question(random: Random) -> str:
    """One question or request."""
    kind = random.random()
    if kind < 0.65:
        thing, other = random.sample(THINGS, 2)
        form = random.choice(ASK_THING)
        return form.format(a=with_article(thing), b=with_article(other), the=f"the {thing}", word=thing)
    if kind < 0.88:
        return random.choice(ASK_DOING).format(doing=random.choice(DOING))
    return random.choice(ASK_FEELING).format(feeling=random.choice(FEELINGS))


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word
