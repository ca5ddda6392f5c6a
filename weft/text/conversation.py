"""Turns conversations into prompts: the rendered template as tokens, and the positions worth keeping."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weft.base.errors import InvalidField, RequestError
from weft.text.last_tokens import start_of_last
from weft.text.prompts import NO_TOKENIZER
from weft.text.template import ChatTemplate, Message, check_messages
from weft.text.tokenizer import Tokenizer

NO_TEMPLATE = "this model has no chat template; send a plain prompt: /v1/completions over HTTP, `generate` in Python"


def render(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    check: Callable[[str], None] = lambda text: None,
    keep: int | None = None,
) -> tuple[list[int], list[int]]:
    """Return a conversation's tokens, and the ends of messages or parts with `cache_control`.

    `continue_final_message` ends the prompt within the last message, so that the answer continues it. `check` sees the
    rendered text before it is tokenized, and may raise. With `keep`, only that many tokens at the end are needed, and
    tokens and positions may begin later than the conversation.
    """
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    if template is None:
        raise RequestError(NO_TEMPLATE)
    if continue_final_message:
        text = continued(template, messages, tools, variables)
    else:
        text = template.render(messages, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt)
    check(text)
    start = 0 if keep is None else start_of_last(tokenizer, text, keep, special=False)
    tokens = tokenizer.encode(text[start:], special=False)
    positions = []
    for beginning in declared(check_messages(messages)):
        begun = template.render(beginning, tools=tools, variables=variables, add_generation_prompt=False)
        if text.startswith(begun[:start]):
            positions.append(shared(tokens, tokenizer.encode(begun[start:], special=False)))
    return tokens, [position for position in positions if position]


def continued(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt of a conversation up to the end of its last message's text.

    A mark that no text contains shows where that is. The text itself might occur again in what the template writes
    after it.
    """
    *earlier, last = check_messages(messages)
    mark, content = secrets.token_hex(16), last.get("content")
    if isinstance(content, str) and not last.get("tool_calls"):
        marked: Any = content + mark
    elif isinstance(content, Sequence) and content and not last.get("tool_calls"):
        marked = [*content, {"type": "text", "text": mark}]
    else:
        raise InvalidField("continue_final_message", "needs a last message of text, without tool calls")
    text = template.render(
        [*earlier, {**last, "content": marked}], tools=tools, variables=variables, add_generation_prompt=False
    )
    before, found, _ = text.rpartition(mark)
    if not found:
        raise InvalidField("continue_final_message", "is impossible: the chat template does not write the last message")
    return before


def declared(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the conversation up to each message, or part of a message's content, that has a `cache_control`.

    >>> parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    >>> [begun[-1]["content"] for begun in declared([{"role": "user", "content": parts}])]
    [[{'type': 'text', 'text': 'a', 'cache_control': {}}]]
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            for end, part in enumerate(content, start=1):
                if isinstance(part, Mapping) and part.get("cache_control") is not None:
                    yield [*messages[:place], {**message, "content": list(content[:end])}]
        if message.get("cache_control") is not None:
            yield list(messages[: place + 1])


def shared(whole: Sequence[int], begun: Sequence[int]) -> int:
    """Return the number of tokens that a prompt shares with a separately rendered beginning of it.

    >>> shared([1, 2, 3], [1, 2, 9, 9])
    2
    """
    differ = (i for i, (a, b) in enumerate(zip(whole, begun)) if a != b)
    return next(differ, min(len(whole), len(begun)))
