"""Truncating a prompt keeps the last tokens of the whole text without tokenizing the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.models import tiny_model
from weft.builtin import FOLDER
from weft.server.settings import Limits
from weft.server.texts.prompt_builder import PromptBuilder, PromptFacts
from weft.text import conversation
from weft.text.last_tokens import LEAST_CHARACTERS, start_of_last
from weft.text.patterns import LINEAR
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 2024; 12345 boxes!",
    "Der Fluß, 河流很长。la rivière und 🌊🌊 — naïve café\n\n    def f(x):\n        return x\n",
    "aaaa bbbb aaaa the the there then    spaces   and\ttabs\r\nlines",
] * 4
SPECIALS = ["<s>", "</s>", "<|end of text|>"]


def trained(model: str, pre: object, normalizer: object = None) -> Tokenizer:
    made = {
        "bpe": lambda: (models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
        "unigram": lambda: (models.Unigram(), trainers.UnigramTrainer),
        "word piece": lambda: (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
    }
    found, trainer = made[model]()
    backend = tokenizers.Tokenizer(found)
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    more = {"unk_token": "<unk>"} if model == "unigram" else {}
    backend.train_from_iterator(
        CORPUS,
        trainer(
            vocab_size=600,
            special_tokens=["<unk>", *SPECIALS],
            initial_alphabet=alphabet,
            show_progress=False,
            **more,
        ),
    )
    if "ByteLevel" in repr(pre):
        backend.decoder = decoders.ByteLevel()
    # A token of two words, one that takes the spaces around it, and one that is long.
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("WIDE", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("extraordinarily")])
    return Tokenizer(backend)


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


KINDS = {
    "built-in": lambda: load_tokenizer(FOLDER),
    "bytes": lambda: tiny_model.tokenizer(),
    "byte-level": lambda: trained("bpe", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    **{name: lambda pattern=pattern: trained("bpe", by_pattern(pattern)) for name, pattern in LINEAR.items()},
    "metaspace": lambda: trained("bpe", pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": lambda: trained("bpe", pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unigram": lambda: trained("unigram", pre_tokenizers.Metaspace(), normalizers.NFKC()),
    "word piece": lambda: trained("word piece", pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "stripped": lambda: trained("word piece", pre_tokenizers.Whitespace(), normalizers.Strip()),
    "llama 2": lambda: trained(
        "bpe", None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
}
_made: dict[str, Tokenizer] = {}


def of_kind(kind: str) -> Tokenizer:
    if kind not in _made:
        _made[kind] = KINDS[kind]()
    return _made[kind]


PIECES = [
    "the ",
    "quick",
    "fox",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "aaa",
    "河流很长",
    "。",
    "🌊",
    "é",
    "e\u0301",
    "12345",
]
PIECES += ["extraordinarily", "two words", " WIDE ", "it's", "'s", "--", ", ", "Ab", "x = y", "\r\n", *SPECIALS]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A text of some blocks, each a few pieces in a random order, many times over."""
    blocks = draw(st.lists(st.lists(st.sampled_from(PIECES), min_size=2, max_size=12), min_size=1, max_size=4))
    joint = draw(st.sampled_from([" ", "", ". "]))
    text = ""
    for block in blocks:
        part = joint.join(block) + " over the hill "
        text += part * draw(st.integers(1, 2 + 3 * LEAST_CHARACTERS // len(part)))
    return text


@pytest.mark.parametrize("special", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(text=texts(), keep=st.sampled_from([1, 2, 10, 100, 1000, 5000]))
@example(text="the quick brown fox " * 500, keep=10)
@example(text="the fox, two words WIDE " * 500, keep=100)
@example(text="河流很长。" * 2000, keep=50)
@example(text="    return x\n" * 1000, keep=50)
@example(text="extraordinarilyextraordinarily " * 500, keep=50)
def test_the_last_tokens_are_those_of_the_whole_text(kind, special, text, keep):
    tokenizer = of_kind(kind)
    whole = tokenizer.encode(text, special)
    # As many as the first attempt finds, where it matters most which place it began at.
    edge = len(tokenizer.encode(text[-LEAST_CHARACTERS:], special))
    for count in (keep, edge - 1, edge, edge + 1):
        start = start_of_last(tokenizer, text, count, special)
        assert tokenizer.encode(text[start:], special)[-count:] == whole[-count:]


class Counting(Tokenizer):
    """Counts the characters that it tokenizes."""

    characters = 0

    def encode_all(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_all(texts, special)


def counting(kind: str = "built-in") -> Counting:
    return Counting(of_kind(kind).backend)


@pytest.mark.parametrize("text", ["the quick brown fox ", "a", " ", "河", "\n", "ab"])
def test_a_long_text_costs_what_is_kept_of_it_and_not_what_it_has(text):
    costs = []
    for size in (1 << 20, 8 << 20):
        tokenizer = counting()
        start = start_of_last(tokenizer, text * (size // len(text)), 10)
        assert start > 0
        costs.append(tokenizer.characters)
    assert max(costs) < 16 * LEAST_CHARACTERS


def test_a_text_whose_tokens_depend_on_its_beginning_is_cut_all_the_same():
    """A run of one letter has no border: which letters share a token depends on how many stand before them."""
    tokenizer = counting("byte-level")
    text = "a" * (1 << 20) + "!"
    start = start_of_last(tokenizer, text, 10)
    tokens = tokenizer.encode(text[start:])
    assert start > 0
    assert len(tokens) > 10
    assert text.endswith(tokenizer.decode(tokens[-10:]))


def test_special_tokens_around_a_prompt_stay_where_they_were():
    tokenizer = trained("bpe", pre_tokenizers.ByteLevel())
    tokenizer.backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    text = "over the hill " * 5000
    whole = tokenizer.encode(text)
    assert (whole[0], whole[-1]) == (1, 2)
    last = tokenizer.encode(text[start_of_last(tokenizer, text, 20) :])[-20:]
    assert last == whole[-20:]
    assert 1 not in last


def builder(tokenizer: Tokenizer, room: int = 2048) -> PromptBuilder:
    facts = PromptFacts("m", tokenizer.size, room, room)
    template = ChatTemplate(
        "{% for message in messages %}<s>{{ message.role }}\n{{ message.content if message.content is string else "
        "message.content | map(attribute='text') | join }}</s>\n{% endfor %}<s>assistant\n",
        {},
    )
    return PromptBuilder(tokenizer, template, Limits(), False, facts)


def test_prompts_and_conversations_are_cut_without_being_tokenized_whole():
    tokenizer = counting()
    text = "over the hill " * 100_000
    whole = tokenizer.encode(text)
    tokenizer.characters = 0
    [prompt] = builder(tokenizer).encode([text], "prompt", 10)
    assert prompt.tokens.tolist() == whole[-10:]
    # More than fits is refused anyway.
    assert len(builder(tokenizer, 50).encode([text], "prompt", 1 << 30)[0].tokens) > 50
    assert tokenizer.characters < len(text) // 10


def test_declared_points_of_a_conversation_are_found_in_what_remains():
    def part(text: str) -> dict:
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}

    messages = [
        {"role": "system", "content": [part("over the hill " * 6000)]},
        {"role": "user", "content": [part("and far away "), part("to the sea. "), {"type": "text", "text": "Why?"}]},
    ]
    tokenizer = counting()
    made = builder(tokenizer)
    whole, positions = conversation.render(tokenizer, made.template, messages)
    tokens, found = conversation.render(tokenizer, made.template, messages, keep=20)
    assert len(tokens) < len(whole)
    assert tokens[-20:] == whole[-20:]
    assert len(positions) == 3
    cut = len(whole) - len(tokens)
    assert found == [position - cut for position in positions if position > cut]
    assert len(found) == 3
