"""Turns client text into prompts: sizes, tokens, rendered conversations. Needs no engine, so a worker can do it.

Work that costs more than its size in bytes suggests happens only here; `body_reader.py` decides in which process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.base.errors import InvalidField, RequestError
from weft.server.openai_messages import ChatMessage, Tool, ToolChoice, plain_messages, wanted_tools
from weft.server.settings import Limits
from weft.text import conversation
from weft.text.prompts import NO_TOKENIZER, Tokens, checked_tokens, encode_prompts
from weft.text.template import ChatTemplate, Message
from weft.text.tokenizer import Tokenizer


class PromptFacts(msgspec.Struct, frozen=True):
    """The engine's facts about prompts. `room` is the maximum number of tokens of a sequence."""

    model: str
    vocab_size: int
    max_length: int
    room: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the positions in them that the client declared worth keeping."""

    tokens: Tokens
    snapshots: tuple[int, ...] = ()


class PromptBuilder:
    """`facts` are set before each use: a restarted engine may have others."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        limits: Limits,
        template_kwargs: Sequence[str],
        facts: PromptFacts,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits
        self.facts = facts
        self._template_kwargs = tuple(template_kwargs)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.facts.model:
            raise InvalidField(
                "model", f"{name!r:.80} does not exist; this server has {self.facts.model!r}", 404, "model_not_found"
            )

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return self.tokenizer

    def check_size(self, characters: int, field: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before spending time and memory on tokenizing it."""
        most = self.facts.room * self.need_tokenizer().characters_per_token
        if characters > most:
            raise too_long(field, f"a text of {characters} characters has more than {self.facts.room} tokens")

    def check_tokens(self, tokens: int, field: str) -> None:
        if tokens > self.facts.room:
            raise too_long(field, f"it has {tokens} tokens; the limit is {self.facts.room}")

    def encode(self, prompts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        """Return prompts, given as texts or token ids, as token ids."""
        if not 0 < len(prompts) <= self.limits.prompts:
            raise InvalidField(field, f"must have 1 to {self.limits.prompts} prompts, got {len(prompts)}")
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_size(len(prompt), field)
        return [
            Prompt(tokens) for tokens in encode_prompts(prompts, self.tokenizer, self.facts.vocab_size, field, field)
        ]

    def render_conversation(
        self,
        messages: list[ChatMessage],
        tools: list[Tool] | None,
        choice: ToolChoice | None,
        variables: Mapping[str, Any] | None,
        effort: str | None = None,
        *,
        opens: bool = True,
        field: str = "messages",
        places: Sequence[str] = (),
    ) -> Prompt:
        """Return a conversation, checked and rendered. `opens`: add the opening of the next message."""
        plain = plain_messages(messages, self.limits, places, field)
        shown, _ = wanted_tools(tools, choice, self.limits)
        known = self.variables(variables)
        if effort is not None:
            known.setdefault("reasoning_effort", effort)
        return self._render(plain, shown or None, known, opens, field)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        opens: bool,
        field: str,
    ) -> Prompt:
        self.check_size(sum(len(str(message.get("content"))) for message in messages), field)
        tokens, positions = conversation.render(
            self.tokenizer,
            self.template,
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=opens,
            check=lambda text: self.check_size(len(text), field),
        )
        checked = checked_tokens(tokens, self.facts.vocab_size, field)
        return Prompt(checked, tuple(positions))

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the template variables of a request: names from a list, plain values."""
        for name, value in (given or {}).items():
            if name not in self._template_kwargs:
                known = ", ".join(self._template_kwargs)
                raise InvalidField(f"chat_template_kwargs.{name:.64}", f"is not allowed; allowed are {known}")
            if not isinstance(value, str | int | float | None) or len(str(value)) > 256:
                raise InvalidField(
                    f"chat_template_kwargs.{name}", "must be a short string, number, true, false or null"
                )
        return dict(given or {})


def too_long(field: str, what: str) -> InvalidField:
    return InvalidField(field, f"is too long: {what}", code="context_length_exceeded")
