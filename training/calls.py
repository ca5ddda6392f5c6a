"""Conversations in which a function is called: what was listed, who asks, the call, what came back, the answer.

Made by rule and written by the chat template itself, so that the model sees exactly what a server will show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.made.facts import CAPITALS, NAMES

Maker = Callable[[Random], tuple[str, dict[str, Any], Any, str]]


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    description: str
    parameters: dict[str, str]  # the type of each
    ask: Maker  # a question, the call's arguments, what it gives back, and the answer

    def listed(self) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}


def weather(random: Random) -> tuple[str, dict[str, Any], Any, str]:
    city, degrees = random.choice(sorted(CAPITALS.values())), random.randint(-10, 35)
    sky = random.choice(["sunny", "cloudy", "rainy", "windy", "foggy"])
    said = random.choice(
        [f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Weather in {city}?"]
    )
    return said, {"city": city}, {"degrees": degrees, "sky": sky}, f"It is {sky} in {city}, at {degrees} degrees."


def addition(random: Random) -> tuple[str, dict[str, Any], Any, str]:
    a, b = random.randint(100, 9999), random.randint(100, 9999)
    return f"What is {a} plus {b}?", {"a": a, "b": b}, {"result": a + b}, f"{a} plus {b} is {a + b}."


def clock(random: Random) -> tuple[str, dict[str, Any], Any, str]:
    city, time = random.choice(sorted(CAPITALS.values())), f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"
    return f"What time is it in {city}?", {"city": city}, {"time": time}, f"It is {time} in {city}."


def message(random: Random) -> tuple[str, dict[str, Any], Any, str]:
    name = random.choice(NAMES)
    text = random.choice(["I will be late.", "See you tomorrow.", "Happy birthday!", "Dinner is ready.", "Call me."])
    return f"Send {name} this message: {text}", {"to": name, "text": text}, {"sent": True}, f"I sent it to {name}."


def light(random: Random) -> tuple[str, dict[str, Any], Any, str]:
    room, state = random.choice(["kitchen", "bathroom", "garden", "bedroom", "hall"]), random.choice(["on", "off"])
    answer = f"The light in the {room} is {state}."
    return f"Turn {state} the light in the {room}.", {"room": room, "state": state}, {"done": True}, answer


FUNCTIONS = (
    Function("get_weather", "The weather in a city.", {"city": "string"}, weather),
    Function("add", "The sum of two numbers.", {"a": "integer", "b": "integer"}, addition),
    Function("get_time", "The time in a city.", {"city": "string"}, clock),
    Function("send_message", "Sends a message.", {"to": "string", "text": "string"}, message),
    Function("set_light", "Turns a light on or off.", {"room": "string", "state": "string"}, light),
)


def conversation(random: Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools, as an API takes them."""
    known = random.sample(FUNCTIONS, random.randint(1, 3))
    called = random.choice(known)
    said, arguments, result, answer = called.ask(random)
    call = {"type": "function", "function": {"name": called.name, "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    return messages, [each.listed() for each in known]
