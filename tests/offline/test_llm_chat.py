"""Prompts and words of `LLM` beyond the plain ones: continued messages, bad words, a template of one's own."""

from __future__ import annotations

import pytest

from tests.support.models import tiny_model
from tests.support.models.llm import greedy, make
from weft.base.options import Options
from weft.start.launch import load_texts


@pytest.fixture(scope="module")
def llm():
    with make() as model:
        yield model


def test_chat_continues_a_message_or_leaves_it_to_the_model_to_open_one(llm):
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "e"}]
    prompts = {
        "<|start|>user\nhello<|end|>\n<|start|>assistant\ne": {"continue_final_message": True},
        "<|start|>user\nhello<|end|>\n<|start|>assistant\ne<|end|>\n": {"add_generation_prompt": False},
    }
    for prompt, how in prompts.items():
        (found,) = llm.chat(said, greedy(), **how)
        assert llm.tokenizer.decode(found.prompt_token_ids, skip_special=False) == prompt
        assert [*llm.chat_stream(said, greedy(), **how)][-1].result.token_ids == found.token_ids


def test_bad_words_are_texts_or_token_ids(llm):
    (plain,) = llm.generate("hello", greedy())
    word = tuple(plain.token_ids[2:4])
    (clean,) = llm.generate("hello", greedy(bad_words=[word]))
    assert clean.token_ids[:3] == plain.token_ids[:3]
    assert clean.token_ids[3] != plain.token_ids[3]
    biased = {"logit_bias": {ord("a"): 90.0, ord("b"): 80.0}, "max_tokens": 4}
    (text,) = llm.generate("hello", greedy(**biased, bad_words="aa"))
    assert text.text == "abab"
    (only,) = llm.generate("hello", greedy(allowed_token_ids=[ord("x")], max_tokens=4))
    assert only.text == "xxxx"


def test_a_chat_template_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}")
    with make(chat_template=str(file)) as model:
        (found,) = model.chat([{"role": "user", "content": "hello"}], greedy())
        assert model.tokenizer.decode(found.prompt_token_ids, skip_special=False) == "[hello]<|end|>"
    texts = load_texts(Options(chat_template=str(file)), {"folder": str(tiny_model.FOLDER), "end_tokens": []})
    assert texts.template.source == file.read_text()
