"""A chat in which the model calls a function of ours: `python examples/http/chat_with_tools.py [URL]`.

The first request must call the tool: `tool_choice="required"` makes the server's grammar see to it, so that even
weft-small writes a valid call. The second one has the result, and is answered in words. Needs `pip install openai`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

MODEL = "weft-small"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> dict[str, Any]:
    return {"city": city, "sky": "clear", "degrees": 21 if city == "Paris" else 9}


def main(url: str = "http://127.0.0.1:8000") -> tuple[dict[str, Any], str]:
    """Return the arguments of the call, and the answer that follows its result."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=64, temperature=0
    )
    [call] = asked.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    result = json.dumps(get_weather(**arguments))
    messages += [
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48, temperature=0)
    return arguments, answer.choices[0].message.content or ""


if __name__ == "__main__":
    call, answer = main(*sys.argv[1:])
    print(f"get_weather({call})\n{answer}")
