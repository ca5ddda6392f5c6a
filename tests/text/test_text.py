"""Text in and out: detokenizer, stop strings, tokenizer files, prompts, chat templates."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from tests.support.text.folders import BYTES, folder_with
from tests.support.texts import texts
from weft.answers.requests import ModelBounds, build_request
from weft.base.errors import ModelError, RequestError
from weft.base.sampling import SamplingParams
from weft.text.answer import Answer
from weft.text.detokenizer import WindowDetokenizer
from weft.text.prompts import as_list, check_snapshots, encode_prompts
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer, end_tokens, load_tokenizer

# With characters that the alphabet of bytes does not have.
END = "<\uff5cend\uff5c>"
TEXT = "Der Fluß, 河, la rivière und 🌊🌊 — naïve café\n\n" * 3


def byte_level() -> Tokenizer:
    """A trained byte-level tokenizer, so that tokens hold pieces of characters, characters and words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", END])
    backend.train_from_iterator([TEXT], trainer)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": END})


def sentence_piece() -> Tokenizer:
    """The decoder of the Llama 2 and Gemma kind: marks for spaces, and bytes that have no piece of their own."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "é", "▁▁"]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("▁▁", special=False, normalized=False)])
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    """A decoder that is not piece by piece: it goes through the window."""
    words = ["[UNK]", "river", "##s", "run", "##ning", ",", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


LEVEL, PIECES, WORDS = byte_level(), sentence_piece(), word_piece()


def pieces_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.feed, tokens), detokenizer.flush()]


# detokenizer ----------------------------------------------------------------------------------------------------------


@given(texts())
def test_streamed_text_is_the_text_and_never_half_a_character(text):
    for tokenizer in (BYTES, LEVEL):
        pieces = pieces_of(tokenizer, tokenizer.encode(text, special=False))
        assert "".join(pieces) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 299)))
def test_arbitrary_tokens_stream_to_what_the_library_decodes_at_once(tokens):
    for tokenizer in (BYTES, LEVEL):
        known = [token for token in tokens if token < tokenizer.size]
        assert "".join(pieces_of(tokenizer, known)) == tokenizer.backend.decode(known)
        assert tokenizer.decode(known) == tokenizer.backend.decode(known)


@given(st.lists(st.integers(258, 263)))
def test_marks_become_spaces_as_in_the_library(tokens):
    # Behind another word the library strips nothing from the start.
    lead = PIECES.backend.token_to_id("s")
    assert "s" + "".join(pieces_of(PIECES, tokens)) == PIECES.backend.decode([lead, *tokens])


@given(texts(max_size=20))
def test_byte_pieces_make_whole_characters(text):
    tokens = [PIECES.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = pieces_of(PIECES, tokens)
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


@given(st.lists(st.integers(0, 6), max_size=40))
def test_the_window_streams_what_the_library_decodes_at_once(tokens):
    assert isinstance(WORDS.detokenizer(), WindowDetokenizer)
    assert "".join(pieces_of(WORDS, tokens)) == WORDS.backend.decode(tokens)


def test_an_unfinished_character_is_shown_as_replaced_at_the_end():
    assert pieces_of(BYTES, list("é".encode())[:1]) == ["", "\ufffd"]


def test_special_and_unknown_tokens_show_nothing_unless_asked_for():
    end = LEVEL.backend.token_to_id(END)
    assert LEVEL.decode([end, 100_000]) == ""
    assert LEVEL.decode([end], skip_special=False) == END


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    """Bytes that never complete a character: a window that waits for its end would grow without bound."""
    detokenizer = BYTES.detokenizer()
    texts = [detokenizer.feed(0x80) for _ in range(10_000)]
    assert texts == ["\ufffd"] * 10_000
    window = WindowDetokenizer(BYTES.backend, frozenset())
    assert sum(len(window.feed(0x80)) for _ in range(1000)) + len(window.flush()) == 1000
    assert len(window._context) + len(window._pending) < 20


# stop strings ---------------------------------------------------------------------------------------------------------


def plain_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab\n", max_size=30)
stop_sets = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=300)
@given(letters, stop_sets, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_do_not_depend_on_where_the_text_was_cut(text, stops, include, cuts):
    watch = StopStrings(stops, include)
    shown = ""
    expected, stop = plain_stop(text, stops, include)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for low, high in pairwise(places):
        shown += watch.feed(text[low:high])
        # What was shown is never taken back, and only a possible stop string is withheld.
        assert expected.startswith(shown)
        if watch.found is None:
            withheld = text[len(shown) : high]
            assert withheld == "" or any(stop.startswith(withheld) for stop in stops)
    if watch.found is None:
        shown += watch.flush()
    assert (shown, watch.found) == (expected, stop)


def test_a_long_repetitive_stop_string_costs_no_more_than_its_text():
    watch = StopStrings(("a" * 1023 + "b",) * 16)
    assert sum(len(watch.feed("a" * 10)) for _ in range(2000)) == 20_000 - 1023


# answers --------------------------------------------------------------------------------------------------------------


def answer_of(text: str, end_tokens=(), **params) -> tuple[Answer, list[str]]:
    answer = Answer(SamplingParams(**params), BYTES.detokenizer(), end_tokens)
    shown = []
    for byte in text.encode():
        shown.append(answer.feed(byte))
        if answer.stopped:
            return answer, shown
    return answer, [*shown, answer.finish()]


def test_an_answer_ends_before_its_stop_string_and_keeps_all_tokens():
    answer, shown = answer_of("one END two", stop="END")
    assert ("".join(shown), answer.text, answer.stop_reason) == ("one ", "one ", "END")
    assert answer.tokens == list(b"one END")


def test_an_answer_includes_its_stop_string_if_asked_to():
    assert answer_of("one END two", stop="END", include_stop=True)[0].text == "one END"


def test_a_stop_string_does_not_count_before_min_tokens():
    answer, _ = answer_of("END or END", stop="END", min_tokens=5)
    assert (answer.text, answer.stop_reason) == ("END or ", "END")


def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end():
    assert answer_of("one EN", stop="END")[0].text == "one EN"


def test_a_stop_token_is_told_and_not_shown():
    answer = Answer(SamplingParams(stop_token_ids=(65,)), BYTES.detokenizer(), frozenset({65, 257}))
    assert (answer.feed(66), answer.feed(65), answer.finish(), answer.stop_reason) == ("B", "", "", 65)
    shown = Answer(SamplingParams(stop_token_ids=(65,), include_stop=True), BYTES.detokenizer(), frozenset({65}))
    assert (shown.feed(65), shown.stop_reason) == ("A", 65)
    own_end = Answer(SamplingParams(), BYTES.detokenizer(), frozenset({257}))
    assert (own_end.feed(257), own_end.stop_reason, own_end.tokens) == ("", None, [257])


def test_without_a_tokenizer_an_answer_has_tokens_only():
    answer = Answer(SamplingParams(), None)
    assert (answer.feed(7), answer.finish(), answer.tokens) == ("", "", [7])


# tokenizer files ------------------------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_special_tokens_come_from_the_configuration_and_the_post_processor(tmp_path):
    backend = tokenizers.Tokenizer.from_str(LEVEL.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(3)
    folder = folder_with(
        tmp_path,
        tokenizer=backend.to_str(),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": END},
        generation_config={"eos_token_id": [7, 9]},
        config={"eos_token_id": 3},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.specials == {"bos_token": "<s>", "eos_token": END}
    assert tokenizer.end_tokens == {7, 9, tokenizer.backend.token_to_id(END)}
    assert tokenizer.encode("the river, the river")[0] == 0
    assert tokenizer.encode("the river", special=False)[0] != 0
    assert tokenizer.decode(tokenizer.encode("the river, the river")) == "the river, the river"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 3}}, {3}),
        ({"config": {"text_config": {"eos_token_id": [3, 4]}}}, {3, 4}),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": 3}, "generation_config": {"temperature": 1}}, {3}),
    ],
)
def test_the_end_of_an_answer_is_read_where_it_is_stated(tmp_path, files, expected):
    assert end_tokens(folder_with(tmp_path, **files)) == expected


def test_broken_files_are_errors_that_name_them(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder_with(tmp_path, tokenizer="{}"))
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        end_tokens(folder_with(tmp_path, config="{"))


# prompts --------------------------------------------------------------------------------------------------------------


def test_prompts_of_every_form_become_token_ids():
    found = encode_prompts(as_list(["Aé", [1, 2], np.array([3], np.int64)]), BYTES, 259)
    assert [tokens.tolist() for tokens in found] == [[65, 195, 169], [1, 2], [3]]
    assert all(tokens.dtype == np.int32 for tokens in found)
    assert encode_prompts(as_list([]), BYTES, 259) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"prompts\[1\] is empty"),
        ("", "prompt is empty"),
        ([[1], [2, 259]], r"prompts\[1\]\[1\] is token id 259; the vocabulary has ids 0 to 258"),
        ([-1], r"prompt\[0\] is token id -1"),
        ([[1.5]], "prompt must be a string or a list of token ids"),
        ([[[1], [2]]], "prompt must be a string or a list of token ids"),
        ([[1], None], r"prompts\[1\] must be a string or a list"),
        (7, "prompts must be a string, a list of token ids, or a list of those"),
        (b"bytes", "prompts must be a string"),
        ("\ud800", "half of a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompts, message):
    with pytest.raises(RequestError, match=message):
        encode_prompts(as_list(prompts), BYTES, 259)


def test_text_without_a_tokenizer_is_refused_and_token_ids_are_not():
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        encode_prompts(["text"], None, 259)
    assert encode_prompts([[5]], None, 259)[0].tolist() == [5]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 91}, "prompt has 10 tokens; with max_tokens=91 it exceeds the context of 100"),
        ({"max_tokens": 9, "stop_token_ids": (300,)}, "stop_token_ids has token id 300"),
        ({"max_tokens": 9, "logit_bias": {300: 1.0}}, "logit_bias has token id 300"),
        ({"max_tokens": 9, "stop": "x"}, "stop takes strings"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused_by_name(params, message):
    with pytest.raises(RequestError, match=message):
        build_request(np.zeros(10, np.int32), SamplingParams(**params), ModelBounds(259, 100, frozenset(), False))


def test_snapshots_are_positions_within_the_prompt():
    assert check_snapshots([5, 3, 5], 5) == (3, 5)
    for wrong in (0, 6, True, "3"):
        with pytest.raises(RequestError, match="snapshots must be positions from 1"):
            check_snapshots([wrong], 5)


def test_text_imports_without_torch():
    names = "answer, detokenizer, prompts, stops, template, tokenizer"
    code = f"import sys; from weft.text import {names}; import weft.builtin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
