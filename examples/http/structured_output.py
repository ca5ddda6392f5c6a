"""Answers in the form of a JSON schema: `python examples/http/structured_output.py [URL]`.

The schema becomes a grammar, and no token that breaks it is drawn. Needs `pip install openai`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "bird"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 4},
        "is_tame": {"type": "boolean"},
    },
    "required": ["animal", "legs", "is_tame"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> dict[str, Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="weft-small",
        messages=[{"role": "user", "content": "Describe an animal of the house."}],
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}},
        max_tokens=256,
        temperature=0,
    )
    found: dict[str, Any] = json.loads(answer.choices[0].message.content or "")
    return found


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
