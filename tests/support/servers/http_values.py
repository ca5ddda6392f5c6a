"""What tests of the HTTP APIs send: a template with everything, tools, a schema, fields that force an answer."""

from __future__ import annotations

from typing import Any

from weft.server.settings import Limits

# Small bounds, each of them easily exceeded.
LIMITS = Limits(
    body_bytes=1 << 16,
    header_bytes=4096,
    prompts=4,
    n=4,
    sequences=8,
    logprobs=5,
    stops=3,
    stop_characters=10,
    biases=6,
    messages=5,
    cache_points=2,
    tools=2,
    schema_bytes=2000,
    schema_depth=6,
    regex_characters=50,
    template_kwargs_bytes=300,
    template_kwargs_depth=4,
    bad_words=3,
    allowed_tokens=8,
    max_tokens=100,
    open_sequences=6,
)

# A template with everything: tools, thoughts, a switch. Its marks tell the server which parsers to use.
RICH = """\
{%- if tools %}<|start|>tools
{{ tools | tojson }} Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{% endif -%}
{%- if reasoning_effort %}Think {{ reasoning_effort }}.
{% endif -%}
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content }}
{%- if message.tool_calls %}<tool_call>{{ message.tool_calls | tojson }}</tool_call>{% endif %}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif -%}
"""


def saying(text: str) -> dict[str, Any]:
    """Fields that make the model say exactly this."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200}


PATH = "/v1/chat/completions"
LONG = "The quick brown fox jumps over the lazy dog. " * 6

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "good": {"type": "boolean"}},
    "required": ["size", "good"],
    "additionalProperties": False,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "for tests",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "clock")
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
