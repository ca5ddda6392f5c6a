"""How a conversation is written down for the model, in training and in the chat template that it ships with."""

from __future__ import annotations

from collections.abc import Sequence

START, END, OVER = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = (OVER, START, END)

# The same in Jinja, for tokenizer_config.json. A test holds the two together.
JINJA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(exchanges: Sequence[tuple[str, str]], system: str | None = None) -> str:
    """
    >>> written([("Hi", "Hello!")])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n'
    """
    turns = [("system", system)] if system else []
    turns += [turn for said, answer in exchanges for turn in (("user", said), ("assistant", answer))]
    return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns)
