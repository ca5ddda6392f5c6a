"""Small cares: a pet that is unwell, a note to somebody, what to eat; table in tables/advice.toml."""

from __future__ import annotations

from random import Random
from typing import Any

from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import asked, chosen, filled, table, tidy

UNWELL = "{mine} {sign}.|{mine} {sign}. What can I do?|{mine} {sign}. What should I do?|Help, {mine} {sign}!"
SORRY = (
    "I am sorry that {it} {signs}.|Oh no, I am sorry about {it}.|"
    "I am sorry to hear that. I hope that {it} is well soon."
)
PET_DO = "What can I do?|What should I do?|What can I do for {it2}?|How can I help {it2}?|Do you have advice?"
PET_WHY = "Why is that?|Why?|What is the reason?|Where does that come from?|What can it be?"
PET_DANGER = "Is that dangerous?|Is it so dangerous?|Why at once?|Why is that bad?"
PET_VET = "Should I go to the vet?|Do I need a vet?|Should I call a vet?|Do we have to go to a vet?"
THANKS = "Thank you.|Thanks!|Thank you, I will do that.|Okay, thank you.|Thanks for your help!"
PET_WELCOME = "You are welcome! I wish {it} all the best.|Gladly! I hope that {it} is well soon."
NOTE_ASKED = (
    "Can you help me write a {sort} to my {to}? {Why}.|Please write a short {sort} to my {to}: {why}.|"
    "Write a short {sort} to my {to} about {about}.|Help me write a {sort} to my {to} about {about}.|"
    "I want to write a {sort} to my {to}. {Why}.|Can you write a {sort} to my {to} about {about}?|"
    "I need a short {sort} for my {to} about {about}."
)
NOTE_OPEN = (
    "Can you help me write a {sort} to my {to}?|Help me write a {sort} to my {to}, please.|"
    "I want to write a {sort} to my {to}.|Can you write a short {sort} to my {to}?|I need a {sort} for my {to}."
)
NOTE_WHAT = "Gladly! What should the {sort} say?|Of course! What is it about?|Sure! What do you want to say?"
NOTE_LEADS = "|Here is a short {sort}:\n\n|You could write this:\n\n|How about this?\n\n"
ENDINGS = {
    "teacher": "Kind regards|Best wishes", "boss": "Kind regards|Best regards", "landlord": "Kind regards",
    "doctor": "Kind regards", "colleague": "Best wishes|Best regards", "neighbour": "Best wishes|Kind regards",
}  # fmt: skip
SHORTER = "Can you make it shorter?|Shorter, please.|Make it shorter, please.|That is too long."
LIKED = "Thank you!|Perfect, thanks.|That is good, thank you.|Great, I will send it."
LIKED_ANSWERS = (
    "You are welcome! I hope that your {to} likes it.|Gladly! Now you only have to write your name under it."
)
MEAL_ASKED = (
    "What should I eat for {name}?|What can I eat for {name}?|What is good to eat for {name}?|"
    "What food is good for {name}?|Do you have an idea what I can eat for {name}?|"
    "I do not know what to eat for {name}.|Give me an idea for {name}: what should I eat?"
)
MEAL_ANSWERS = "You could eat {dish}.|How about {dish}?|{dish} would be good.|For {name} I would take {dish}."
MEAL_WHY = "Why is that good?|Why?|Why that?|Why is it good for {name}?|What is good about it?"
MEAL_BECAUSE = "Because {why}.|That is good because {why}.|{dish} would be good because {why}."
MEAL_OTHER = (
    "Something else?|What else can I eat?|I do not like that. What else?|Do you have another idea?|And what else?"
)
MEAL_ANSWERS_OTHER = "You could also eat {dish}.|Then how about {dish}?|{dish}, for example."
ENJOY = "Enjoy your meal!|You are welcome! Enjoy it.|Gladly! I hope that you like it."


def unwell(random: Random) -> list[Exchange]:
    """A pet has something; what can be done, where it comes from, whether a vet is needed."""
    entry = random.choice(table("advice")["pet"])
    pet, name = random.choice(entry["pets"]), random.choice(table("talk")["slots"]["pet_name"])
    called = random.random() < 0.4
    sign = chosen(random, entry["sign"])
    slots = {"sign": sign, "signs": sign.replace("I am", "you are"), "it2": random.choice(["my " + pet, "it"])}
    slots |= {"mine": f"my {pet} {name}" if called else f"my {pet}", "it": name if called else f"your {pet}"}
    said = filled(random, UNWELL, slots)
    more = [(PET_DANGER if "urgent" in entry else PET_WHY, entry["why"]), (PET_VET, entry["vet"])]
    sorry, do = filled(random, SORRY, slots), filled(random, entry["do"], slots)
    if said.endswith("?") or "urgent" in entry:
        exchanges = [(said, do)]
    elif random.random() < 0.4:
        exchanges = [(said, f"{sorry} {do}")]
    else:
        exchanges = [(said, sorry)]
        more.insert(0, (PET_DO, entry["do"]))
    for asking, answer in more[: random.choice([1, 1, 2, 3])]:
        exchanges.append((asked(random, filled(random, asking, slots)), filled(random, answer, slots)))
    if random.random() < 0.3:
        exchanges.append((chosen(random, THANKS), filled(random, PET_WELCOME, slots)))
    return exchanges


def letter(entry: dict[str, Any], end: str, whole: bool = True) -> str:
    """A salutation, what is to be said, a greeting."""
    dear = {"best friend": "friend"}.get(entry["to"], entry["to"])
    return f"Dear {dear},\n{entry['body']}{' ' + entry['more'] if whole else ''}\n{end}"


def note(random: Random) -> list[Exchange]:
    """A short note or letter to somebody, at once or after the question what it should say."""
    entries = table("advice")["note"]
    freely = random.random() < 0.2
    entry = random.choice([each for each in entries if each.get("open")] if freely else entries)
    slots = {**entry, "sort": random.choice(["note", "note", "letter", "message"])}
    slots["Why"] = tidy(slots["why"])
    end = chosen(random, ENDINGS.get(entry["to"], "Love|Many greetings|Yours"))
    told = filled(random, NOTE_LEADS, slots) + letter(entry, end)
    if freely:
        exchanges = [(asked(random, filled(random, NOTE_OPEN, slots)), told)]
    elif random.random() < 0.3:
        exchanges = [(asked(random, filled(random, NOTE_OPEN, slots)), filled(random, NOTE_WHAT, slots))]
        exchanges.append((filled(random, "{Why}.|It is about {about}.|About {about}.", slots), told))
    else:
        exchanges = [(asked(random, filled(random, NOTE_ASKED, slots)), told)]
    if random.random() < 0.2:
        exchanges.append((chosen(random, SHORTER), letter(entry, end, whole=False)))
    if random.random() < 0.3:
        exchanges.append((chosen(random, LIKED), filled(random, LIKED_ANSWERS, slots)))
    return exchanges


def meal(random: Random) -> list[Exchange]:
    """What to eat for something, why that is good, what else would do."""
    entry = random.choice(table("advice")["meal"])
    (dish, why), (other, reason) = random.sample(entry["dishes"], 2)
    slots = {"name": entry["name"], "dish": dish, "why": why}
    answer = filled(random, MEAL_ANSWERS, slots)
    explained = random.random() < 0.25
    exchanges = [(asked(random, filled(random, MEAL_ASKED, slots)), f"{answer} {tidy(why)}." if explained else answer)]
    if not explained and random.random() < 0.6:
        exchanges.append((asked(random, filled(random, MEAL_WHY, slots)), filled(random, MEAL_BECAUSE, slots)))
    if random.random() < 0.35:
        slots |= {"dish": other, "why": reason}
        exchanges.append((filled(random, MEAL_OTHER, slots), filled(random, MEAL_ANSWERS_OTHER, slots)))
        if random.random() < 0.4:
            exchanges.append((asked(random, filled(random, MEAL_WHY, slots)), filled(random, MEAL_BECAUSE, slots)))
    if random.random() < 0.2:
        exchanges.append((chosen(random, THANKS.replace("your help", "the idea")), chosen(random, ENJOY)))
    return exchanges


MAKERS: dict[Maker, float] = {unwell: 0.4, note: 0.5, meal: 0.4}
