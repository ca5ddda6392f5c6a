"""Answers that must follow a grammar do, at any depth, in any company and whatever happens to their memory."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.support.hashed.rolling import VOCABULARY, RollingDevice, oracle
from tests.support.hashed.workloads import random_workload
from tests.support.kernels.operations import CPU, GPU, PLAIN
from tests.support.models import tiny_model
from tests.support.models.llm import make as open_llm
from tests.support.models.tiny_model import no_time
from tests.support.text.grammar import SCHEMA, allowed
from weft import LLM, RequestError, SamplingParams, StructuredOutputsParams
from weft.base.grammar import Grammar
from weft.base.plan import Plan, Sampling
from weft.base.sampling import SamplingParams as EngineParams
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.runner.sampler import ban
from weft.runner.step_sampling import Masks
from weft.text.grammar import Grammars, Guide
from weft.text.tokenizer import Tokenizer

REGEX = r"(19|20)[0-9]{2}-[01][0-9]( (am|pm))?"
CHOICES = ["yes", "yes, but", "no", "née"]
# A small language: sums of numbers and brackets, two deep.
LARK = 'start: sum\nsum: term ("+" term)?\nterm: NUMBER | "(" NUMBER ")"\nNUMBER: /[0-9]{1,3}/'

GRAMMARS = [SCHEMA, Grammar("regex", REGEX), Grammar("choice", json.dumps(CHOICES)), Grammar("lark", LARK)]


def follows(text: str, grammar: Grammar) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if grammar.kind == "choice":
        return text in CHOICES
    if grammar.kind == "lark":
        return re.fullmatch(r"([0-9]{1,3}|\([0-9]{1,3}\))(\+([0-9]{1,3}|\([0-9]{1,3}\)))?", text) is not None
    value = json.loads(text)
    known = set(value) <= {"name", "age", "kind", "tags"} and value["kind"] in ("cat", "dog")
    tags = value.get("tags", [])
    return known and 1 <= len(value["name"]) <= 6 and 0 <= value["age"] <= 150 and set(tags) <= {True, False}


def walk(guide: Guide, random: Random, stops: frozenset[int], most: int = 2000) -> list[int]:
    """An answer of tokens that the guide allows, chosen blindly."""
    answer: list[int] = []
    while not guide.ended:
        token = random.choice(allowed(guide))
        guide.take(token)
        if token in stops:
            return answer
        answer.append(token)
        assert len(answer) < most
    return answer


# the guide ------------------------------------------------------------------------------------------------------------


@cache
def merged_tokenizer() -> Tokenizer:
    """Tokens of several bytes, of parts of characters, and special ones, one of which looks like text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    words = ['{"name": "née", "age": 12, ', '"kind": "cat"}', "2024-01 pm", "yes, but", "true, false]"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(words, trainer)
    backend.add_special_tokens(["<|end|>", "yes", "<|mark|>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"})


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.kind)
@pytest.mark.parametrize("make", [tiny_model.tokenizer, merged_tokenizer])
def test_whatever_is_chosen_of_the_allowed_tokens_the_answer_follows(grammar, make):
    tokenizer = make()
    grammars = Grammars(tokenizer, tokenizer.size + 70, no_time)
    stops = tokenizer.end_tokens
    answers = set()
    for seed in range(40):
        answer = walk(grammars(grammar, stops), Random(seed), stops)
        assert max(answer) < tokenizer.size, "an id without a text"
        assert not tokenizer.vocabulary.special & set(answer)
        answers.add(tokenizer.decode(answer))
        assert follows(tokenizer.decode(answer), grammar)
    assert len(answers) > 2


def test_any_object_may_be_asked_for():
    tokenizer = tiny_model.tokenizer()
    guide = Grammars(tokenizer, 259, no_time)(Grammar("json_object"), frozenset())
    for token in b'{"a": [1, {"b": null}]':
        guide.take(token)
    assert not guide.ended
    guide.take(ord("}"))
    assert guide.ended
    with pytest.raises(RequestError, match="response_format"):
        Grammars(tokenizer, 259, no_time)(Grammar("json_object"), frozenset()).take(ord("["))


def test_json_may_be_packed_or_indented_but_not_be_mostly_space():
    grammars = Grammars(tiny_model.tokenizer(), 259, no_time)

    def follow(text: str) -> Guide:
        guide = grammars(Grammar("json_object"), frozenset())
        for token in text.encode():
            guide.take(token)
        return guide

    for style in ({}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}):
        assert follow(json.dumps({"a": [1, {"b": None}], "c": "d"}, **style)).ended
    # Small models that may go on with space often do.
    for space in ("\n\n", "   ", "\n" + " " * 40):
        with pytest.raises(RequestError, match="has failed on the answer"):
            follow(f'{{{space}"a": 1')


def test_stop_tokens_are_allowed_only_where_the_answer_may_end():
    # "a" is a stop token although the grammar has it: then it may only end the answer.
    grammars, stops = Grammars(tiny_model.tokenizer(), 300, no_time), frozenset([257, ord("a"), 299])
    guide = grammars(Grammar("regex", "[ab]c?b"), stops)
    assert allowed(guide) == [ord("b")]
    guide.take(ord("b"))
    assert allowed(guide) == [ord("b"), ord("c")]
    guide.take(ord("b"))
    assert guide.ended
    guide = grammars(Grammar("regex", "b+"), stops)
    guide.take(ord("b"))
    assert allowed(guide) == sorted([ord("b"), *stops])
    guide.take(257)
    assert guide.ended


def test_a_model_smaller_than_its_tokenizer_never_gets_an_id_beyond():
    guide = Grammars(tiny_model.tokenizer(), 250, no_time)(Grammar("regex", ".*"), frozenset([257]))
    assert max(allowed(guide)) < 250
    assert len(guide.mask) == 8


def test_special_tokens_can_stand_in_a_grammar():
    tokenizer = merged_tokenizer()
    mark = tokenizer.encode("<|mark|>")[0]
    guide = Grammars(tokenizer, tokenizer.size, no_time)(Grammar("lark", 'start: <|mark|> "a"'), frozenset())
    assert allowed(guide) == [mark]


# the device -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [31, 32, 33, 259])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]])
@pytest.mark.parametrize("operations", [CPU, PLAIN, GPU])
def test_banned_tokens_are_minus_infinity_and_nothing_else_changes(operations, vocab, rows):
    random = np.random.default_rng(vocab)
    logits = torch.from_numpy(random.standard_normal((4, vocab)).astype(np.float32))
    before = logits.clone()
    bits = random.random((len(rows), vocab)) < 0.3
    packed = np.packbits(np.pad(bits, ((0, 0), (0, -vocab % 32))), axis=-1, bitorder="little")
    found = ban(logits, Masks(torch.tensor(rows), torch.from_numpy(packed)), operations)
    expected = before.numpy().copy()
    for line, row in enumerate(rows):
        expected[row, ~bits[line]] = -np.inf
    np.testing.assert_array_equal(found.numpy(), expected)
    assert torch.equal(logits, before), "log-probabilities are those of the model's own logits"


def test_a_plan_without_grammars_carries_no_masks():
    plain = Sampling.greedy(3)
    assert len(plain.mask_row) == 0
    assert plain.mask_bits.size == 0
    assert not plain.mask_bits.flags.writeable


# the engine -----------------------------------------------------------------------------------------------------------

PROMPT = list(b"The river ran past the mill and under the bridge, and nobody asked where it went. ")


def make(**more) -> LLM:
    return open_llm(**{"max_length": 640, **more})


def request(number: int, grammar: Grammar | None, most: int = 400, **params) -> Request:
    wish = EngineParams(**{"max_tokens": most, "seed": number, "temperature": 1.0, **params})
    return Request(np.array(PROMPT[: 10 + 7 * number], np.int32), wish, frozenset([257]), grammar=grammar)


def serve(engine: Engine, requests: list[Request], seen: list[Plan] | None = None) -> list[tuple[list[int], str]]:
    answers: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    launch = engine._device.launch
    if seen is not None:
        engine._device.launch = lambda plan: (seen.append(plan), launch(plan))[1]
    numbers = [engine.add(each) for each in requests]
    while not engine.idle:
        for output in engine.step():
            if output.token is not None:
                answers.setdefault(output.sequence, []).append(output.token)
            if output.finish is not None:
                assert output.sequence not in ends
                ends[output.sequence] = str(output.finish)
    engine._device.launch = launch
    return [(answers[number], ends[number]) for number in numbers]


def text_of(answer: list[int]) -> str:
    return tiny_model.tokenizer().decode([token for token in answer if token != 257])


@pytest.mark.parametrize("depth", [0, 1])
def test_every_answer_follows_its_grammar_and_the_others_do_not_notice(depth):
    free = [request(number, None, most=40) for number in range(4)]
    bound = [request(number, GRAMMARS[number % 4]) for number in range(8)]
    with make(depth=depth) as llm:
        quiet = serve(llm.engine, free)
        answers = serve(llm.engine, [each for pair in zip(free * 2, bound, strict=True) for each in pair])
    for (answer, end), asked in zip(answers[1::2], bound, strict=True):
        assert end == "stop"
        assert follows(text_of(answer), asked.grammar), text_of(answer)
    assert answers[::2] == quiet * 2


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 1}])
def test_every_way_of_choosing_keeps_to_the_grammar(params):
    wishes = {**params, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {ord("{"): -50, 258: 90}}
    bound = [request(number, GRAMMARS[number], min_tokens=3, **wishes) for number in range(1, 4)]
    with make(depth=1) as llm:
        for (answer, end), asked in zip(serve(llm.engine, bound), bound, strict=True):
            assert end == "stop"
            assert follows(text_of(answer), asked.grammar)


def test_a_constrained_sequence_takes_part_in_every_step_and_holds_up_no_other():
    plans: list[Plan] = []
    with make(depth=1, draft="off") as llm:
        serve(llm.engine, [request(0, None, most=30), request(1, Grammar("regex", "[a-z]{12}"))], plans)
    decodes = [[seat for seat, one in zip(p.seat.tolist(), (p.end - p.start) == 1) if one] for p in plans]
    bound = [step for step, seats in enumerate(decodes) if 1 in seats]
    assert len(bound) >= 10
    assert bound == list(range(bound[0], bound[0] + len(bound)))
    free = [step for step, seats in enumerate(decodes) if 0 in seats]
    assert free == list(range(free[0], free[0] + len(free))), "an unconstrained sequence was held up"
    assert all(len(p.sampling.awaiting_mask) == (step in bound) for step, p in enumerate(plans) if step > 1)


def test_a_finished_grammar_ends_the_answer_without_a_stop_token():
    with make() as llm:
        ((answer, end),) = serve(llm.engine, [request(0, Grammar("regex", "[ab]{5}"))])
        assert (len(answer), end) == (5, "stop")
        ((answer, end),) = serve(llm.engine, [request(0, Grammar("regex", "[ab]{50}"), most=7)])
        assert (len(answer), end) == (7, "length")


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_follow_and_stay_the_same_when_memory_is_tight(depth):
    bound = [request(number, Grammar("regex", "(ab|cde|f){30}[0-9]{70}")) for number in range(5)]
    with make(depth=depth) as llm:
        roomy = serve(llm.engine, bound)
        assert llm.engine.planner.preemptions == 0
    with make(depth=depth, memory="1700KiB", max_length=256) as llm:
        tight = serve(llm.engine, bound)
        assert llm.engine.planner.preemptions > 0
    assert tight == roomy
    assert all(re.fullmatch("(ab|cde|f){30}[0-9]{70}", text_of(answer)) for answer, _ in tight)


def test_log_probabilities_are_those_of_the_free_distribution():
    with make() as llm:
        form = StructuredOutputsParams(regex="[a-z]{8}")
        (bound,) = llm.generate([PROMPT], SamplingParams(logprobs=2, seed=3, structured_outputs=form))
        wish = SamplingParams(max_tokens=0, prompt_logprobs=2)
        (free,) = llm.generate([PROMPT + bound.token_ids], wish)
    scored = free.prompt_logprobs[len(PROMPT) :]
    assert [s.token for s in bound.logprobs] == [s.token for s in scored]
    np.testing.assert_allclose([s.logprob for s in bound.logprobs], [s.logprob for s in scored], atol=2e-5)
    assert any(token > 127 for s in bound.logprobs for token, _ in s.top), "the likeliest are not only allowed ones"


def test_a_bad_grammar_is_refused_before_anything_runs():
    with make() as llm:
        with pytest.raises(RequestError, match="regex cannot be used"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=4, structured_outputs={"regex": "("}))
        assert llm.engine.idle
        assert llm.engine.planner.number == 0


def test_a_model_without_a_tokenizer_takes_no_grammar(tmp_path):
    (tmp_path / "config.json").write_text((tiny_model.FOLDER / "config.json").read_text())
    with make(model=str(tmp_path), weights="dummy") as llm, pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([1, 2, 3], SamplingParams(structured_outputs={"json": SCHEMA.text}))


# any traffic ----------------------------------------------------------------------------------------------------------


class Riddle:
    """Allows two tokens, which ones depends on the whole answer so far. Ends or breaks at a length."""

    slow, seconds = False, 0.0

    def foresees(self, token: int) -> bool:
        return False

    def __init__(self, ends: int, breaks: int) -> None:
        self.taken: list[int] = []
        self.ends, self.breaks = ends, breaks

    @property
    def pair(self) -> list[int]:
        code = hash((7, *self.taken))
        return sorted({code % VOCABULARY, (code // VOCABULARY) % VOCABULARY})

    @property
    def mask(self) -> np.ndarray:
        bits = np.zeros(128, np.uint8)
        bits[self.pair] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def ended(self) -> bool:
        return len(self.taken) >= self.ends

    def take(self, token: int) -> None:
        assert token in self.pair, "a token that an old mask allowed"
        self.taken.append(token)
        if len(self.taken) >= self.breaks:
            raise RequestError("no way on")


def riddle_of(grammar: Grammar) -> Riddle:
    return Riddle(*json.loads(grammar.text))


def expected(spec, prompt: list[int], count: int, grammar: Grammar | None) -> tuple[list[int], FinishReason]:
    if grammar is None:
        return oracle(spec, prompt, count), FinishReason.LENGTH
    riddle, answer = riddle_of(grammar), []
    while len(answer) < count:
        answer += oracle(spec, prompt + answer, 1, allowed=tuple(riddle.pair))
        try:
            riddle.take(answer[-1])
        except RequestError:
            return answer, FinishReason.ERROR
        if riddle.ended:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 40))
def test_in_any_traffic_masks_belong_to_the_answer_so_far(seed):
    workload = random_workload(seed, count=6)
    random, config = Random(seed), workload.config
    device = RollingDevice(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
    engine = Engine(workload.spec, device, config, lambda grammar, stops, salt: riddle_of(grammar))
    wanted, answers, ends = {}, {}, {}
    for arrival in workload.arrivals:
        text = json.dumps([random.randint(1, 14), random.choice([3, 99, 99])])
        grammar = Grammar("regex", text) if random.random() < 0.6 else None
        params = EngineParams(max_tokens=max(1, arrival.count), temperature=0.0)
        if not engine.ledger.fits_alone(len(arrival.prompt) + params.max_tokens):
            continue
        number = engine.add(Request(np.array(arrival.prompt, np.int32), params, salt=arrival.salt, grammar=grammar))
        wanted[number] = expected(workload.spec, arrival.prompt, params.max_tokens, grammar)
        answers[number] = []
        if random.random() < 0.3:
            collect(engine.step(), answers, ends)
    for _ in range(3000):
        collect(engine.step(), answers, ends)
        if engine.idle:
            break
    assert {number: (answers[number], ends[number]) for number in wanted} == wanted
    assert not engine.ledger.leases


def collect(outputs, answers, ends) -> None:
    for output in outputs:
        if output.token is not None:
            answers[output.sequence].append(output.token)
        if output.finish is not None:
            ends[output.sequence] = output.finish
            assert (output.error is not None) == (output.finish is FinishReason.ERROR)
