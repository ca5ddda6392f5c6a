"""Results of `LLM` in vLLM's shape: several answers, the best of them, scores, beams, prompts of every kind."""

from __future__ import annotations

import itertools

import pytest

from tests.support.models import tiny_model
from weft import LLM, BeamSearchParams, RequestError, SamplingParams, TextPrompt, TokensPrompt
from weft.base.sampling import SamplingParams as EngineParams
from weft.offline.sampling import DEFAULT_LENGTH, StructuredOutputsParams

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3
LIMITS = {"memory": "32MiB", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 1024}


@pytest.fixture(scope="module")
def llm():
    with LLM(**tiny_model.OPTIONS, **LIMITS) as llm:
        yield llm


def seeded(**params) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": 12, "ignore_eos": True, **params})


# several answers ------------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_share_its_prefix(llm):
    (result,) = llm.generate(LONG, seeded(n=4), cache_salt="several")
    cells = (len(LONG) - 1) // 64 * 64
    assert [each.cached_tokens for each in result.outputs] == [0, cells, cells, cells]
    assert len({tuple(each.token_ids) for each in result.outputs}) == 4
    assert result.num_cached_tokens == 0
    # The first answer is the one to a request for a single answer, and a seed gives the others again.
    assert result.outputs[0].token_ids == llm.generate(LONG, seeded())[0].token_ids
    again = llm.generate([LONG, "other"], [seeded(n=4), seeded(n=2)])
    assert [each.token_ids for each in again[0].outputs] == [each.token_ids for each in result.outputs]
    assert len(again[1].outputs) == 2


def test_the_best_of_several_answers_are_the_likeliest(llm):
    every = llm.generate(LONG, seeded(n=5, logprobs=0))[0].outputs
    best = llm.generate(LONG, seeded(n=2, best_of=5))[0].outputs
    likeliest = sorted(every, key=lambda each: -each.cumulative_logprob)[:2]
    assert [each.token_ids for each in best] == [each.token_ids for each in likeliest]
    assert [each.index for each in best] == [0, 1]
    assert [each.logprobs for each in best] == [None, None]
    assert [each.cumulative_logprob for each in best] == pytest.approx([each.cumulative_logprob for each in likeliest])


def test_prompt_scores_are_computed_once_and_stand_with_the_prompt(llm):
    (result,) = llm.generate("Hello", seeded(n=2, prompt_logprobs=1, max_tokens=1), cache_salt="scores")
    assert result.prompt_logprobs[0] is None
    assert [next(iter(each)) for each in result.prompt_logprobs[1:]] == list(b"ello")


# scores ---------------------------------------------------------------------------------------------------------------


def test_scores_are_mappings_with_the_sampled_token_first(llm):
    (result,) = llm.generate("Hello", seeded(logprobs=3))
    for token, score in zip(result.token_ids, result.outputs[0].logprobs, strict=True):
        assert next(iter(score)) == token
        assert score[token].logprob == score.logprob
        assert score[token].decoded_token == llm.tokenizer.decode([token], skip_special=False)
        ranks = {each: entry.rank for each, entry in score.items() if entry.rank is not None}
        assert [each for each, _ in score.top] == sorted(ranks, key=ranks.get)
        assert len(score) == 3 + (token not in ranks)
        assert -1 not in score


# beams ----------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_beam_search_finds_the_best_answers_that_an_exhaustive_search_of_its_beams_finds(llm):
    """The oracle scores whole answers as prompts: another path through the engine."""
    width, length = 2, 2
    (found,) = llm.beam_search([LONG], BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
    prompt = list(LONG.encode())
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        tried = [[*answer, token] for _, answer in beams for token in range(llm.vocab_size)]
        scored = llm.generate(
            [prompt + answer for answer in tried],
            SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(prompt) - 1),
        )
        sums = [sum(each.logprob for each in one.prompt_logprobs[len(prompt) :]) for one in scored]
        beams = sorted(zip(sums, tried), reverse=True)[:width]
    assert [each.tokens for each in found.sequences] == [prompt + answer for _, answer in beams]
    assert [each.cum_logprob for each in found.sequences] == pytest.approx([total for total, _ in beams], abs=1e-3)
    assert [each.text for each in found.sequences] == [llm.tokenizer.decode(answer) for _, answer in beams]
    assert found.prompt == LONG


def test_a_beam_of_one_is_the_greedy_answer_and_ends_with_it(llm):
    greedy = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (found,) = llm.beam_search(["Hello"], params)
    assert found.sequences[0].tokens == list(b"Hello") + greedy.token_ids
    assert found.sequences[0].finish_reason == "length"


def test_beams_that_end_are_kept_without_their_end(llm, monkeypatch):
    greedy = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=1))[0].token_ids[0]
    monkeypatch.setattr(llm, "end_tokens", frozenset({greedy}))
    (found,) = llm.beam_search(["Hello"], BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.0))
    ended = [each for each in found.sequences if each.finish_reason == "stop"]
    assert ended[0].tokens == list(b"Hello")
    assert ended[0].stop_reason == greedy
    (kept,) = llm.beam_search(
        ["Hello"],
        BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.0, include_stop_str_in_output=True),
    )
    assert kept.sequences[0].tokens == [*b"Hello", greedy]


def test_beams_reuse_what_they_share(llm, monkeypatch):
    seen = []
    generate = LLM.generate

    def watched(self, *arguments, **named):
        results = generate(self, *arguments, **named)
        seen.append([each.cached_tokens for each in results])
        return results

    monkeypatch.setattr(LLM, "generate", watched)
    llm.beam_search([LONG], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    cells = (len(LONG) - 1) // 64 * 64
    assert all(cached >= cells for cached in itertools.chain(*seen[1:]))


# prompts --------------------------------------------------------------------------------------------------------------


def test_prompts_of_every_kind_are_the_same(llm):
    kinds = ["Hello", list(b"Hello"), TextPrompt(prompt="Hello"), TokensPrompt(prompt_token_ids=list(b"Hello"))]
    results = llm.generate(kinds, seeded())
    assert {tuple(each.token_ids) for each in results} == {tuple(results[0].token_ids)}
    assert [each.prompt for each in results] == ["Hello", None, "Hello", None]
    assert llm.generate(kinds[3], seeded())[0].token_ids == results[0].token_ids
    assert len({each.request_id for each in results}) == 4


def test_a_prompt_may_have_its_own_salt(llm):
    prompts = [{"prompt": LONG, "cache_salt": salt} for salt in ("x", "y", "x")]
    cached = [llm.generate(each, seeded(max_tokens=1))[0].cached_tokens for each in prompts]
    assert cached == [0, 0, (len(LONG) - 1) // 64 * 64]


def test_the_end_of_a_long_prompt_can_be_kept(llm):
    (cut,) = llm.generate(LONG, seeded(truncate_prompt_tokens=5))
    assert cut.prompt_token_ids == list(LONG.encode())[-5:]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.generate({"prompt": "x", "multi_modal_data": {}}), "prompt has 'multi_modal_data'"),
        (lambda m: m.generate({}), "prompt must have prompt or prompt_token_ids"),
        (lambda m: m.generate("x", lora_request=object()), "lora_request is not supported"),
        (lambda m: m.generate(["x", "y"], priority=[1]), "priority must have one entry per prompt"),
        (lambda m: next(m.stream("x", SamplingParams(n=2))), "n must be 1 in a stream"),
        (lambda m: m.beam_search(["x"], BeamSearchParams(beam_width=11, max_tokens=1)), "beam_width must be"),
        (lambda m: SamplingParams(n=3, best_of=2), "best_of must be an integer from 3"),
        (lambda m: SamplingParams(n=0), "n must be an integer"),
        (lambda m: SamplingParams(logits_processors=[print]), "logits_processors .* is not supported: use logit_bias"),
        (lambda m: SamplingParams(structured_outputs={"regex": "a", "choice": ["b"]}), "exactly one constraint"),
        (lambda m: StructuredOutputsParams(), "exactly one constraint"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(llm, ask, message):
    with pytest.raises(RequestError, match=message):
        ask(llm)
    assert llm.engine.idle


# lengths --------------------------------------------------------------------------------------------------------------


def test_an_answer_that_the_default_length_cut_says_so(llm, caplog):
    free = SamplingParams(temperature=0, ignore_eos=True)
    (cut,) = llm.generate("Hello", free)
    assert len(cut.token_ids) == DEFAULT_LENGTH
    assert cut.why_cut == "the answer was cut at the default length of 256 tokens; pass SamplingParams(max_tokens=...)"
    assert "1 of 1: the answer was cut" in caplog.text
    caplog.clear()
    for chosen in (256, 3):
        (asked,) = llm.generate("Hello", SamplingParams(temperature=0, ignore_eos=True, max_tokens=chosen))
        assert (len(asked.token_ids), asked.why_cut) == (chosen, "")
    assert caplog.text == ""


def test_without_a_length_an_answer_may_fill_the_context(llm):
    prompt = [65] * 1000
    assert len(llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True))[0].token_ids) == 24
    # The default is cut to what fits; a length that was chosen is not.
    assert len(llm.generate(prompt, SamplingParams(ignore_eos=True))[0].token_ids) == 24
    with pytest.raises(RequestError, match="max_tokens does not fit"):
        llm.generate(prompt, SamplingParams(max_tokens=25))


def test_the_models_own_parameters_may_be_changed_and_passed(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_k = 3, 0, -1
    assert len(llm.generate("Hello", params)[0].token_ids) <= 3
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature must be"):
        llm.generate("Hello", params)


def test_the_engines_own_parameters_are_taken_too(llm):
    (result,) = llm.generate("Hello", EngineParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    assert (len(result.token_ids), result.why_cut) == (2, "")


# texts ----------------------------------------------------------------------------------------------------------------


def test_an_answer_may_have_no_text_or_special_tokens_in_it(llm):
    end = min(llm.end_tokens)
    bias = {"logit_bias": {end: 100.0}, "max_tokens": 2}
    assert llm.generate("Hello", seeded(**bias))[0].text == ""
    assert llm.generate("Hello", seeded(**bias, skip_special_tokens=False))[0].text == "<|end|><|end|>"
    (silent,) = llm.generate("Hello", seeded(detokenize=False))
    assert (silent.text, len(silent.token_ids)) == ("", 12)


def test_the_tokenizer_has_what_scripts_use_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == tokenizer.encode(text)
    assert llm.generate(text, seeded())[0].token_ids == llm.chat(messages, seeded())[0].token_ids
    assert tokenizer("ab")["input_ids"] == tokenizer.encode("ab") == [97, 98]
    assert tokenizer(["a", "b"])["input_ids"] == [[97], [98]]
    assert tokenizer.decode([97, 257]) == "a<|end|>"
    assert tokenizer.batch_decode([[97, 257]], skip_special_tokens=True) == ["a"]
    assert tokenizer.convert_ids_to_tokens([97]) == ["a"] == tokenizer.tokenize("a")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 257)
    assert tokenizer.unk_token_id is None
    with pytest.raises(AttributeError):
        _ = tokenizer.no_such_thing


def test_a_conversation_may_have_another_template(llm):
    (result,) = llm.chat([{"role": "user", "content": "hi"}], seeded(), chat_template="{{ messages[0].content }}!")
    assert (result.prompt, result.prompt_token_ids) == ("hi!", list(b"hi!"))


def test_the_cache_can_be_emptied(llm):
    llm.generate(LONG, seeded(max_tokens=1))
    assert llm.reset_prefix_cache()
    assert llm.generate(LONG, seeded(max_tokens=1))[0].cached_tokens == 0
