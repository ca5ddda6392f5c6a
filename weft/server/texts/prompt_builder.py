"""Turns client text into prompts: sizes, tokens, rendered conversations. Needs no engine, so a worker can do it.

Work that costs more than its size in bytes suggests happens only here; `body_reader.py` decides in which process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from weft.answers.requests import NO_TEXT
from weft.base.errors import InvalidField, RequestError
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.base.vectors import VectorFacts
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items, depth_of
from weft.server.texts.openai_messages import (
    ChatMessage,
    Tool,
    ToolChoice,
    plain_messages,
    retained_seconds,
    wanted_tools,
)
from weft.server.texts.schemas import PredictedContent, SamplingFields
from weft.text import conversation
from weft.text.bad_words import token_sequences
from weft.text.infill import Infill
from weft.text.last_tokens import start_of_last
from weft.text.prompts import NO_TOKENIZER, Tokens, checked_tokens, encode_prompts
from weft.text.template import RESERVED, ChatTemplate, Message
from weft.text.tokenizer import Tokenizer

# Characters of the name of a template variable.
MAX_VARIABLE = 64
# What an engine has that says nothing of them.
NO_VECTORS = VectorFacts(0, refused="its engine reports none")
# The tag of a model in Ollama's API; there is no other.
LATEST = ":latest"


class PromptFacts(msgspec.Struct, frozen=True):
    """The engine's facts about prompts. `room` is the maximum number of tokens of a sequence.

    `aliases` are further names of the model.
    """

    model: str
    vocab_size: int
    max_length: int
    room: int
    aliases: tuple[str, ...] = ()
    vectors: VectorFacts | None = None

    def is_model(self, name: str) -> bool:
        """Return whether the model has this name. Ollama's clients may add a tag to it."""
        return name.removesuffix(LATEST) in (self.model, *self.aliases) or name in (self.model, *self.aliases)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the positions in them that the client declared worth keeping, and the answer that it expects.

    What is before these positions is retained for `retain_seconds`.
    """

    tokens: Tokens
    snapshots: tuple[int, ...] = ()
    prediction: Tokens | None = None
    retain_seconds: float = 0.0

    def retained(self, seconds: float | None) -> tuple[Retain, ...]:
        """Return what is retained of the prompt, and of its answer too if the request asks for that itself."""
        marked = tuple(Retain(self.retain_seconds, position) for position in self.snapshots if self.retain_seconds)
        return marked if seconds is None else (*marked, Retain(seconds))

    def last(self, count: int | None) -> Prompt:
        """Return the last `count` tokens as a prompt; None: all of them."""
        cut = 0 if count is None else max(0, len(self.tokens) - count)
        if not cut:
            return self
        snapshots = tuple(position - cut for position in self.snapshots if position > cut)
        return replace(self, tokens=self.tokens[cut:].copy(), snapshots=snapshots)


class PromptBuilder:
    """`facts` are set before each use: a restarted engine may have others."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        limits: Limits,
        strict_fields: bool,
        facts: PromptFacts,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits
        self.facts = facts
        self.strict_fields = strict_fields

    def check_model(self, name: str | None) -> None:
        if name is not None and not self.facts.is_model(name):
            raise InvalidField(
                "model", f"{name!r:.80} does not exist; this server has {self.facts.model!r}", 404, "model_not_found"
            )

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return self.tokenizer

    @property
    def vectors(self) -> VectorFacts:
        """What embeddings and classes the model has."""
        return self.facts.vectors or NO_VECTORS

    def check_size(self, characters: int, field: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before spending time and memory on tokenizing it."""
        most = self.facts.room * self.need_tokenizer().characters_per_token
        if characters > most:
            raise too_long(field, f"a text of {characters} characters has more than {self.facts.room} tokens")

    def check_tokens(self, tokens: int, field: str) -> None:
        if tokens > self.facts.room:
            raise too_long(field, f"it has {tokens} tokens; the limit is {self.facts.room}")

    def kept_tokens(self, asked: int | None, max_tokens: int | None) -> int | None:
        """Return how many tokens at the end of a prompt to keep; None: all. -1 keeps what fits beside the answer."""
        if asked != -1:
            return asked
        return max(1, self.facts.room - max(1, max_tokens or 0))

    def first_tokens(self, text: str, count: int) -> str:
        """Return the beginning of a text that has at most `count` tokens."""
        if len(text) <= count:
            return text
        tokenizer = self.need_tokenizer()
        # No token has more characters, so the rest is not worth the time to tokenize it.
        begun = text[: (count + 1) * tokenizer.characters_per_token]
        ends = tokenizer.ends(begun)[:count]
        return begun[: ends[-1]] if ends else begun

    def encode(
        self, prompts: Sequence[str | list[int]], field: str, keep: int | None = None, most: int | None = None
    ) -> list[Prompt]:
        """Return prompts, given as texts or token ids, as token ids: all of them, or the last `keep` of each.

        There may be as many as a body may have, or `most`.
        """
        most = self.limits.prompts if most is None else most
        if not 0 < len(prompts) <= most:
            raise InvalidField(field, f"must have 1 to {most} prompts, got {len(prompts)}")
        if keep is None:
            for prompt in prompts:
                if isinstance(prompt, str):
                    self.check_size(len(prompt), field)
        else:
            prompts = [self._last_part(each, keep) if isinstance(each, str) else each for each in prompts]
        found = encode_prompts(prompts, self.tokenizer, self.facts.vocab_size, field, field)
        return [Prompt(tokens).last(keep) for tokens in found]

    def infill(
        self,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
        field: str = "suffix",
    ) -> Prompt:
        """Return the prompt for what belongs between two texts, and begins with `begun`.

        `files` are names and texts of other files.
        """
        tokenizer = self.need_tokenizer()
        infill = Infill.of(tokenizer)
        if infill is None:
            raise InvalidField(field, "needs a model with fill-in-the-middle tokens, and this one has none")
        texts = [prefix, suffix, begun, *(text for pair in files for text in pair)]
        self.check_size(sum(map(len, texts)), field)
        tokens = infill.tokens(tokenizer, prefix, suffix, files) + tokenizer.encode(begun, special=False)
        return Prompt(checked_tokens(tokens, self.facts.vocab_size, field))

    def _last_part(self, text: str, keep: int) -> str:
        """Return the end of a text that has its last tokens; the rest is not worth the time to tokenize it."""
        return text[start_of_last(self.need_tokenizer(), text, self._useful(keep)) :]

    def _useful(self, keep: int) -> int:
        """Return how many of the tokens to keep are worth finding: with more than fit, the prompt is refused."""
        return min(keep, self.facts.room + 1)

    def predict(self, prediction: PredictedContent | None) -> Tokens | None:
        """Return a predicted answer as token ids, up to the first one that the model does not have."""
        if prediction is None:
            return None
        text = prediction.text
        self.check_size(len(text), "prediction")
        ids = np.array(self.need_tokenizer().encode(text, special=False), np.int32)
        unknown = np.flatnonzero(ids >= self.facts.vocab_size)
        return ids[: unknown[0]] if len(unknown) else ids

    def render_conversation(
        self,
        messages: list[ChatMessage],
        tools: list[Tool] | None,
        choice: ToolChoice | None,
        variables: Mapping[str, Any] | None,
        effort: str | None = None,
        *,
        opens: bool = True,
        continues: bool = False,
        keep: int | None = None,
        field: str = "messages",
        places: Sequence[str] = (),
    ) -> Prompt:
        """Return a conversation, checked and rendered: all of it, or the last `keep` tokens.

        `opens`: add the opening of the next message. `continues`: end within the last message instead.
        """
        if not self.vectors.generates:
            raise RequestError(NO_TEXT)
        plain = plain_messages(messages, self.limits, places, field)
        shown, _ = wanted_tools(tools, choice, self.limits)
        known = self.variables(variables)
        if effort is not None:
            known.setdefault("reasoning_effort", effort)
        found = self._render(plain, shown or None, known, opens, continues, field, keep)
        return replace(found, retain_seconds=retained_seconds(messages, field))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        opens: bool,
        continues: bool,
        field: str,
        keep: int | None,
    ) -> Prompt:
        def check(characters: int) -> None:
            if keep is None:
                self.check_size(characters, field)

        check(sum(len(str(message.get("content"))) for message in messages))
        tokens, positions = conversation.render(
            self.tokenizer,
            self.template,
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=opens,
            continue_final_message=continues,
            check=lambda text: check(len(text)),
            keep=None if keep is None else self._useful(keep),
        )
        checked = checked_tokens(tokens, self.facts.vocab_size, field)
        return Prompt(checked, tuple(positions)).last(keep)

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the template variables of a request: bounded JSON, under names that rendering does not set itself."""
        field, known = "chat_template_kwargs", dict(given or {})
        if not known:
            return known
        size, most = len(json.dumps(known)), self.limits.template_kwargs_bytes
        if size > most:
            raise InvalidField(field, f"has {size} bytes; the limit is {most}")
        if depth_of(known) > self.limits.template_kwargs_depth:
            raise InvalidField(field, f"is nested more than {self.limits.template_kwargs_depth} levels deep")
        for name in known:
            if not name.isidentifier() or len(name) > MAX_VARIABLE:
                raise InvalidField(field, f"must have names of up to {MAX_VARIABLE} letters, digits and underscores")
            if self.template is not None and name in self.template.reserved:
                raise InvalidField(f"{field}.{name}", RESERVED)
        return known

    def ban(self, fields: SamplingFields) -> None:
        """Replace the bad words of a body by their tokens."""
        if fields.bad_words:
            check_items("bad_words", fields.bad_words, self.limits.bad_words)
            words = tuple(word if isinstance(word, str) else tuple(word) for word in fields.bad_words)
            checked = SamplingParams(bad_words=words).bad_words
            fields.bad_words = [list(word) for word in token_sequences(checked, self.tokenizer)]


def too_long(field: str, what: str) -> InvalidField:
    return InvalidField(field, f"is too long: {what}", code="context_length_exceeded")
