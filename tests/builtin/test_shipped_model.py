"""The model that comes with Weft, as the one real model of the tests: transformers' twin, sameness, hits, talk."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import tomllib
from dataclasses import replace

import pytest
import torch

from tests.support.fences import ROOT
from tests.support.models.oracle import DirectRunner
from tests.support.servers.serving import serving
from weft import LLM, SamplingParams, StructuredOutputsParams, builtin
from weft.cli.main import main
from weft.cli.selftest import SelfTest, can_tell, complaints
from weft.models.weights import load_model

TURNS = ("Hello! My name is Anna.", "Count from 1 to 10.", "What is the capital of France?", "Tell me a story.", "Why?")
TALK = [(said, "I am not sure about that, but I can tell you something about cats and dogs.") for said in TURNS]


def written(exchanges: list[tuple[str, str]]) -> str:
    """Return a conversation as the model's own template writes it."""
    turns = [turn for said, answer in exchanges for turn in (("user", said), ("assistant", answer))]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


LONG = written(TALK * 2)
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 7]}},
            "required": ["city"],
        },
    },
}
SETTINGS = {"dtype": "float32", "memory": "256MiB", "threads": 1, "max_sequences": 8, "progress": False}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def twin():
    """The same folder in the public implementation."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(builtin.FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def served():
    """As a newcomer starts it; only the port is any that is free, and the request to paste is logged."""
    with serving(options=("--port", "0", "--threads", "1", "--log-level", "debug")) as found:
        yield found


def greedy(count: int = 32, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


# the folder -----------------------------------------------------------------------------------------------------------


def test_it_is_small_enough_for_the_package_and_the_package_carries_it():
    sizes = {file.name: file.stat().st_size for file in builtin.FOLDER.iterdir()}
    assert max(sizes.values()) <= 25 << 20
    assert sum(sizes.values()) <= 50 << 20
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["weft"]
    for name in sizes:
        assert any(fnmatch.fnmatch(f"builtin/model/{name}", pattern) for pattern in patterns), name


def test_it_is_a_hybrid_of_the_size_and_context_that_are_told():
    config = json.loads((builtin.FOLDER / "config.json").read_text())
    kinds = config["layer_types"]
    assert kinds.count("linear_attention") == 3 * kinds.count("full_attention") > 0
    assert config["max_position_embeddings"] >= 4096
    index = json.loads((builtin.FOLDER / "model.safetensors.index.json").read_text())
    assert 15e6 < index["metadata"]["total_size"] / 2 < 30e6


def test_its_template_writes_the_same_text_and_tokens_in_transformers(llm):
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(builtin.FOLDER)
    assert other.chat_template == llm.template.source
    talk = [message for said, answer in TALK for message in ask(said, answer)]
    assert llm.template.render(talk, add_generation_prompt=False) == written(TALK)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi, I'm Zoë."}]
    for tools in (None, [TOOL]):
        text = llm.template.render(messages, tools=tools)
        assert other.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True) == text
        assert other(text)["input_ids"] == llm.tokenizer.encode(text)


# the same numbers -----------------------------------------------------------------------------------------------------


def test_its_logits_equal_those_of_transformers(llm, twin):
    tokens = llm.tokenizer.encode(LONG)[:200]
    with torch.no_grad():
        expected = twin(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    runner = DirectRunner(load_model(builtin.FOLDER, torch.float32, progress=False)[0])
    sequence = runner.open(tokens)
    for count in (100, 60, *[1] * 40):
        runner.step([(sequence, count)])
    assert (sequence.all_logits - expected).abs().max() <= 1e-4


def test_its_greedy_text_equals_that_of_transformers(llm, twin):
    prompt = written(TALK[:1]) + "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    tokens = llm.tokenizer.encode(prompt)
    made = twin.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=40, min_new_tokens=40, use_cache=True)
    [ours] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40, min_tokens=40), use_tqdm=False)
    assert ours.token_ids == made[0, len(tokens) :].tolist()


@pytest.mark.thorough
def test_cache_chunks_and_company_change_nothing(llm):
    prompts = [LONG[: len(LONG) * part // 4] + f"Question {part}:" for part in (2, 3, 4)]
    cold = [llm.generate(each, greedy(), cache_salt=str(place))[0] for place, each in enumerate(prompts)]
    assert [each.cached_tokens for each in cold] == [0, 0, 0]
    expected = [each.token_ids for each in cold]
    again = llm.generate(prompts, greedy(), cache_salt="0", use_tqdm=False)
    assert again[0].cached_tokens >= 64
    assert [each.token_ids for each in again] == expected
    with LLM(**SETTINGS, cache=False, max_tokens_per_step=64) as chunked:
        together = chunked.generate(prompts, greedy(), use_tqdm=False)
    assert [each.cached_tokens for each in together] == [0, 0, 0]
    assert [each.token_ids for each in together] == expected


def test_a_hit_answers_as_a_cold_run_does(llm):
    test = SelfTest(llm)
    found = test.run()
    assert complaints(found, "float32") == []
    assert can_tell(found)


@pytest.mark.thorough
def test_doctor_finds_nothing_wrong_with_it_as_it_is_served(capsys):
    assert main(["doctor", "--memory", "128MiB", "--threads", "1"]) == 0
    told = capsys.readouterr().out
    assert "bfloat16, from the checkpoint" in told
    assert "4096 tokens: the model's trained context" in told


def check_end_of_context(llm: LLM, context: int) -> None:
    tokens = (llm.tokenizer.encode(LONG) * 20)[: context - 96]
    [whole] = llm.generate(tokens, greedy(96), use_tqdm=False)
    assert (len(whole.token_ids), whole.finish_reason, whole.error) == (96, "length", None)
    assert len(set(whole.token_ids)) > 1


@pytest.mark.slow
def test_an_answer_may_go_on_to_the_end_of_the_context(llm):
    check_end_of_context(llm, 4096)


def test_an_answer_may_go_on_to_the_end_of_a_shorter_context():
    with LLM(**SETTINGS, max_length=512) as short:
        check_end_of_context(short, 512)


# talk -----------------------------------------------------------------------------------------------------------------


def test_it_stops_by_itself(llm):
    [answer] = llm.chat([{"role": "user", "content": "Hello"}], replace(llm.suggested, max_tokens=200, seed=1))
    assert answer.finish_reason == "stop"
    assert answer.text.strip()


def test_the_fifth_turn_computes_little_more_than_its_message(llm):
    messages, before = [], 0
    for number, said in enumerate(TURNS):
        messages.append({"role": "user", "content": said})
        [answer] = llm.chat(messages, replace(llm.suggested, max_tokens=60, seed=number), cache_salt="turns")
        computed, new = len(answer.prompt_token_ids) - answer.cached_tokens, len(answer.prompt_token_ids) - before
        messages.append({"role": "assistant", "content": answer.text})
        before = len(answer.prompt_token_ids) + len(answer.token_ids)
    assert answer.cached_tokens > 0
    assert computed < 64 + new


def test_the_engine_is_told_where_messages_end(llm, monkeypatch):
    asked = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request, **more: asked.append(request) or add(request, **more))
    messages = [message for said, answer in TALK[:3] for message in ask(said, answer)]
    llm.chat([*messages, {"role": "user", "content": "Hello"}], SamplingParams(max_tokens=1), use_tqdm=False)
    [request] = asked
    ends = [llm.tokenizer.decode(request.prompt[:end].tolist(), skip_special=False) for end in request.boundaries]
    assert len(ends) == 7
    assert all(text.endswith("<|im_end|>") for text in ends)


def ask(said: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


def test_answers_follow_a_schema(llm):
    question = [{"role": "user", "content": "Name an animal and say how many legs it has."}]
    params = llm.get_default_sampling_params()
    params.seed, params.structured_outputs = 1, StructuredOutputsParams(json=SCHEMA)
    [answer] = llm.chat(question, params)
    found = json.loads(answer.text)
    assert found.keys() == {"animal", "legs"}
    assert found["animal"] in ("cat", "dog")
    assert 0 <= found["legs"] <= 9


def test_it_goes_by_its_name_unless_a_folder_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert builtin.place_of(builtin.NAME) == builtin.place_of(None) == str(builtin.FOLDER)
    with LLM(builtin.NAME, memory="32MiB", progress=False) as named:
        assert named.template is not None
    (tmp_path / builtin.NAME).mkdir()
    assert builtin.place_of(builtin.NAME) == builtin.NAME


# over HTTP ------------------------------------------------------------------------------------------------------------


def test_it_is_what_a_server_serves_and_its_curl_works(served):
    assert served.lines[0].startswith(f"model    {builtin.NAME}: Qwen3_5ForCausalLM in bfloat16, ")
    answer = json.loads(subprocess.run(["bash", "-c", served.curl], capture_output=True, text=True, check=True).stdout)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"].strip()


def test_the_readme_asks_for_the_model_that_is_served():
    readme = (ROOT / "README.md").read_text()
    assert readme.count(f'"{builtin.NAME}"') >= 2
    assert '"builtin"' not in readme


def test_the_fifth_turn_over_http_computes_little_more_than_its_message(served):
    messages, before = [], 0
    for number, said in enumerate(TURNS):
        messages.append({"role": "user", "content": said})
        body = {"messages": messages, "max_tokens": 60, "seed": number}
        status, answer = served.call("/v1/chat/completions", body)
        assert status == 200
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed, new = usage["prompt_tokens"] - cached, usage["prompt_tokens"] - before
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        before = usage["total_tokens"]
    assert cached > 0
    assert computed < 64 + new


def test_a_forced_call_can_be_parsed_and_answered(served):
    messages = [{"role": "user", "content": "What is the weather like in Paris?"}]
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": messages, "tools": [TOOL], "tool_choice": chosen, "max_tokens": 300, "seed": 1}
    status, answer = served.call("/v1/chat/completions", body)
    assert status == 200
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    body |= {"messages": [*messages, choice["message"], result], "tool_choice": "none"}
    status, answer = served.call("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["role"]) == (200, "assistant")
