"""Fill-in-the-middle prompts: each family's tokens in its order, and none for models without them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from tests.support.models import tiny_model
from weft.text.infill import HOLES, SPELLINGS, Infill
from weft.text.tokenizer import Tokenizer


def tokenizer(*names: str) -> Tokenizer:
    plain = tiny_model.tokenizer()
    plain.backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(plain.backend, plain.specials)


def written(names: tuple[str, ...], *files: tuple[str, str]) -> str:
    found = tokenizer(*names)
    infill = Infill.of(found)
    assert infill is not None
    return found.decode(infill.tokens(found, "before", "after", files), skip_special=False)


@pytest.mark.parametrize("names", [*SPELLINGS, *HOLES])
def test_prefix_suffix_and_middle_are_marked_in_order(names):
    prefix, suffix, middle = names
    assert written(names) == f"{prefix}before{suffix}after{middle}"


def test_a_model_that_reads_the_suffix_first_continues_the_prefix():
    assert written(("[PREFIX]", "[SUFFIX]")) == "[SUFFIX]after[PREFIX]before"


def test_other_files_come_first_with_their_names():
    qwen = (*SPELLINGS[0], "<|file_sep|>")
    assert written(qwen, ("a.py", "x = 1")).startswith("<|file_sep|>a.py\nx = 1\n<|fim_prefix|>before")
    assert written(SPELLINGS[0], ("a.py", "x = 1")).startswith("a.py\nx = 1\n<|fim_prefix|>before")


def test_a_model_without_all_of_the_tokens_has_no_format():
    assert Infill.of(tokenizer()) is None
    assert Infill.of(tokenizer("<|fim_prefix|>", "<|fim_suffix|>")) is None
