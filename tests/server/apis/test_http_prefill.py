"""Anthropic's API, /v1/messages: a last message of the assistant is the beginning of the answer. Tiny model."""

from __future__ import annotations

import pytest

from tests.support.servers.http_server import Served, serving
from tests.support.servers.http_values import RICH
from weft.server.settings import ServerSettings

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hello"}
BEGUN = {"role": "assistant", "content": "The answer is"}
CALL = {"type": "tool_use", "id": "t", "name": "clock", "input": {}}
FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny", tool_parser="hermes"), template=RICH, max_sequences=4) as server:
        yield server


def ask(served: Served, *messages: dict, status: int = 200, **body) -> dict:
    return served.post(PATH, {"messages": [*messages], "temperature": 0, "max_tokens": 16, **body}, status)


def text_of(message: dict) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def test_a_last_message_of_the_assistant_is_continued(served: Served):
    chat = {"messages": [USER, BEGUN], "temperature": 0, "max_tokens": 16, "continue_final_message": True}
    expected = served.post("/v1/chat/completions", chat)
    assert text_of(ask(served, USER, BEGUN)) == expected["choices"][0]["message"]["content"]
    counted = served.post(f"{PATH}/count_tokens", {"messages": [USER, BEGUN]})
    assert counted == {"input_tokens": expected["usage"]["prompt_tokens"]}


def test_the_beginning_may_have_blocks_and_breakpoints(served: Served):
    kept = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "The answer"}, {"type": "text", "text": " is", **kept}]
    found = ask(served, USER, {"role": "assistant", "content": blocks}, **kept)
    assert text_of(found) == text_of(ask(served, USER, BEGUN))


def test_an_empty_last_message_is_a_prompt_for_an_answer(served: Served):
    """The chat template writes the message's opening; the API allows only the last message to be empty."""
    for content in ("", []):
        assert text_of(ask(served, USER, {"role": "assistant", "content": content})) == text_of(ask(served, USER))


@pytest.mark.parametrize(
    ("last", "body", "field"),
    [
        ({"role": "assistant", "content": [CALL]}, {}, "messages[1] cannot be continued"),
        ({"role": "assistant", "content": [*[{"type": "text", "text": "x"}], CALL]}, {}, "messages[1] cannot"),
        (BEGUN, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (BEGUN, {"output_config": FORMAT}, "output_config.format"),
        (USER, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (USER, {"context_management": {"other": 1}}, "context_management"),
    ],
)
def test_what_cannot_be_continued_or_edited_is_refused_by_name(served: Served, last, body, field):
    answer = ask(served, USER, last, status=400, **body)
    assert answer["error"]["message"].startswith(field), answer


@pytest.mark.parametrize("value", [{"edits": []}, {}, None])
def test_context_management_without_edits_changes_nothing(served: Served, value):
    assert text_of(ask(served, USER, context_management=value)) == text_of(ask(served, USER))
