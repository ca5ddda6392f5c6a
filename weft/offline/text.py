"""The tokenizer as scripts know it from transformers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.base.errors import RequestError
from weft.text.conversation import NO_TEMPLATE
from weft.text.template import ChatTemplate, Message
from weft.text.tokenizer import Tokenizer


class TextTokenizer:
    """Encodes and decodes texts, and renders conversations. Special tokens are attributes, such as `eos_token`."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": self._tokenizer.encode_all(text, add_special_tokens)}

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        tokens = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(tokens, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def tokenize(self, text: str) -> list[str]:
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them; unknown ones are empty."""
        return [self._tokenizer.backend.id_to_token(each) or "" for each in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each; None for unknown ones."""
        if isinstance(tokens, str):
            return self._tokenizer.backend.token_to_id(tokens)
        return [self._tokenizer.backend.token_to_id(each) for each in tokens]

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.backend.get_vocab(with_added_tokens=True))

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Return a conversation as token ids, or as text. Further arguments are variables of the template."""
        if self._template is None:
            raise RequestError(NO_TEMPLATE)
        text = self._template.render(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.size

    def __len__(self) -> int:
        return self._tokenizer.size

    def __getattr__(self, name: str) -> Any:
        """Return a special token by its name (`eos_token`, `eos_token_id`), None if the model has none."""
        if not name.removesuffix("_id").endswith("_token"):
            raise AttributeError(f"the tokenizer has no {name!r}")
        token = self._tokenizer.specials.get(name.removesuffix("_id"))
        if token is None or not name.endswith("_id"):
            return token
        return self._tokenizer.backend.token_to_id(token)
