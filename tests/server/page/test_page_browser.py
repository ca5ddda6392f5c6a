"""The page in a real browser, against the tiny model: `pytest -m browser tests/server/page`."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.support.browser import Watched
from tests.support.models import tiny_model
from tests.support.servers.held_steps import SECONDS
from tests.support.servers.http_server import serving
from tests.support.servers.serving import serving as started
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.server.settings import ServerSettings

pytestmark = pytest.mark.browser


def test_an_answer_streams_and_its_next_turn_reuses_the_first(watched: Watched):
    watched.settle(Most_tokens="70")
    watched.ask("word " * 70)
    watched.answered(1)
    watched.ask("more")
    assert watched.answered(3).locator(".bar .reused").count() == 1
    watched.page.locator(".message").nth(2).get_by_role("button", name="Edit").click()
    watched.page.fill(".editor textarea", "other")
    watched.page.click("text=Save as a branch")
    assert watched.answered(3).locator(".bar .reused").count() == 1
    assert "2 / 2" in watched.page.locator(".message").nth(2).inner_text()
    watched.page.locator(".message").nth(2).get_by_label("Previous branch").click()
    assert "more" in watched.page.locator(".message").nth(2).inner_text()


def test_stop_ends_an_answer(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    """After its third step the engine waits for the click, so there always is something to stop."""
    stopped, steps, step = threading.Event(), [0], Engine.step

    def waiting(engine: Engine) -> list[Output]:
        steps[0] += not engine.idle
        if steps[0] > 3:
            assert stopped.wait(SECONDS)
        return step(engine)

    monkeypatch.setattr(Engine, "step", waiting)
    only_letters(watched, ignore_eos=True)
    watched.ask("go on")
    watched.page.wait_for_selector(".message.assistant .markdown:not(:empty)")
    watched.page.click("text=Stop")
    stopped.set()
    watched.page.wait_for_selector("text=Stopped after")
    assert watched.page.get_by_role("button", name="Send").is_visible()


def only_letters(watched: Watched, **more: Any) -> None:
    """Let answers have no tokens but letters."""
    fields = {"allowed_token_ids": list(range(ord("a"), ord("z") + 1)), **more}

    def changed(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))

    for path in ("/v1/chat/completions", "/v1/fork"):
        watched.page.route(f"**{path}", changed)


def answer_with(watched: Watched, *deltas: dict[str, Any], **more: Any) -> None:
    """Let the model say this."""
    chunks: list[dict[str, Any]] = [{"id": "x", "choices": [{"index": 0, "delta": delta, **more}]} for delta in deltas]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks)
    answer = {"body": stream + "data: [DONE]\n\n", "content_type": "text/event-stream"}
    watched.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))


# tokens and forks -----------------------------------------------------------------------------------------------------


def detailed(watched: Watched, tokens: int = 8) -> list[str]:
    """Ask with the tokens kept, and return those of the answer."""
    only_letters(watched)
    watched.settle(detailed=True, Most_tokens=str(tokens))
    watched.ask("hello " * 20)
    answer = watched.answered(1)
    answer.get_by_role("button", name="Tokens", exact=True).click()
    return list(watched.page.locator(".token").all_inner_texts())


def test_a_token_is_replaced_by_another(watched: Watched):
    """One of the tokens is half a character: what is kept is joined as bytes, and it is no choice itself."""
    heads = [("a", [97], -0.1), ("\ufffd", [195], -0.2), ("\ufffd", [169], -0.3), ("d", [100], -2.0)]
    tops = [{"token": "d", "logprob": -2.0}, {"token": "z", "logprob": -3.0}, {"token": "\ufffd", "logprob": -4.0}]
    tokens = [{"token": text, "bytes": raw, "logprob": likely, "top_logprobs": tops} for text, raw, likely in heads]
    answer_with(watched, {"content": "a\u00e9d"}, logprobs={"content": tokens})
    watched.ask("hello")
    watched.answered(1).get_by_role("button", name="Tokens", exact=True).click()
    watched.page.locator(".token").nth(3).click()
    choices = watched.page.locator(".alternatives button:has(code)")
    assert [each.is_enabled() for each in choices.all()] == [True, False]
    with watched.page.expect_request("**/v1/chat/completions") as asked:
        choices.first.click()
    body = asked.value.post_data_json
    assert body["messages"][-1] == {"role": "assistant", "content": "a\u00e9z"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    watched.page.wait_for_selector("text=2 / 2")
    assert watched.answered(1).locator(".markdown").inner_text().startswith("a\u00e9z")


def test_an_answer_is_continued_after_a_token_from_what_the_server_kept(watched: Watched):
    tokens = detailed(watched)
    watched.page.locator(".token").nth(3).click()
    watched.page.get_by_role("button", name="once").click()
    watched.page.wait_for_selector("text=2 / 2")
    answer = watched.answered(1)
    assert "Continued after token 4, from what the server kept of the answer." in answer.inner_text()
    assert "/v1/fork" in watched.paths
    assert answer.locator(".bar .reused").count() == 1
    answer.get_by_role("button", name="Tokens", exact=True).click()
    found = watched.page.locator(".token").all_inner_texts()
    assert found[:4] == tokens[:4]
    assert len(found) == 12
    # A fork can be forked: its own first tokens count.
    watched.page.locator(".token").nth(9).click()
    watched.page.get_by_role("button", name="once").click()
    watched.page.wait_for_selector("text=3 / 3")
    assert "after token 10, from what the server kept" in watched.answered(1).inner_text()


def test_what_the_server_no_longer_keeps_is_sent_again(watched: Watched):
    detailed(watched)
    lost = {"status": 404, "json": {"error": {"message": "there is no answer"}}}
    watched.page.route("**/v1/fork", lambda route: route.fulfill(**lost))
    watched.page.locator(".token").nth(3).click()
    watched.page.get_by_role("button", name="once").click()
    watched.page.wait_for_selector("text=2 / 2")
    assert "by sending the text again" in watched.answered(1).inner_text()
    assert all("404" in text for text in watched.said)
    watched.said.clear()


def test_continuations_stand_side_by_side_until_one_is_chosen(watched: Watched):
    detailed(watched)
    watched.page.locator(".token").nth(3).click()
    watched.page.get_by_role("button", name="3 ways").click()
    watched.page.wait_for_selector(".choices > .facts .bar")
    texts = watched.page.locator(".choice .markdown").all_inner_texts()
    assert len(texts) == 3
    watched.page.get_by_role("button", name="Go on with this one").nth(1).click()
    watched.ask("and then?")
    watched.answered(3)
    assert texts[2] in watched.page.locator(".message").nth(1).inner_text()
    assert "4 / 4" in watched.page.locator(".message").nth(1).inner_text()


# tools, forms, files --------------------------------------------------------------------------------------------------


def test_a_tool_call_has_a_box_for_its_result_and_reasoning_is_folded(watched: Watched):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    watched.settle(**{"Tools,_as_a_JSON_list": json.dumps([tool])})
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    answer_with(watched, {"reasoning_content": "I must look."}, {"tool_calls": [call]})
    with watched.page.expect_request("**/v1/chat/completions") as asked:
        watched.ask("what is there?")
    assert asked.value.post_data_json["tools"] == [tool]
    answer = watched.answered(1)
    assert 'look({"at": 1})' in answer.inner_text()
    assert answer.locator("details").get_attribute("open") is None
    watched.page.fill(".call textarea", "a loom")
    answer_with(watched, {"content": "A loom."})
    with watched.page.expect_request("**/v1/chat/completions") as asked:
        watched.page.click("text=Send results")
    *_, made, result = asked.value.post_data_json["messages"]
    assert made["tool_calls"][0]["function"]["name"] == "look"
    assert result == {"role": "tool", "content": "a loom", "tool_call_id": "call_1"}
    assert "A loom." in watched.answered(3).inner_text()


def test_an_answer_follows_a_schema_and_a_wrong_one_is_named(watched: Watched):
    field = "JSON_schema_of_the_answer"
    watched.settle(Most_tokens="60", **{field: '{"enum": ["yes, and this is all of it"]}'})
    watched.ask("is it so?")
    assert "yes, and this is all of it" in watched.answered(1).inner_text()
    watched.settle(**{field: "{"})
    watched.ask("again")
    watched.page.wait_for_selector("text=The JSON schema in the settings must be JSON")


def test_a_conversation_is_exported_imported_deleted_and_brought_back(watched: Watched, tmp_path: Any):
    watched.settle(Most_tokens="4")
    watched.ask("keep this")
    watched.answered(1)
    with watched.page.expect_download() as saved:
        watched.page.get_by_label("Export keep this").click()
    saved.value.save_as(tmp_path / "talk.json")
    watched.page.get_by_label("Delete keep this").click()
    watched.page.wait_for_selector("text=“keep this” is deleted")
    assert watched.page.locator(".list li").count() == 0
    watched.page.click("text=Undo")
    assert watched.page.locator(".list li").count() == 1
    watched.page.set_input_files("input[type=file]", tmp_path / "talk.json")
    watched.page.wait_for_function("document.querySelectorAll('.list li').length === 2")
    watched.page.reload()
    watched.page.wait_for_function("document.querySelectorAll('.list li').length === 2")


def test_a_conversation_is_copied_as_a_program(watched: Watched):
    watched.settle(detailed=True, Most_tokens="4")
    watched.ask('it\'s "quoted"')
    watched.answered(1)
    watched.page.click("summary:has-text('Settings')")
    for kind, start in (("curl", "curl http"), ("Python", "import json"), ("Node", 'import OpenAI from "openai"')):
        watched.page.locator(".settings").get_by_role("button", name=kind, exact=True).click()
        text = watched.page.locator(".program").inner_text()
        assert text.startswith(start)
        assert "quoted" in text
        # OpenAI's clients know no such field.
        assert "retain" not in text
    assert compile(python_of(watched), "program", "exec")


def python_of(watched: Watched) -> str:
    watched.page.locator(".settings").get_by_role("button", name="Python", exact=True).click()
    return str(watched.page.locator(".program").inner_text())


def test_a_conversation_needs_no_mouse(watched: Watched):
    keyboard, page = watched.page.keyboard, watched.page
    # The cursor is in the box from the start.
    keyboard.type("hello")
    keyboard.press("Shift+Enter")
    keyboard.type("there")
    keyboard.press("Enter")
    watched.answered(1)
    assert page.locator(".message.user .plain").inner_text() == "hello\nthere"
    page.locator(".message").nth(0).get_by_role("button", name="Edit").focus()
    keyboard.press("Enter")
    page.focus(".editor textarea")
    keyboard.press("Escape")
    assert page.locator(".editor").count() == 0
    for _ in range(40):
        keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Cache":
            break
    keyboard.press("Enter")
    page.wait_for_selector("text=Cached prefixes")


# what a model says ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "scripts": "<script>document.title='owned'</script><svg onload=\"document.title='owned'\"></svg>",
    "events": "<img src=x onerror=\"document.title='owned'\"> <b onmouseover=alert(1)>x</b>",
    "links": "[a](javascript:document.title='owned') [b](data:text/html,<script>alert(1)</script>) [c](//192.0.2.1/x)",
    "images": "![a](http://192.0.2.1/x.png) ![b][r]\n\n[r]: http://192.0.2.1/y.png",
    "frames": "<iframe src='http://192.0.2.1'></iframe><object data=x></object><style>*{display:none}</style>",
    "ansi": "\x1b[31mred\x1b]8;;http://192.0.2.1\x07link\x1b[2J",
    "bidi": "safe\u202egnp.exe\u202c \u2066isolated\u2069 \u200fmark",
    "table": "|" + "a|" * 60 + "\n|" + "-|" * 60 + "\n" + ("|" + "x|" * 60 + "\n") * 200,
    "nested": "> " * 400 + "deep\n\n" + "- " * 400 + "deep\n\n" + "*" * 2000 + "x",
    "long": "word " * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_model_says_is_inert(watched: Watched, kind: str):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": HOSTILE[kind], "arguments": HOSTILE[kind]}}
    parts = [{"reasoning_content": HOSTILE[kind]}, {"content": HOSTILE[kind]}, {"tool_calls": [call]}]
    answer_with(watched, *parts)
    watched.ask(HOSTILE[kind][:100])
    message = watched.answered(1)
    message.locator("details summary").click()
    assert watched.page.title() == "Weft"
    for name in ("script", "img", "iframe", "object", "svg", "style", "[onerror]", "[onload]", "[onmouseover]"):
        assert message.locator(name).count() == 0
    assert set(message.locator("a").evaluate_all("all => all.map(each => each.protocol)")) <= {"http:", "https:"}
    shown = watched.page.locator("body").inner_text()
    assert not any(each in shown for each in "\x1b\x07\u202e\u202c\u2066\u2069\u200f")
    if "<" in HOSTILE[kind]:
        assert HOSTILE[kind].split(">")[0] in shown
    assert watched.page.locator("*").count() < 3000


def test_links_leave_without_a_referrer_or_an_opener(watched: Watched):
    answer_with(watched, {"content": "[site](https://192.0.2.1/x)"})
    watched.ask("a link")
    link = watched.answered(1).locator("a")
    assert link.get_attribute("rel").split() == ["noopener", "noreferrer", "nofollow"]
    assert link.get_attribute("target") == "_blank"


def test_another_site_can_neither_frame_the_page_nor_read_it(browser: Any, watched: Watched):
    context = browser.new_context()
    page = context.new_page()
    source = f"<iframe src='{watched.url}/'></iframe><p>elsewhere</p>"
    page.route("http://elsewhere.test/", lambda route: route.fulfill(body=source, content_type="text/html"))
    page.goto("http://elsewhere.test/")
    page.wait_for_selector("text=elsewhere")
    assert all(frame.query_selector("#app") is None for frame in page.frames)
    for path in ("/", "/v1/models", "/cache/outline"):
        found = page.evaluate("url => fetch(url).then(answer => answer.text(), () => null)", watched.url + path)
        assert found is None
    context.close()


# keys and models ------------------------------------------------------------------------------------------------------


def test_a_server_with_keys_asks_for_one_and_keeps_it_nowhere(browser: Any):
    with serving(ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key")) as locked:
        watched = Watched(browser, locked.url)
        watched.open("input[type=password]")
        watched.page.fill("input[type=password]", "wrong")
        watched.page.click("text=Sign in")
        watched.page.wait_for_selector("text=does not know this key")
        watched.page.fill("input[type=password]", "second-key")
        watched.page.click("text=Sign in")
        watched.page.wait_for_selector(".box textarea")
        assert watched.context.cookies() == []
        assert "second-key" not in watched.page.evaluate(
            "JSON.stringify([localStorage, sessionStorage, location.href])"
        )
        watched.view("Model")
        watched.page.wait_for_selector("text=with the admin key only")
        watched.page.reload()
        watched.page.wait_for_selector("input[type=password]")
        # Answers of 401 and 403 are the only errors that the console shows.
        assert all("401" in text or "403" in text for text in watched.said)
        assert not any("second-key" in path for path in watched.paths)
        watched.said.clear()
        watched.close()


def test_one_of_several_models_is_chosen_from_a_list(browser: Any):
    given = ["--weights", "dummy", "--memory", "64MiB", "--threads", "1", "--port", "0", "--models-memory", "2GiB"]
    models = [word for name in "ab" for word in ("--model", f"{name}={tiny_model.FOLDER}")]
    with started(options=[*given, *models]) as two:
        watched = Watched(browser, two.url)
        watched.open()
        watched.page.select_option("select.model", "b")
        watched.settle(Most_tokens="4")
        watched.ask("hello")
        watched.answered(1)
        watched.view("Model")
        watched.page.wait_for_selector("h2:has-text('b')")
        watched.view("Cache")
        watched.page.wait_for_selector("text=Cached prefixes")
        states = {each["id"]: each["state"] for each in two.call("/v1/models")[1]["data"]}
        assert states == {"a": "idle", "b": "loaded"}
        watched.close()
