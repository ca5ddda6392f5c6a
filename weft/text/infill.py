"""Fill-in-the-middle prompts: the text between a prefix and a suffix, in the tokens that a model was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.text.tokenizer import Tokenizer

# Spellings of the tokens before prefix, suffix and middle, by the families that have them.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<|fim_pre|>", "<|fim_suf|>", "<|fim_mid|>"),  # LFM2
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# DeepSeek marks the hole between prefix and suffix, and the end of the suffix, between full-width bars.
BAR = "\uff5c"
HOLES = ((f"<{BAR}fim▁begin{BAR}>", f"<{BAR}fim▁hole{BAR}>", f"<{BAR}fim▁end{BAR}>"),)
# Mistral's models read the suffix first, and continue the prefix.
SUFFIX_FIRST = (("[PREFIX]", "[SUFFIX]"),)
FILE = ("<|file_sep|>", "<filename>")


@dataclass(frozen=True, slots=True)
class Infill:
    """Token ids before the prefix, before the suffix and after both; None where the format has none.

    `file` begins another file, whose name is the first line.
    """

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool = False
    file: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """Return the format of a tokenizer, or None if it has no tokens for it."""
        file = next((found for name in FILE if (found := token_of(tokenizer, name)) is not None), None)
        for spelling in (*SPELLINGS, *HOLES):
            prefix, suffix, middle = (token_of(tokenizer, name) for name in spelling)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle, file=file)
        for names in SUFFIX_FIRST:
            prefix, suffix = (token_of(tokenizer, name) for name in names)
            if prefix is not None and suffix is not None:
                return cls(prefix, suffix, None, suffix_first=True, file=file)
        return None

    def tokens(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Return the prompt. Without a token for files, they are written before the prefix as plain text."""
        shown = tokenizer.encode("")
        for name, text in files:
            mark = [] if self.file is None else [self.file]
            shown += [*mark, *tokenizer.encode(f"{name}\n{text}\n", special=False)]
        before, after = (tokenizer.encode(text, special=False) for text in (prefix, suffix))
        if self.suffix_first:
            return [*shown, self.suffix, *after, self.prefix, *before]
        ending = [] if self.middle is None else [self.middle]
        return [*shown, self.prefix, *before, self.suffix, *after, *ending]


def token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a token that is spelled exactly like this; some models do not mark theirs as special."""
    found = tokenizer.backend.token_to_id(text)
    return None if found is None else int(found)
