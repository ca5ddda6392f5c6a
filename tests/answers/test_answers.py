"""What HTTP and `LLM` share: requests are built in one place, and answers are followed by one class."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fences
from tests.support.models import tiny_model
from weft.answers.followed import FollowedAnswer
from weft.answers.requests import ModelBounds, build_request
from weft.base.errors import InvalidField
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Output
from weft.engine.request import Request

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True, database=None)
BYTES = tiny_model.tokenizer()
BOUNDS = ModelBounds(vocab_size=259, max_length=100, end_tokens=frozenset({2}), has_text=True)


def followed(text: str, finish: FinishReason, cuts: list[int], **params) -> tuple[FollowedAnswer, str, bool]:
    """Feed the bytes of a text in batches that end at `cuts`; return the answer, its pieces, and who ended it."""
    request = Request(np.array([1], np.int32), SamplingParams(max_tokens=1000, **params))
    answer = FollowedAnswer(request, BYTES.detokenizer())
    outputs = [Output(0, byte, logprob=-1.0) for byte in text.encode()] + [Output(0, None, finish=finish)]
    ends = sorted({min(cut, len(outputs)) for cut in cuts} | {len(outputs)})
    pieces = [answer.take(outputs[start:end]) for start, end in zip([0, *ends], ends)]
    return answer, "".join(piece.text for piece in pieces), any(piece.stops_engine for piece in pieces)


@EXAMPLES
@given(st.text("abcé", max_size=20), st.lists(st.integers(0, 40), max_size=5), st.sampled_from(FinishReason))
def test_an_answer_does_not_depend_on_how_outputs_are_batched(text, cuts, finish):
    one, shown, _ = followed(text, finish, [], stop=("abc",), logprobs=0)
    other, again, _ = followed(text, finish, cuts, stop=("abc",), logprobs=0)
    assert shown == again == one.answer.text
    assert (one.finish, one.answer.tokens, one.text_ends) == (other.finish, other.answer.tokens, other.text_ends)
    assert len(one.outputs) == len(one.text_ends) == one.generated
    assert one.finish is (FinishReason.STOP if "abc" in text else finish)


def test_a_stop_string_ends_the_engines_sequence_unless_that_has_ended():
    answer, shown, stops_engine = followed("xabcyz", FinishReason.LENGTH, [4, 5], stop=("abc",))
    assert (shown, answer.finish, answer.generated, stops_engine) == ("x", FinishReason.STOP, 4, True)
    # In one batch with the engine's own end, nothing is left to be ended.
    answer, shown, stops_engine = followed("xabcyz", FinishReason.LENGTH, [], stop=("abc",))
    assert (shown, answer.finish, stops_engine) == ("x", FinishReason.STOP, False)


def test_outputs_are_kept_only_for_log_probabilities():
    answer, _, _ = followed("abc", FinishReason.STOP, [1, 2])
    assert (answer.outputs, answer.text_ends, answer.generated) == ([], [], 3)


@pytest.mark.parametrize(
    ("length", "params", "field"),
    [
        (100, {"max_tokens": 1}, "input_ids"),
        (90, {"max_tokens": 11}, "max_tokens"),
        (9, {"max_tokens": 9, "stop_token_ids": (259,)}, "stop_token_ids"),
        (9, {"max_tokens": 9, "logit_bias": {300: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_that_does_not_fit_the_model_names_the_field(length, params, field):
    with pytest.raises(InvalidField) as caught:
        build_request(np.ones(length, np.int32), SamplingParams(**params), BOUNDS, field="input_ids")
    assert caught.value.field == field


def test_a_request_ends_at_the_models_tokens_unless_they_are_ignored():
    prompt = np.array([5, 2, 6], np.int32)
    own = SamplingParams(stop_token_ids=(7,), max_tokens=9)
    built = build_request(prompt, own, BOUNDS, snapshots=[3, 1, 3])
    assert (built.stop_tokens, built.boundaries, built.snapshots) == ({2, 7}, (2,), (1, 3))
    assert build_request(prompt, SamplingParams(ignore_eos=True, max_tokens=9), BOUNDS).stop_tokens == frozenset()


def makers(name: str, modules: dict[str, str]) -> set[str]:
    """Return the modules that create a value of this class, or of another one of its name that is not HTTP's."""
    return {
        module
        for module, text in modules.items()
        if f"from starlette.requests import {name}" not in text
        for node in fences.nodes(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    }


def test_requests_are_built_and_answers_are_followed_in_one_place():
    weft = fences.sources("weft")
    # Warming repeats what was built here before, a prefill engine gets the beginning of it, and what a file says of a
    # prompt is computed again.
    rebuilding = {"weft.fleet.warming", "weft.fleet.pairing", "weft.engine.saved.verification"}
    assert makers("Request", weft) == {"weft.answers.requests", *rebuilding}
    assert makers("Answer", weft) == {"weft.answers.followed"}
    assert makers("Request", {"weft.server.front": "x = engine.Request(1)"})
