"""Prompts in files for `LLM` and `AsyncLLM`: the keys that sign them, and what a loaded one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import RequestError
from weft.base.options import Options, verified_share
from weft.base.prefix_keys import PrefixKey, check_signature, read_prefix_keys, read_signing_key, sign
from weft.memory.tiers.disk.prefix_file import TOKEN_BYTES, read_head

AnyPath = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class LoadedPrompt:
    """A prompt that was loaded from a file: pass its tokens, and more behind them.

    Of the tokens, the first `cached_tokens` need not be computed; `verified_tokens` were computed again to compare.
    """

    prompt_token_ids: list[int]
    cached_tokens: int
    verified_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a program: one that signs, and those that it trusts."""

    own: PrefixKey | None
    trusted: tuple[PrefixKey, ...]
    share: float

    @classmethod
    def of(cls, options: Options) -> PromptKeys:
        own, trusted = options.prefix_key, options.trusted_prefix_keys
        return cls(
            None if own is None else read_signing_key("prefix_key", own),
            () if trusted is None else read_prefix_keys("trusted_prefix_keys", trusted),
            verified_share(options.verify_import),
        )

    def sign(self, path: Path) -> None:
        assert self.own is not None
        with path.open("r+b") as file:
            sign(file, self.own)

    def check_can_save(self) -> None:
        if self.own is None:
            raise RequestError("saving a prompt needs prefix_key, a file with the key that signs it")

    def check(self, path: Path) -> None:
        """Raise unless a trusted key has signed a file."""
        if not self.trusted:
            raise RequestError("loading a prompt needs trusted_prefix_keys, a file with keys whose signatures count")
        try:
            with path.open("rb") as file:
                check_signature(file, self.trusted)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None

    def loaded(self, path: Path, found: Mapping[str, Any]) -> LoadedPrompt:
        """Return a prompt that the engine has loaded."""
        with path.open("rb") as file:
            head = read_head(file, str(path))
            assert head.tokens is not None
            file.seek(-TOKEN_BYTES * head.tokens.tokens, 2)
            tokens = np.frombuffer(file.read(), "<i4").tolist()
        return LoadedPrompt(tokens, found["cached_tokens"], found["verified_tokens"])
