"""`weft.LLM` with the tiny model: what callers get, and that nothing they do wrong harms what is running."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from tests.support.models import tiny_model
from tests.support.models.llm import greedy, make
from weft import LLM, EngineStopped, ModelError, OptionError, RequestError, SamplingParams, builtin
from weft.base.options import Options
from weft.memory.audit import audit
from weft.memory.misses import Reason
from weft.start.loading import facts_of, load_text

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_running(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert llm.engine.idle
        assert not llm.engine.ledger.leases
        audit(llm.engine.ledger)


# answers --------------------------------------------------------------------------------------------------------------


def test_one_prompt_gives_a_list_of_one(llm):
    (result,) = llm.generate("Hello", greedy())
    assert result.prompt_token_ids == list(b"Hello")
    assert len(result.token_ids) == 24
    assert result.finish_reason == "length"
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert (result.logprobs, result.prompt_logprobs, result.error, result.stop_reason) == (None, None, None, None)
    assert llm.generate(list(b"Hello"), greedy())[0].token_ids == result.token_ids


def test_answers_come_in_the_order_of_prompts_of_either_kind(llm):
    prompts = ["one", [1, 2, 3], LONG, "two"]
    together = llm.generate(prompts, greedy())
    assert [r.prompt_token_ids for r in together] == [list(b"one"), [1, 2, 3], list(LONG.encode()), list(b"two")]
    assert [r.token_ids for r in together] == [llm.generate(p, greedy())[0].token_ids for p in prompts]
    assert len({tuple(r.token_ids) for r in together}) == 4


@pytest.mark.thorough
def test_many_more_prompts_than_sequences_all_get_their_answers(llm):
    prompts = [[i % 250, i // 250, 7] for i in range(500)]
    results = llm.generate(prompts, greedy(max_tokens=2))
    assert [r.prompt_token_ids for r in results] == prompts
    assert all(len(r.token_ids) == 2 for r in results)


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([]) == []


@pytest.mark.parametrize("settings", [{"cache": False}, {"depth": 1}, {"max_tokens_per_step": 8}, {"paranoid": True}])
def test_every_mode_gives_the_same_answers(llm, settings):
    prompts, params = [LONG, LONG + "Still", "short"], SamplingParams(seed=5, max_tokens=20, top_p=0.95)
    with make(**settings) as other:
        for _ in range(2):
            expected = [r.token_ids for r in llm.generate(prompts, params)]
            assert [r.token_ids for r in other.generate(prompts, params)] == expected


def test_a_seed_gives_the_same_text_whatever_the_batch(llm):
    wishes = [SamplingParams(seed=s, max_tokens=16) for s in (1, 2, 1)]
    together = llm.generate(["same", "same", "same"], wishes)
    alone = llm.generate("same", wishes[0])[0]
    assert together[0].token_ids == together[2].token_ids == alone.token_ids
    assert together[0].token_ids != together[1].token_ids


def test_without_a_seed_answers_differ_but_runs_repeat():
    def run() -> list[list[int]]:
        with make(seed=11) as fresh:
            return [r.token_ids for r in fresh.generate(["x", "x"], SamplingParams(max_tokens=12))]

    first = run()
    assert first[0] != first[1]
    assert first == run()


# log-probabilities ----------------------------------------------------------------------------------------------------


def test_logprobs_of_an_answer_are_those_of_the_same_tokens_as_a_prompt(llm):
    (answer,) = llm.generate(LONG, SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=3))
    whole = answer.prompt_token_ids + answer.token_ids
    (scored,) = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert scored.token_ids == []
    assert len(scored.prompt_logprobs) == len(whole)
    assert scored.prompt_logprobs[0] is None
    for one, other in zip(answer.logprobs, scored.prompt_logprobs[-12:], strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(one.top) == 3


def test_logprobs_are_given_to_those_who_ask(llm):
    wishes = [greedy(logprobs=0), greedy(), greedy(logprobs=5, prompt_logprobs=0)]
    only_chosen, none, five = llm.generate(["a", "b", "c"], wishes)
    assert all(score.top == () for score in only_chosen.logprobs)
    assert none.logprobs is None
    for token, score in zip(five.token_ids, five.logprobs, strict=True):
        assert score.token == token == score.top[0][0]
        assert [logprob for _, logprob in score.top] == sorted((lp for _, lp in score.top), reverse=True)
    assert five.prompt_logprobs == [None]


# stops ----------------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_the_answer_before_it(llm):
    params = greedy(max_tokens=60)
    text = llm.generate("Hello", params)[0].text
    stop = text[8:11]
    assert len(llm.tokenizer.encode(stop)) > 1
    (result,) = llm.generate("Hello", greedy(max_tokens=60, stop=stop))
    assert result.text == text[: text.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert len(result.token_ids) < 60
    assert llm.generate("Hello", greedy(max_tokens=60, stop=stop, include_stop_str_in_output=True))[0].text.endswith(
        stop
    )


def test_a_stop_string_found_a_step_late_leaves_nothing_behind(llm):
    """At depth 1 the engine has flown a token further when the text is seen."""
    params = greedy(max_tokens=60, stop=llm.generate("Hello", greedy(max_tokens=60))[0].text[8:11])
    with make(depth=1) as deep:
        (early, late) = (m.generate("Hello", params)[0] for m in (llm, deep))
        assert (late.text, late.token_ids, late.stop_reason) == (early.text, early.token_ids, early.stop_reason)
        assert deep.engine.idle
        assert not deep.engine.ledger.leases


def test_stop_tokens_and_the_models_own_end_stop(llm):
    free = llm.generate("Hello", greedy())[0].token_ids
    stop = free[5]
    (result,) = llm.generate("Hello", greedy(stop_token_ids=(stop,)))
    assert result.token_ids == free[: free.index(stop) + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    end = min(llm.end_tokens)
    (ended,) = llm.generate("Hello", SamplingParams(logit_bias={end: 100.0}, min_tokens=3))
    assert (len(ended.token_ids), ended.token_ids[-1]) == (4, end)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    (ignored,) = llm.generate("Hello", greedy(logit_bias={end: 100.0}))
    assert ignored.token_ids == [end] * 24


# the cache ------------------------------------------------------------------------------------------------------------


def test_results_tell_what_was_cached_and_why_not_more():
    with make() as llm:
        first, again = (llm.generate(LONG, greedy(max_tokens=2))[0] for _ in range(2))
        assert (first.cached_tokens, first.miss.reason) == (0, Reason.NEVER_COMPUTED)
        assert "never computed" in first.why_not_more
        assert again.cached_tokens == (len(LONG) - 1) // 64 * 64
        assert again.miss.reason is Reason.NOTHING_MORE
        salted = [llm.generate(LONG, greedy(max_tokens=2), cache_salt=salt)[0] for salt in ("a", "b", "a")]
        assert [r.cached_tokens for r in salted] == [0, 0, again.cached_tokens]
        assert {tuple(r.token_ids) for r in [first, again, *salted]} == {tuple(first.token_ids)}


def test_a_declared_snapshot_is_hit_by_the_next_prompt():
    with make(capture_every=4096) as llm:
        llm.generate(LONG, greedy(max_tokens=1), snapshots=[130])
        (other,) = llm.generate(LONG[:140] + "and so on " * 9, greedy(max_tokens=1))
        assert other.cached_tokens == 128


def test_a_message_with_cache_control_is_hit_by_the_next_conversation():
    with make(capture_every=4096) as llm:
        shared = {"role": "system", "content": LONG[:140], "cache_control": {"type": "ephemeral"}}
        talks = [[shared, {"role": "user", "content": word * 40}] for word in ("left", "right")]
        first, second = (llm.chat(talk, greedy(max_tokens=1))[0] for talk in talks)
        assert (first.cached_tokens, second.cached_tokens) == (0, 128)


# streams --------------------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_answer(llm):
    params = SamplingParams(seed=4, max_tokens=30, ignore_eos=True, logprobs=1)
    (whole,) = llm.generate("Hello", params)
    chunks = list(llm.stream("Hello", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [score for chunk in chunks for score in chunk.logprobs] == chunks[-1].result.logprobs
    assert [chunk.finish_reason for chunk in chunks] == [None] * 29 + ["length"]
    assert chunks[-1].result.text == whole.text


def test_streams_and_generations_go_on_beside_each_other(llm):
    expected = [r.token_ids for r in llm.generate(["a", "b", "c"], greedy())]
    left, right = llm.stream("a", greedy()), llm.stream("b", greedy())
    begun = [next(left), next(right), next(right)]
    assert llm.generate("c", greedy())[0].token_ids == expected[2]
    ends = [[*left][-1], [*right][-1]]
    assert [end.result.token_ids for end in ends] == expected[:2]
    assert begun[0].token_ids == tuple(expected[0][:1])


def test_closing_a_stream_early_frees_its_memory(llm):
    stream = llm.stream(LONG, greedy(max_tokens=500))
    next(stream)
    assert len(llm.engine.ledger.leases) == 1
    stream.close()
    assert not llm.engine.ledger.leases
    assert llm.engine.idle
    # A stream that nobody has begun holds nothing.
    llm.stream(LONG, greedy())
    assert llm.engine.idle


def test_threads_share_one_engine(llm):
    prompts = ["a", "bb", "ccc", "dddd"]
    expected = [r.token_ids for r in llm.generate(prompts, greedy())]
    found: dict[str, list[int]] = {}

    def ask(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, greedy())[0].token_ids

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == expected


# chat -----------------------------------------------------------------------------------------------------------------


def test_chat_answers_one_conversation_or_many(llm):
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, greedy())
    assert llm.tokenizer.decode(one.prompt_token_ids, skip_special=False) == (
        "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    )
    many = llm.chat([hello, [*hello, {"role": "assistant", "content": "?"}]], greedy())
    assert many[0].token_ids == one.token_ids
    streamed = [*llm.chat_stream(hello, greedy())][-1].result
    assert streamed.token_ids == one.token_ids


# faults ---------------------------------------------------------------------------------------------------------------

FAULTS = [
    (lambda m: m.generate(["fine", ""]), r"prompts\[1\] is empty"),
    (lambda m: m.generate([[1], [999]]), "token id 999"),
    (lambda m: m.generate("x", SamplingParams(max_tokens=2000)), "with max_tokens=2000 it exceeds the context of 1024"),
    (lambda m: m.generate("x", {"max_tokens": 3}), "sampling_params must be SamplingParams"),
    (
        lambda m: m.generate(["x", "y"], [SamplingParams()]),
        "sampling_params must have one entry per prompt, got 1 for 2 prompts",
    ),
    (lambda m: m.generate(["x", "y"], [SamplingParams(), None]), r"sampling_params\[1\] must be SamplingParams"),
    (lambda m: m.generate("x", SamplingParams(temperature=-1)), "temperature must be"),
    (lambda m: m.generate("x", SamplingParams(logit_bias={400: 1.0})), "logit_bias has token id 400"),
    (lambda m: m.generate("x", SamplingParams(bad_words=[[1, 400]])), "bad_words has token id 400"),
    (lambda m: m.generate("x", SamplingParams(bad_words=["x"] * 129)), "bad_words takes at most 128 words"),
    (lambda m: m.generate("x", SamplingParams(bad_words=[[True]])), "bad_words must hold token ids"),
    (lambda m: m.generate("x", SamplingParams(bad_words=[[]])), "bad_words must hold words of 1 to 64"),
    (lambda m: m.generate("x", SamplingParams(allowed_token_ids=[400])), "allowed_token_ids has token id 400"),
    (lambda m: m.generate("x", SamplingParams(allowed_token_ids=[])), "allowed_token_ids must have 1 to 16384"),
    (
        lambda m: m.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"messages": 1}),
        "chat_template_kwargs.messages is set by the server",
    ),
    (lambda m: m.generate("x", snapshots=[2]), "snapshots must be positions"),
    (
        lambda m: m.generate(["x", "y"], snapshots=[[1]]),
        "snapshots must have one entry per prompt, got 1 for 2 prompts",
    ),
    (lambda m: m.generate("x", cache_salt=5), "cache_salt must be a string"),
    (lambda m: m.generate("x", priority="high"), "priority must be an integer"),
    (lambda m: m.stream("x", SamplingParams(stop_token_ids=(400,))), "stop_token_ids has token id 400"),
    (lambda m: m.stream(["x", "y"]), "stream takes one prompt"),
    (lambda m: m.chat([]), "messages must be a list"),
    (lambda m: m.chat([{"role": "user"}]), r"messages\[0\].content"),
    (lambda m: m.chat("hello"), "messages must be a list"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_wrong_arguments_raise_at_once_and_lose_nothing_that_is_running(llm, fault, message):
    stream = llm.stream("Hello", greedy())
    next(stream)
    steps = llm.engine.planner.number
    with pytest.raises(RequestError, match=message):
        fault(llm)
    assert llm.engine.planner.number == steps
    assert [*stream][-1].result.token_ids == llm.generate("Hello", greedy())[0].token_ids


def test_a_model_without_tokenizer_takes_token_ids(tmp_path):
    config = json.loads((tiny_model.FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with make(model=str(tmp_path), weights="dummy") as llm:
        (result,) = llm.generate(np.array([1, 2, 3]), greedy())
        assert (len(result.token_ids), result.text) == (24, "")
        assert llm.end_tokens == {257}
        for fault in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "hi"}])):
            with pytest.raises(RequestError, match=r"no tokenizer\.json"):
                fault()
        with pytest.raises(RequestError, match="stop takes strings"):
            llm.generate([1], SamplingParams(stop="x"))


def test_the_embedded_models_tokenizer_is_known_by_its_name():
    tokenizer, template = load_text(Options(tokenizer="weft-small"), tiny_model.FOLDER)
    assert tokenizer is not None
    assert template is not None
    with pytest.raises(ModelError, match="weft-large"):
        load_text(Options(tokenizer="weft-large"), builtin.FOLDER)


def test_a_folder_with_a_tokenizer_takes_text(tmp_path):
    for name in ("config.json",):
        (tmp_path / name).write_text((tiny_model.FOLDER / name).read_text())
    tiny_model.tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    with make(model=str(tmp_path), weights="dummy", dtype="bfloat16") as llm:
        assert llm.end_tokens == {257, 258}
        assert llm.generate("Hello", greedy())[0].prompt_token_ids == list(b"Hello")
        with pytest.raises(RequestError, match="no chat template; send a plain prompt: /v1/completions over HTTP"):
            llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory": "much"}, OptionError, "memory must be"),
        ({"memory": "1KiB"}, OptionError, "memory is"),
        ({"memory": "9999999GiB"}, OptionError, r"[\d.]+ GiB are free; pass a smaller --memory"),
        ({"max_sequences": 0}, OptionError, "max_sequences must be at least 1"),
        ({"max_length": 0}, OptionError, "max_length must be"),
        ({"depth": 2}, OptionError, "depth must be one of 0, 1"),
        ({"dtype": "int3"}, OptionError, "dtype must be one of"),
        ({"cache": "yes"}, OptionError, "cache must be True or False"),
        ({"memmory": 5}, OptionError, "unknown argument .memmory.; did you mean memory"),
        ({"model": "/no/such/folder"}, ModelError, "/no/such/folder"),
        ({"tokenizer": "nowhere"}, ModelError, "nowhere is neither a folder"),
        ({"chat_template": "/no/such.jinja"}, OptionError, "cannot read /no/such.jinja: No such file"),
        ({"chat_template": 5}, OptionError, "chat_template must be a file, got 5"),
    ],
)
def test_wrong_options_raise_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_a_gpu_that_is_too_small_is_told_like_a_machine_that_is(monkeypatch):
    def full(size_bytes: int, device: torch.device) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("weft.device.store._zeros", full)
    with pytest.raises(OptionError, match=r"cannot allocate memory of 2\.0 GiB"):
        make(memory="2GiB")


def test_a_closed_model_says_so():
    llm = make()
    stream = llm.stream("x", greedy())
    next(stream)
    llm.close()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("x")
    with pytest.raises(EngineStopped, match="closed"):
        next(stream)


def test_a_failed_step_stops_everything_and_says_why(monkeypatch):
    def fail(plan):
        raise RuntimeError("the device is on fire")

    with make() as llm:
        stream = llm.stream("x", greedy())
        next(stream)
        monkeypatch.setattr(llm.engine._device, "launch", fail)
        with pytest.raises(RuntimeError, match="on fire"):
            llm.generate("y")
        for ask in (lambda: next(stream), lambda: llm.generate("z")):
            with pytest.raises(EngineStopped, match="on fire"):
                ask()


def test_more_positions_than_the_model_was_made_for_are_told(caplog):
    make(max_length=32768).close()
    assert "trained" not in caplog.text
    make(max_length=40000, memory="64MiB").close()
    assert "max_length is 40000 but the model was trained for 32768 tokens" in caplog.text


@pytest.mark.parametrize("wrong", ["many", 0, 1.5, [4096]])
def test_positions_that_are_no_number_are_told(llm, wrong):
    """Models without rotation ask for them nowhere else."""
    with pytest.raises(ModelError, match="max_position_embeddings must be an integer"):
        facts_of(llm.engine.ledger.spec, {"max_position_embeddings": wrong}, "cpu", None)


def test_a_prompt_that_memory_cannot_hold_takes_the_others_of_its_call_back():
    with make(memory="1400KiB") as llm:
        stream = llm.stream("Hello", greedy())
        next(stream)
        with pytest.raises(RequestError, match="does not fit into the engine's memory"):
            llm.generate(["fine", LONG * 3], greedy(max_tokens=200))
        assert len(llm.engine.ledger.leases) == 1
        assert len([*stream][-1].result.token_ids) == 24
        assert llm.engine.idle


def test_a_stream_loses_nothing_that_another_thread_computes_before_it_is_read(llm, monkeypatch):
    added, move_on, steps = LLM._add, LLM._move_on, iter(range(20))

    def overtaken(self, *arguments):
        opened = added(self, *arguments)
        for _ in range(4):
            self._move_on()
        return opened

    def counted(self):
        assert next(steps, None) is not None, "the stream waits for what was dropped"
        move_on(self)

    monkeypatch.setattr(LLM, "_add", overtaken)
    monkeypatch.setattr(LLM, "_move_on", counted)
    chunks = list(llm.stream("Hello", greedy(max_tokens=1)))
    assert chunks[-1].finish_reason == "length"
