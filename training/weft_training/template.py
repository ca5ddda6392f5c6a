"""How a conversation is written down for the model, in training and in the chat template that it ships with."""

from __future__ import annotations

from collections.abc import Sequence

START, END, OVER = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = (OVER, START, END)

# The same in Jinja, for tokenizer_config.json; a test holds the two together. Line breaks are written out, since what
# becomes of those around a block depends on who renders. Tools are listed to the system and called as Hermes does.
JINJA = (
    "{% set break = '\\n' %}"
    "{% macro turn(role, text) %}<|im_start|>{{ role + break + text }}<|im_end|>{{ break }}{% endmacro %}"
    "{% macro call(made) %}{{ '<tool_call>' + break }}"
    '{"name": {{ made.name | tojson }}, "arguments": '
    "{{ made.arguments if made.arguments is string else made.arguments | tojson }}}"
    "{{ break + '</tool_call>' }}{% endmacro %}"
    "{% if tools %}"
    "{% set rules = messages[0].content + break * 2 if messages[0].role == 'system' else '' %}"
    "{% set listed %}{{ rules }}You may call these functions:{{ break }}<tools>{{ break }}"
    "{% for tool in tools %}{{ (tool.function or tool) | tojson }}{{ break }}{% endfor %}</tools>{{ break }}"
    "A call is written like this:{{ break }}<tool_call>{{ break }}"
    '{"name": "the function", "arguments": {"each": "value"}}'
    "{{ break }}</tool_call>{% endset %}"
    "{{ turn('system', listed) }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message.role == 'system') %}"
    "{% set said %}{{ message.content or '' }}"
    "{% for made in message.tool_calls or [] %}"
    "{{ break if message.content or not loop.first }}{{ call(made.function or made) }}"
    "{% endfor %}{% endset %}"
    "{{ turn(message.role, said) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ break }}{% endif %}"
)


def written(exchanges: Sequence[tuple[str, str]], system: str | None = None) -> str:
    """
    >>> written([("Hi", "Hello!")])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n'
    """
    turns = [("system", system)] if system else []
    turns += [turn for said, answer in exchanges for turn in (("user", said), ("assistant", answer))]
    return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns)
