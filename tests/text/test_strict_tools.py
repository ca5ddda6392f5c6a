"""Strict tools with `tool_choice` auto: text stays free, and whatever is sampled, a call's arguments fit its schema."""

from __future__ import annotations

import json
import shutil
from functools import cache
from random import Random

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.support.engine.properties import parts, seed_of
from tests.support.models import tiny_model
from tests.support.models.tiny_model import no_time
from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import RICH, TOOLS
from tests.support.texts import texts
from weft import RequestError
from weft.base.grammar import Grammar
from weft.server.settings import ServerSettings
from weft.text.grammar import Grammars, Guide
from weft.text.output import output_parser
from weft.text.tokenizer import Tokenizer
from weft.text.tool_grammar import auto_tool_grammar, tool_grammar
from weft.text.tools import FORMATS

FORMS = sorted(FORMATS)
# Formats whose parsers may lose a call in a text that began as another one and is none.
LOSES = ("harmony", "gemma", "llama3_json")
END = 257
# How calls begin in each format, in the ways that its parser accepts.
BEGINNINGS = {
    "hermes": ["<tool_call>"],
    "qwen3_coder": ["<tool_call>\n<function=", "<function="],
    "lfm2": ["<|tool_call_start|>"],
    "llama3_json": ["<|python_tag|>", '{"name": "'],
    "mistral": ["[TOOL_CALLS]"],
    "granite": ["<|tool_call|>", "<tool_call>"],
    "phi4": ["<|tool_call|>"],
    "olmo3": ["<function_calls>"],
    "nemotron": ["<TOOLCALL>"],
    "gemma": ["```tool_code", "```tool_call", '```json\n{"name": "'],
    "harmony": ["<|channel|>commentary to=functions.", " to=functions."],
}
# A call with arguments that fit no schema below, in each format.
BAD_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "lfm2": "<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
    "llama3_json": '{"name": "f", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]',
    "phi4": '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>',
    "olmo3": "<function_calls>\nf(x=1)\n</function_calls>",
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}]</TOOLCALL>',
    "gemma": '```json\n{"name": "f", "parameters": {"x": 1}}\n```',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}',
}
# Texts that a sampler attempts wherever it may: ends of things, and beginnings in wrong places.
FRAGMENTS = [
    '"', "}", "]", ")", "\n</parameter>\n", "</parameter>", "</function>\n</tool_call>", "</function>", "\n```",
    "</tool_call>", "<|tool_call_end|>",
    "<|/tool_call|>", "\n</function_calls>", "]</TOOLCALL>", ", ", "1", "1e999", "true", "null", "\\u0041", "ab",
    "<|message|>", "<|end|>", "x=1", "f(", "f", "g", "{", "\n", "  ", "é",
]  # fmt: skip


@cache
def grammars() -> Grammars:
    return Grammars(tiny_model.tokenizer(), 259, no_time)


def tool(name: str, schema: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def closed(properties: dict, required: list[str]) -> dict:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CITY = closed({"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, ["city"])

leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "const": "5"},
        {"enum": ["5", 5, None, "a b"]},
        {"type": "string", "enum": ["Rome", "null", "a\n\nb"]},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        {"$ref": "#/$defs/Small"},
        {},
    ]
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.map(lambda each: {"type": "array", "items": each, "maxItems": 2}),
        inner.map(lambda each: closed({"in": each, "or": {"type": "boolean"}}, ["in"])),
    ),
    max_leaves=3,
)
SMALL = {"$defs": {"Small": {"type": "integer", "enum": [1, 2]}}}
schemas = st.builds(
    lambda found, needed: {**closed(found, [key for key in sorted(found) if key in needed]), **SMALL},
    st.dictionaries(st.sampled_from(["x", "y_1", "name"]), values, max_size=3),
    st.sets(st.sampled_from(["x", "y_1", "name"])),
)


def may(guide: Guide, token: int) -> bool:
    return bool(guide.mask[token // 32] >> (token % 32) & 1)


def sampled(
    guide: Guide, random: Random, beginnings: list[str], tokenizer: Tokenizer | None = None, most: int = 400
) -> tuple[str, bool]:
    """Return a text that the guide allows, and whether it came to an end. It begins calls wherever it may."""
    tokenizer = tokenizer or tiny_model.tokenizer()
    [end] = tokenizer.end_tokens
    answer: list[int] = []
    wanted = tokenizer.encode(random.choice(["", *beginnings]), special=False)
    while not guide.ended and len(answer) < most:
        if may(guide, end) and random.random() < (0.05 if len(answer) < 100 else 0.5):
            return tokenizer.decode(answer), True
        allowed = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist()
        plain = [token for token in allowed if token != end and tokenizer.bytes_of(token).isascii()]
        for token in wanted or [random.choice(plain or allowed)]:
            if guide.ended or not may(guide, token):
                break
            answer.append(token)
            guide.take(token)
        text = random.choice([*FRAGMENTS, *beginnings * 3]) if random.random() < 0.7 else ""
        wanted = tokenizer.encode(text, special=False)
    return tokenizer.decode(answer), guide.ended


def calls_in(
    form: str, text: str, tools: list[dict], whole: bool, reasoning: str | None = None
) -> list[tuple[str, str]]:
    """Return the calls that the server's parser finds; not a last one that was cut short. No trigger is left over."""
    parser = output_parser(reasoning, form, tools)
    found: list[list[str]] = []
    for part in parser.feed(text) + parser.finish():
        if part.kind == "tool_call":
            if part.name is not None:
                found.append([part.name, ""])
            found[-1][1] += part.text
        elif part.kind == "content" and whole and form not in LOSES:
            assert not any(begun in part.text for begun in BEGINNINGS[form] if '"' not in begun), text
    return [(name, arguments) for name, arguments in (found if whole else found[:-1])]


def fits(arguments: str, schema: dict) -> bool:
    # The validator knows no numbers beyond those of floats.
    value = json.loads(arguments, parse_float=lambda text: max(min(float(text), 1e300), -1e300))
    return jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize("part", parts(2))
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(
    schema=schemas,
    other=schemas,
    parallel=st.booleans(),
    reasoning=st.sampled_from([None, "think", "granite"]),
    seed=st.integers(0, 999),
)
def test_whatever_is_sampled_every_strict_call_follows_its_schema(form, schema, other, parallel, reasoning, seed, part):
    tools = [tool("f", schema), tool("g", other), tool("free", CITY)]
    style = reasoning if form != "harmony" else None
    grammar = auto_tool_grammar(form, tools, {"f", "g"}, parallel=parallel, reasoning=style)
    random = Random(seed_of(part, seed))
    for _ in range(3):
        text, whole = sampled(grammars()(grammar, frozenset([END])), random, BEGINNINGS[form])
        made = calls_in(form, text, tools, whole, style)
        assert parallel or len(made) <= 1, text
        for name, arguments in made:
            assert name in ("f", "g", "free"), text
            assert name == "free" or fits(arguments, schema if name == "f" else other), text


@cache
def merged_tokenizer() -> Tokenizer:
    """Tokens that begin in text and end in a trigger, or begin in a trigger and end in a call."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    texts = [f"a{begun}{bad}b" for form, bad in BAD_CALLS.items() for begun in ["", *BEGINNINGS[form]]] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(["<|the end|>"])
    return Tokenizer(backend, {"eos_token": "<|the end|>"})


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_reach_across_a_trigger_are_held_to_the_schema(form):
    tokenizer, tools, random = merged_tokenizer(), [tool("f", CITY), tool("g", CITY)], Random(3)
    compiled = Grammars(tokenizer, tokenizer.size, no_time)
    grammar, made = auto_tool_grammar(form, tools, {"f", "g"}), []
    for _ in range(8):
        text, whole = sampled(compiled(grammar, tokenizer.end_tokens), random, BEGINNINGS[form], tokenizer, 150)
        made += calls_in(form, text, tools, whole)
    assert made
    assert all(fits(arguments, CITY) for _, arguments in made)


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_made_and_without_enforcement_they_do_not_fit(form):
    """The property above is not empty: calls come about, and the parser accepts ones that the grammar excludes."""
    tools = [tool("f", CITY)]
    bad = calls_in(form, BAD_CALLS[form], tools, True)
    assert [name for name, _ in bad] == ["f"]
    assert not fits(bad[0][1], CITY)
    grammar, random = auto_tool_grammar(form, tools, {"f"}), Random(1)
    assert not takes(grammar, BAD_CALLS[form])
    found = [sampled(grammars()(grammar, frozenset([END])), random, BEGINNINGS[form]) for _ in range(12)]
    made = [call for text, whole in found for call in calls_in(form, text, tools, whole)]
    assert len(made) > 3
    assert all(fits(arguments, CITY) for _, arguments in made)
    assert takes(auto_tool_grammar(form, [*tools, tool("other", CITY)], {"other"}), BAD_CALLS[form]) is (
        form != "gemma"
    )


def takes(grammar: Grammar, text: str, ends: bool = True) -> bool:
    guide = grammars()(grammar, frozenset([END]))
    for token in text.encode():
        if guide.ended or not may(guide, token):
            return False
        guide.take(token)
    return may(guide, END) or not ends or guide.ended


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(text=texts(max_size=60), pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=8))
def test_text_without_a_call_is_free(form, text, pieces):
    tools = [tool("f", CITY)]
    begins = ["<function=", "to=functions.", *(begun for begun in BEGINNINGS[form] if '"' not in begun)]
    for each in (text, text + "".join(pieces), "".join(pieces)):
        if not any(begun in each for begun in begins):
            assert takes(free_grammar(form), each), each
            assert calls_in(form, each, tools, True) == []


@cache
def free_grammar(form: str) -> Grammar:
    return auto_tool_grammar(form, [tool("f", CITY)], {"f"}, parallel=False)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", ' {"city": "Rome"}'),
        ("llama3_json", '{"name": "Rome", "size": 5}'),
        ("llama3_json", "{}"),
        ("gemma", '```json\n{"city": "Rome"}\n```'),
        ("gemma", "```json\n[true, false]\n```"),
        ("hermes", "a < b and <tool"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"),
    ],
)
def test_what_only_looks_like_a_call_is_free(form, text):
    assert takes(free_grammar(form), text)


def test_reasoning_is_free_and_may_name_the_trigger_and_end_early():
    tools = [tool("f", CITY)]
    opened = auto_tool_grammar("hermes", tools, {"f"}, reasoning="think", prompt="<think>\n")
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert takes(opened, "I may write <tool_call>x</tool_call>")
    assert takes(opened, f"I may write <tool_call>.</think>\n\nYes. {call} Done.")
    assert not takes(opened, "Hm.</think>\n<tool_call>x", ends=False)
    choice = auto_tool_grammar("hermes", tools, {"f"}, reasoning="think", prompt="assistant\n")
    assert takes(choice, f"<think><tool_call></think>{call}")
    assert takes(choice, f"Plain. {call}")
    assert not takes(choice, "Plain. <tool_call>x", ends=False)


def test_reasoning_may_begin_and_end_in_every_way_that_a_family_knows():
    grammar = auto_tool_grammar("granite", [tool("f", CITY)], {"f"}, reasoning="granite", prompt="assistant\n")
    call = '<|tool_call|>[{"name": "f", "arguments": {"city": "Rome"}}]'
    for start, end in (("<think>", "</think>"), (" Here is my thought process:", "Here's my response:")):
        assert takes(grammar, f"{start} <tool_call> {end} {call}")
        assert takes(grammar, f"{start} Hm.")
        assert not takes(grammar, f"{start} Hm.{end}<tool_call>x", ends=False)


def test_tools_that_are_not_strict_take_any_arguments():
    for form, text in BAD_CALLS.items():
        grammar = auto_tool_grammar(form, [tool("f", CITY), tool("g", CITY)], {"g"})
        # Gemma's calls are Python in a fence for this purpose; JSON calls are excluded with all tools.
        text = "```tool_code\nf(x=1)\n```" if form == "gemma" else text
        assert takes(grammar, text), form
        assert not takes(
            grammar, text.replace('"f"', '"g"').replace("f(", "g(").replace(".f ", ".g ").replace("=f>", "=g>")
        )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nbé"], ["a", "abcde"]),
        ({"type": "string", "const": "5"}, ["5"], ["6", '"5"']),
        ({"type": ["string", "integer"]}, ["5", "nullable", ""], ["null"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"enum": ["5", 5]}, ['"5"', "5"], ["five"]),
        ({"type": "string"}, ["a <b>", "</function>"], ["x</parameter>y", "</function></tool_call>"]),
    ],
)
def test_unquoted_values_follow_their_schema(schema, good, bad):
    tools = [tool("f", closed({"x": schema}, ["x"]))]
    grammar = auto_tool_grammar("qwen3_coder", tools, {"f"})
    for value in good + bad:
        text = f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>"
        assert takes(grammar, text) is (value in good), value
        if value in good:
            [(_, arguments)] = calls_in("qwen3_coder", text, tools, True)
            assert fits(arguments, tools[0]["function"]["parameters"]), arguments


def test_special_tokens_are_triggers_and_cannot_hide_one():
    ids = {"<tool_call>": 258, "</tool_call>": 256}
    guide = grammars()(auto_tool_grammar("hermes", [tool("f", CITY)], {"f"}, token_of=ids.get), frozenset([END]))
    assert may(guide, 258)
    assert may(guide, 256)
    guide.take(258)
    assert not may(guide, ord("x"))
    # A special token that the text omits would join the halves of a trigger.
    hidden = grammars()(auto_tool_grammar("hermes", [tool("f", CITY)], {"f"}), frozenset([END]))
    assert not may(hidden, 256)
    assert not may(hidden, 258)
    assert may(hidden, END)


@pytest.mark.parametrize(
    ("form", "schema", "message"),
    [
        ("qwen3_coder", closed({"x": {"type": "string", "enum": []}}, []), "none of a string's values"),
        ("qwen3_coder", closed({"a>b": {}}, []), "cannot name the parameter 'a>b'"),
        ("lfm2", closed({"a b": {}}, []), "cannot write the name 'a b'"),
        ("lfm2", {"type": "object", "anyOf": [CITY]}, "cannot have 'anyOf'"),
        ("lfm2", closed({}, ["x"]), "required parameter 'x' has no schema"),
        ("lfm2", closed({"x": False}, ["x"]), "no value is allowed"),
    ],
)
def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name(form, schema, message):
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters cannot be enforced: .*" + message):
        auto_tool_grammar(form, [tool("f", schema)], {"f"})
    tool_grammar(form, [tool("f", schema)])


def test_names_and_values_that_look_like_explanations_are_enforced():
    books = {"description": "A book.", "enum": [{"title": "Emma"}, {"title": "Ulysses"}]}
    named = closed({"title": {"const": {"description": "x"}}, "enum": {"title": "E", "type": "null"}}, ["title"])
    schema = {"$comment": "c", **closed({"book": books, "description": named}, ["book", "description"])}
    grammar = auto_tool_grammar("hermes", [tool("f", schema)], {"f"})
    assert '"A book."' not in grammar.text
    call = '<tool_call>\n{{"name": "f", "arguments": {{"book": {}, "description": {}}}}}\n</tool_call>'
    good, other = '{"title": "Emma"}', '{"title": {"description": "x"}, "enum": null}'
    assert takes(grammar, call.format(good, other))
    assert not takes(grammar, call.format("{}", other))
    assert not takes(grammar, call.format('{"title": "Middlemarch"}', other))
    assert not takes(grammar, call.format(good, '{"title": {}}'))
    assert not takes(grammar, call.format(good, "{}"))


def test_a_long_value_that_looks_like_an_explanation_is_refused():
    tools = [tool("f", closed({"x": {"enum": [{"title": "a" * 5000}]}}, []))]
    with pytest.raises(RequestError, match="has a string of 5000 characters"):
        tool_grammar("hermes", tools)
    tool_grammar("hermes", [tool("f", closed({"x": {"type": "null", "title": "a" * 5000}}, []))])


def test_what_the_compiler_does_not_support_is_refused_for_strict_tools_only():
    odd = closed({"x": {"type": "array", "uniqueItems": True, "contains": {"type": "null"}}}, [])
    grammars()(tool_grammar("hermes", [tool("f", odd)]), frozenset([END]))
    with pytest.raises(RequestError, match="cannot be used"):
        grammars()(auto_tool_grammar("hermes", [tool("f", odd)], {"f"}), frozenset([END]))


# over HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory):
    """A server whose model has `<tool_call>` as one token, so that a bias makes it begin a call at once."""
    folder = tmp_path_factory.mktemp("eager") / "tiny"
    shutil.copytree(tiny_model.FOLDER, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|pad|>", "<tool_call>"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "FOLDER", folder)
        settings = ServerSettings(model_name="tiny", tool_parser="hermes")
        with serving(settings, template=RICH, model=str(folder)) as server:
            yield server


BEGINS = {"logit_bias": {"258": 100}, "temperature": 1, "max_tokens": 120, "ignore_eos": True}
CITIES = {**TOOLS[0]["function"], "strict": True}


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_begins_a_call_makes_one_that_fits(eager: Served, seed):
    asked = {**BEGINS, "seed": seed, "parallel_tool_calls": False}
    (choice,) = eager.chat(tools=[{"type": "function", "function": CITIES}], **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert fits(call["function"]["arguments"], CITIES["parameters"])
    # Without enforcement the same model begins calls that are none.
    (choice,) = eager.chat(tools=[TOOLS[0]], **asked)["choices"]
    assert "tool_calls" not in choice["message"]
    assert "<tool_call>" in choice["message"]["content"]


def test_responses_enforce_strict_tools_too(eager: Served):
    body = {**BEGINS, "input": "Hello", "seed": 1, "parallel_tool_calls": False}
    body["max_output_tokens"] = body.pop("max_tokens")
    found = eager.post("/v1/responses", {**body, "tools": [{"type": "function", **CITIES}]})
    calls = [item for item in found["output"] if item["type"] == "function_call"]
    assert len(calls) == 1
    assert fits(calls[0]["arguments"], CITIES["parameters"])
    free = eager.post("/v1/responses", {**body, "tools": [{"type": "function", **TOOLS[0]["function"]}]})
    assert not [item for item in free["output"] if item["type"] == "function_call"]


def test_several_calls_are_made_unless_the_client_wants_one(eager: Served):
    several = eager.chat(tools=[{"type": "function", "function": CITIES}], **{**BEGINS, "max_tokens": 300})
    calls = several["choices"][0]["message"]["tool_calls"]
    assert len(calls) > 1
    assert all(fits(call["function"]["arguments"], CITIES["parameters"]) for call in calls[:-1])


def test_a_strict_schema_that_does_not_compile_names_the_tools(eager: Served):
    odd = {**CITIES, "parameters": closed({"x": {"type": "array", "contains": {"type": "null"}}}, [])}
    error = eager.chat(status=400, tools=[{"type": "function", "function": odd}])["error"]
    assert error["param"] == "tools"
    eager.chat(tools=[{"type": "function", "function": {**odd, "strict": False}}])
