"""Chat templates say what they are meant to, reach nothing, and have an end."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime

import pytest

from tests.support.models import tiny_model
from tests.support.text.folders import BYTES, folder_with
from weft.base.errors import InvalidField, ModelError, OptionError, RequestError
from weft.text.conversation import continued
from weft.text.template import MAX_CHARACTERS, MAX_TEMPLATE_BYTES, ChatTemplate, load_template

HELLO = [{"role": "user", "content": "<b>hi</b>"}]


def test_the_built_in_template_marks_every_message():
    text = ChatTemplate(tiny_model.TEMPLATE).render([{"role": "system", "content": "Be kind."}, *HELLO])
    assert text == "<|start|>system\nBe kind.<|end|>\n<|start|>user\n<b>hi</b><|end|>\n<|start|>assistant\n"
    assert BYTES.encode(text, special=False)[0] == 256


def test_templates_have_the_names_that_models_expect():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}|{{ messages | tojson }}|{{ tools }}|"
        "{{ strftime_now('%Y-%m-%d') }}|{{ thinking }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, clock=lambda: datetime(2026, 11, 15))
    text = template.render([*HELLO, *HELLO], variables={"thinking": True})
    message = '{"role": "user", "content": "<b>hi</b>"}'
    assert text == f"<s><b>hi</b>|[{message}, {message}]|None|2026-11-15|True"


def test_parts_of_text_are_joined_and_others_refused():
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts, "cache_control": {"type": "ephemeral"}}]) == "ab"
    with pytest.raises(RequestError, match=r"messages\[0\].content must have parts"):
        template.render([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of at least one"),
        ("hello", "messages must be a list of at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\].role must be a string"),
        ([{"role": "system<|end|>", "content": "hi"}], r"messages\[0\].role must be a word"),
        ([{"role": "user\n", "content": "hi"}], r"messages\[0\].role must be a word"),
        ([{"role": "x" * 33, "content": "hi"}], r"messages\[0\].role must be a word"),
        ([*HELLO, {"role": "user"}], r"messages\[1\].content must be"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(messages, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate("{{ messages[0].content }}").render(messages)


@pytest.mark.parametrize(
    "trick",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__closure__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.here }}",
        "{{ 2 ** 100000000 }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
        "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_template_cannot_reach_out_change_its_input_or_run_away(trick):
    """Either refused, or (where Jinja shows nothing for what it forbids) without any effect."""
    text = ""
    with suppress(RequestError):
        text = ChatTemplate(trick).render(HELLO)
    assert text == ""
    assert HELLO == [{"role": "user", "content": "<b>hi</b>"}]
    assert MAX_CHARACTERS < 99999 * 1000


DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = HOW %}{% endfor %}"
BIG = "{% set a = 'a' * 1000000 %}"
LAUGHS = "{% set a = ['x'] %}" + "{% set a = [a, a, a, a, a, a, a, a] %}" * 12


@pytest.mark.parametrize(
    "trick",
    [
        # without end
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(9999) %}{% set x = ('a ' * 100000) | title %}{% endfor %}",
        BIG + "{% set b = [0] * 1000000 %}" + "{% set c = b | map('string') | select('none') | list %}" * 50,
        # texts, lists and numbers that grow
        DOUBLE.replace("START", "'ab'").replace("HOW", "ns.x + ns.x"),
        DOUBLE.replace("START", "'ab'").replace("HOW", "ns.x ~ ns.x"),
        DOUBLE.replace("START", "[1]").replace("HOW", "ns.x + ns.x"),
        DOUBLE.replace("START", "'ab'").replace("HOW", "ns.x.replace('a', ns.x)"),
        DOUBLE.replace("START", "10").replace("HOW", "ns.x * ns.x"),
        LAUGHS + "{{ a }}",
        LAUGHS + "{{ a | tojson }}",
        LAUGHS + "{{ a | string }}",
        LAUGHS + "{% set b = 'x' ~ a %}",
        LAUGHS + "{{ '%s' % a }}",
        BIG + "{{ a.replace('a', a) | length }}",
        BIG + "{{ a | replace('a', a) | length }}",
        BIG + "{{ a.join(['x'] * 1000) | length }}",
        BIG + "{{ ([a] * 1000) | join | length }}",
        BIG + "{{ (a.replace('a', '\n')) | indent(1000) | length }}",
        "{{ ('\t' * 1000000).expandtabs(1000) | length }}",
        "{{ 'a'.ljust(1000000000) | length }}",
        "{{ 'a' | center(1000000000) | length }}",
        "{{ '{:1000000000}'.format(1) | length }}",
        "{{ '{:{w}}'.format(1, w=1000000) | length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ [1, 2] | tojson(indent=1000000000) }}",
        # what is caught instead of written
        BIG + "{% set x %}{% for i in range(9999) %}{{ a }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}{% endset %}",
    ],
)
def test_a_template_has_an_end_in_time_and_memory(trick, monkeypatch):
    monkeypatch.setattr("weft.text.sandbox.MAX_SECONDS", 0.2)
    template = ChatTemplate(trick)
    began = time.thread_time()
    with pytest.raises(RequestError, match="chat template"):
        template.render(HELLO)
    assert time.thread_time() - began < 5


def test_what_templates_really_do_is_within_their_bounds(monkeypatch):
    # Of rounds and characters; seconds are the machine's.
    monkeypatch.setattr("weft.text.sandbox.MAX_SECONDS", 600)
    template = """
{%- macro show(message) %}<{{ message.role }}>{{ message.content | trim }}{% endmacro %}
{%- set ns = namespace(turns=0, said='') %}
{%- for message in messages %}
    {%- if loop.first or message.role != loop.previtem.role %}{% set ns.turns = ns.turns + 1 %}{% endif %}
    {%- set said = message.content.split('</think>')[-1].lstrip('\n') %}
    {{- show(message) ~ '\n' + said[:1] }}
{%- endfor %}
{%- if tools %}{{ tools | map(attribute='function') | list | tojson(indent=4) | indent(2) }}{% endif %}
{{- '%s of {} %d'.format('x') | format('turns', ns.turns) }} {{ '2024 {}'.format(ns.turns) }}
{{- ['a', 'b'] | join(', ') }} {{ 'x' * 3 }} {{ 'a-b' | replace('-', '+') }} {{ [1, 2] | sum }}"""
    messages = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y"}] * 1500
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = ChatTemplate(template).render(messages, tools=tools)
    assert text.startswith("<user>xxx")
    assert text.endswith("turns of x 3000 2024 3000a, b xxx a+b 3")
    assert '"name": "f"' in text


def test_a_broken_template_is_an_error_of_the_model():
    with pytest.raises(ModelError, match="error in line 2"):
        ChatTemplate("a\n{% if %}")


def test_templates_are_found_in_every_place_that_models_keep_them(tmp_path):
    assert load_template(tmp_path, {}) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder_with(tmp_path, tokenizer_config={"chat_template": named})
    template = load_template(tmp_path, {})
    assert (template.render(HELLO), template.render(HELLO, tools=[{"type": "function"}])) == ("plain", "tools")
    folder_with(tmp_path, tokenizer_config={"chat_template": "{{ eos_token }}"})
    assert load_template(tmp_path, {"eos_token": "</s>"}).render(HELLO) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_template(tmp_path, {}).render(HELLO) == "file"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x" * (MAX_TEMPLATE_BYTES + 1), f"has more than {MAX_TEMPLATE_BYTES} bytes"),
        (b"\xff", "it is not UTF-8"),
        (b"a\n{% if %}", "the chat template has an error in line 2: Expected an expression"),
        (b"{% for a in b %}" * 30 + b"{% endfor %}" * 30, "the chat template cannot be compiled"),
        (b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "the chat template cannot be compiled"),
    ],
    ids=["large", "binary", "syntax", "nested", "deep"],
)
def test_a_template_file_that_cannot_be_used_is_one_line(tmp_path, data, message):
    file = tmp_path / "mine.jinja"
    file.write_bytes(data)
    with pytest.raises(OptionError, match=message) as caught:
        load_template(tmp_path, {}, str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("said", ["e", "<", "", " two \n", "{{ x }}", "end|>\n"])
def test_a_message_is_continued_at_its_own_end(said):
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}")
    messages = [{"role": "user", "content": "e"}, {"role": "assistant", "content": said}]
    assert continued(template, messages) == f"<user>e<|end|>\n<assistant>{said}"


def test_a_template_that_leaves_the_last_message_out_has_nothing_to_continue():
    with pytest.raises(InvalidField, match="continue_final_message is impossible"):
        continued(ChatTemplate("{{ messages[0].content }}"), [*HELLO, *HELLO])
