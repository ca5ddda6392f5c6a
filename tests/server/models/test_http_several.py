"""A server with several models over HTTP: who answers, who waits, and what every route says."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from tests.support.servers.asgi import Exchange, application
from tests.support.servers.fake_engines import answer
from tests.support.servers.several import COST, several
from weft.base.errors import OptionError
from weft.server.access.keys import Key
from weft.server.app import ROUTES
from weft.server.batches.store import BatchStore
from weft.server.models.dispatch import Dispatch
from weft.server.settings import Limits, ServerSettings
from weft.server.stored.answers import StoredAnswers

COMPLETE = "/v1/completions"
KEYS = ServerSettings(api_keys=(Key("sesame", "alice"),), admin_key="root")


def ask(model: str | None = None, **more):
    named = {} if model is None else {"model": model}
    return {"prompt": [5, 6], "max_tokens": 3, **named, **more}


def run(work):
    return asyncio.run(work())


async def settled() -> None:
    """Let everything run that can run now."""
    for _ in range(200):
        await asyncio.sleep(0)


async def reached(condition) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never reached")


def test_each_model_answers_for_itself_is_loaded_at_first_use_and_makes_room_for_the_other():
    async def work():
        async with several("a", "b", stay_seconds=10.0) as world:
            assert [each["state"] for each in (await world.call("/v1/models")).json["data"]] == ["idle", "idle"]
            first = await world.call(COMPLETE, ask("a"))
            assert (first.messages[0]["status"], first.json["model"]) == (200, "a")
            _, waiting = world.begin(COMPLETE, ask("b"))
            await settled()
            assert world.state("b") == "idle"
            # Its time has not passed yet.
            assert world.state("a") == "loaded"
            world.pass_time(10.0)
            assert (await waiting).json["model"] == "b"
            assert (world.state("a"), world.state("b")) == ("idle", "loaded")
            shown = (await world.call("/v1/models/a")).json
            # What its engine said last is still shown.
            assert (shown["state"], shown["max_model_len"]) == ("idle", 1 << 20)

    run(work)


def test_streams_of_others_go_on_while_a_model_loads():
    async def work():
        async with several("a", "b", budget=2 * COST) as world:
            world.paced.add("a")
            world.held["b"] = asyncio.Event()
            stream, running = world.begin(COMPLETE, ask("a", stream=True))
            await reached(lambda: "a" in world.models)
            _, waiting = world.begin(COMPLETE, ask("b"))
            await settled()
            assert world.state("b") == "loading"
            world.models["a"].engine.free()
            await running
            assert stream.body.endswith(b"data: [DONE]\n\n")
            assert not waiting.done()
            world.held["b"].set()
            assert (await waiting).json["model"] == "b"

    run(work)


@pytest.mark.parametrize(
    ("path", "body", "comment", "end"),
    [
        (COMPLETE, ask("a", stream=True), b": keep-alive\n\n", b"data: [DONE]\n\n"),
        ("/generate", {"input_ids": [5, 6], "stream": True}, b": keep-alive\n\n", b"data: [DONE]\n\n"),
        ("/api/generate", {"model": "a", "prompt": "x", "raw": True}, b'{"model":"a"', b"}\n"),
    ],
)
def test_a_stream_begins_with_comments_while_its_model_loads_and_reports_what_fails(path, body, comment, end):
    async def work():
        settings = ServerSettings(keep_alive_seconds=0.01)
        async with several("a", settings=settings) as world:
            world.held["a"] = asyncio.Event()
            exchange, waiting = world.begin(path, body)
            await reached(lambda: comment in exchange.body)
            assert exchange.messages[0]["status"] == 200
            world.held["a"].set()
            await waiting
            assert exchange.body.endswith(end)
            # The fake model has no tokenizer, which a raw prompt needs.
            failed = b"tokenizer" in exchange.body
            assert failed is (path == "/api/generate")
            assert [message["type"] for message in exchange.messages].count("http.response.start") == 1
            assert world.engines.open == 0

    run(work)


def test_a_stream_whose_model_cannot_be_loaded_ends_with_an_error_event():
    async def work():
        async with several("a", settings=ServerSettings(keep_alive_seconds=0.01)) as world:
            world.held["a"], world.broken["a"] = asyncio.Event(), "there is no weight"
            exchange, waiting = world.begin(COMPLETE, ask("a", stream=True))
            await reached(lambda: b": keep-alive" in exchange.body)
            world.held["a"].set()
            await waiting
            assert b"model 'a' cannot be loaded; the server's log says why" in exchange.body
            assert exchange.body.endswith(b"data: [DONE]\n\n")

    run(work)


def test_a_client_that_leaves_before_its_model_is_loaded_waits_no_longer():
    async def work():
        for streams in (False, True):
            async with several("a", settings=ServerSettings(keep_alive_seconds=0.01)) as world:
                world.held["a"] = asyncio.Event()
                exchange, waiting = world.begin(COMPLETE, ask("a", stream=streams))
                await reached(lambda world=world: world.residency.waiting == 1)
                exchange.leave()
                await waiting
                assert world.engines.open == world.residency.waiting == 0
                world.held["a"].set()

    run(work)


def test_a_failed_load_is_one_line_a_503_with_retry_after_and_leaves_the_others_alone(caplog):
    async def work():
        async with several("a", "b", budget=2 * COST) as world:
            world.broken["a"] = "there is no\nweight"
            failed = await world.call(COMPLETE, ask("a"))
            assert failed.messages[0]["status"] == 503
            assert failed.headers["retry-after"] == "2"
            assert "weight" not in failed.body.decode()
            assert (await world.call(COMPLETE, ask("b"))).messages[0]["status"] == 200
            world.broken.clear()
            world.pass_time(2.0)
            assert (await world.call(COMPLETE, ask("a"))).messages[0]["status"] == 200

    run(work)
    [line] = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert line == "model a cannot be loaded: there is no weight"


def test_an_engine_that_ends_is_loaded_again_for_the_next_request():
    async def work():
        async with several("a") as world:
            await world.call(COMPLETE, ask())
            world.pass_time(1000.0)
            await settled()
            await world.call(COMPLETE, ask())
            world.pass_time(20.0)
            world.models["a"].ended.set_result("killed")
            await reached(lambda: world.state("a") == "idle")
            assert (await world.call(COMPLETE, ask())).json["model"] == "a"
            assert world.residency.models["a"].crashes == 1

    run(work)


def test_too_many_waiting_requests_or_bytes_get_a_503():
    async def work():
        async with several("a", waiting=1, settings=ServerSettings(limits=Limits(waiting_bytes=500))) as world:
            world.held["a"] = asyncio.Event()
            _, waiting = world.begin(COMPLETE, ask("a"))
            await reached(lambda: world.residency.waiting == 1)
            refused = await world.call(COMPLETE, ask("a"))
            assert (refused.messages[0]["status"], refused.headers["retry-after"]) == (503, "1")
            refused = await world.call(COMPLETE, ask("a", stop="x" * 500))
            assert "too many bytes" in refused.json["error"]["message"]
            world.held["a"].set()
            assert (await waiting).messages[0]["status"] == 200

    run(work)


def test_names_aliases_tags_and_the_first_model_for_requests_that_name_none():
    async def work():
        settings = ServerSettings(aliases=(("gpt-4o", "b"),))
        async with several("a", "b", budget=2 * COST, settings=settings) as world:
            for asked, answers in ((None, "a"), ("b", "b"), ("gpt-4o", "b"), ("a:latest", "a")):
                assert (await world.call(COMPLETE, ask(asked))).json["model"] == answers
            found = await world.call(COMPLETE, ask("c"))
            assert found.messages[0]["status"] == 404
            assert found.json["error"]["code"] == "model_not_found"
            assert "this server has 'a', 'b'" in found.json["error"]["message"]
            named = await world.call(COMPLETE, ask(), query_string=b"model=b")
            assert named.json["model"] == "b"
            assert (await world.call("/v1/models/gpt-4o")).json["id"] == "b"
            [_, card] = (await world.call("/v1/models")).json["data"]
            assert card["aliases"] == ["gpt-4o"]

    run(work)


def test_bodies_that_name_no_model_by_a_text_are_refused_before_any_is_loaded():
    async def work():
        async with several("a") as world:
            for body in ([1], {"model": 5}):
                assert (await world.call(COMPLETE, body)).messages[0]["status"] == 400
            assert world.state("a") == "idle"

    run(work)


def test_ollama_lists_keep_alive_and_what_is_loaded():
    async def work():
        async with several("a", "b", budget=2 * COST, stay_seconds=5.0) as world:
            tags = (await world.call("/api/tags")).json["models"]
            assert [(each["name"], each["size"]) for each in tags] == [("a", 7), ("b", 7)]
            assert (await world.call("/api/ps")).json == {"models": []}
            loads = await world.call("/api/generate", {"model": "a", "keep_alive": "10m"})
            assert loads.json["done_reason"] == "load"
            [running] = (await world.call("/api/ps")).json["models"]
            assert running["name"] == "a"
            assert world.residency.models["a"].keep_alive_seconds == 600.0
            # Unloading is a hint: not before its time, and no model is loaded for it.
            for name in "ab":
                gone = await world.call("/api/generate", {"model": name, "keep_alive": 0})
                assert gone.json["done_reason"] == "unload"
            await settled()
            assert (world.state("a"), world.state("b")) == ("loaded", "idle")
            world.pass_time(5.0)
            await reached(lambda: world.state("a") == "idle")
            wrong = await world.call("/api/generate", {"model": "a", "keep_alive": "soon"})
            assert wrong.messages[0]["status"] == 400
            forever = await world.call("/api/generate", {"model": "a", "keep_alive": -1})
            assert forever.json["done_reason"] == "load"
            assert (await world.call("/api/ps")).json["models"][0]["expires_at"].startswith("9999")

    run(work)


def test_only_an_admin_unloads_a_busy_model_and_its_requests_get_an_error():
    async def work():
        async with several("a", settings=KEYS) as world:
            world.paced.add("a")
            exchange, running = world.begin(COMPLETE, ask("a"), key="sesame")
            await reached(lambda: bool(world.residency.models["a"].running))
            refused = await world.call("/models/unload", {"model": "a", "force": True}, key="sesame")
            assert refused.messages[0]["status"] == 403
            busy = await world.call("/models/unload", {"model": "a"}, key="root")
            assert busy.messages[0]["status"] == 409
            assert "pass force: true" in busy.json["error"]["message"]
            await world.call("/api/generate", {"model": "a", "keep_alive": 0}, key="sesame")
            world.pass_time(1000.0)
            assert world.state("a") == "loaded"
            assert (await world.call("/models/unload", {"model": "a", "force": True}, key="root")).json["success"]
            await running
            assert exchange.messages[0]["status"] == 503
            await reached(lambda: world.state("a") == "idle")
            loaded = await world.call("/models/load", {"model": "a"}, key="root")
            assert loaded.json["state"] == "loaded"

    run(work)


def test_routes_about_an_engine_show_the_one_that_is_there_and_load_none():
    async def work():
        async with several("a", "b", settings=KEYS) as world:
            more = ("/cache/outline", "/debug/events", "/debug/requests/x")
            for path in ("/model_info", "/props", "/slots", "/cache", *more):
                found = await world.call(path, key="root")
                assert found.messages[0]["status"] == 409, path
                assert found.json["error"]["code"] == "model_not_loaded"
            await world.call(COMPLETE, ask("b"), key="sesame")
            for path in ("/model_info", "/props", "/slots", "/cache"):
                found = await world.call(path, key="root", query_string=b"model=b")
                assert found.messages[0]["status"] == 200, path
            for path in ("/metrics", "/server_info", "/load", "/cache"):
                assert (await world.call(path, key="sesame")).messages[0]["status"] == 403, path
            facts = (await world.call("/server_info", key="root")).json
            assert [(each["id"], each["state"]) for each in facts["models"]] == [("a", "idle"), ("b", "loaded")]
            for path in ("/health", "/version", "/docs", "/openapi.json"):
                assert (await world.call(path, key="root")).messages[0]["status"] == 200, path
            assert (await world.call("/flush_cache", {}, key="root")).json["success"]
            for query in (b"all=true", b"tenant=alice&model=b"):
                dropped = await world.call("/cache", key="root", method="DELETE", query_string=query)
                assert ([*dropped.json["models"]], dropped.json["not_loaded"]) == (["b"], ["a"])
            refused = await world.call("/cache", key="root", method="DELETE", query_string=b"all=true&model=a")
            assert refused.status == 409
            one = (await world.call("/server_info", key="root", query_string=b"model=b")).json
            assert one["model"] == "b"

    run(work)


def test_metrics_have_a_label_for_the_model_and_last_through_its_loads():
    async def work():
        async with several("a", "b", settings=ServerSettings(vllm_metrics=True)) as world:
            await world.call(COMPLETE, ask("a"))
            world.pass_time(1000.0)
            await reached(lambda: world.state("a") == "idle")
            await world.call(COMPLETE, ask("a"))
            text = (await world.call("/metrics")).body.decode()
            assert 'weft_requests_total{model="a",reason="length"} 2.0' in text
            assert 'weft_requests_total{model="b",reason="length"} 0.0' in text
            assert 'weft_model_state{model="a",state="loaded"} 1.0' in text
            assert 'weft_model_loads_total{model="a"} 2.0' in text
            assert 'weft_engine_up{model="a"} 1.0' in text
            assert 'weft_engine_up{model="b"}' not in text
            assert 'weft_http_requests_total{method="POST",route="/v1/completions",status="200"} 2.0' in text
            assert 'vllm:request_success_total{engine="0",finished_reason="length",model="a"' in text
            names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
            assert len(names) == len(set(names))

    run(work)


def test_a_fork_goes_to_the_model_whose_answer_it_goes_on_with_and_responses_are_shared():
    async def work():
        stored = StoredAnswers(1 << 20)
        async with several("a", "b", budget=2 * COST, stored=stored) as world:
            world.paced.add("b")
            exchange, running = world.begin(COMPLETE, ask("b", stream=True))
            await reached(lambda: "b" in world.models)
            world.models["b"].engine.allow(1)
            await reached(lambda: b'"id":"' in exchange.body)
            name = json.loads(exchange.body.split(b"data: ")[1].split(b"\n")[0])["id"]
            forked, going_on = world.begin("/v1/fork", {"id": name, "max_tokens": 1, "store": True})
            await settled()
            world.models["b"].engine.free()
            await asyncio.gather(running, going_on)
            assert forked.json["model"] == "b"
            again = await world.call("/v1/fork", {"id": forked.json["id"], "max_tokens": 1})
            assert again.json["model"] == "b"
            missing = await world.call("/v1/responses/resp_none")
            assert missing.messages[0]["status"] == 404
        stored.close()

    run(work)


def test_lines_of_batches_go_to_their_models(tmp_path):
    async def work():
        store = BatchStore(str(tmp_path), Limits(), lambda: 0.0)
        async with several("a", "b", budget=2 * COST, batch_store=store) as world:
            [background] = world.background
            async with background():
                lines = [
                    {"custom_id": str(n), "method": "POST", "url": COMPLETE, "body": ask("ab"[n % 2])} for n in range(8)
                ]
                data = b"\n".join(map(msgspec.json.encode, lines))
                form = (
                    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
                    b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n' + data + b"\r\n--x--\r\n"
                )
                kind = [(b"content-type", b"multipart/form-data; boundary=x")]
                file = await world.call("/v1/files", None, method="POST", headers=kind, content=form)
                made = {"input_file_id": file.json["id"], "endpoint": COMPLETE, "completion_window": "24h"}
                batch = (await world.call("/v1/batches", made)).json["id"]
                for _ in range(10_000):
                    shown = (await world.call(f"/v1/batches/{batch}")).json
                    if shown["status"] == "completed":
                        break
                    await asyncio.sleep(0.001)
                found = await world.call(f"/v1/files/{shown['output_file_id']}/content")
                answers = [json.loads(line) for line in found.body.splitlines()]
                models = {each["custom_id"]: each["response"]["body"]["model"] for each in answers}
                assert models == {str(n): "ab"[n % 2] for n in range(8)}

    run(work)


def test_requests_finish_when_the_server_drains_and_waiting_ones_get_a_503():
    async def work():
        async with several("a", "b") as world:
            world.paced.add("a")
            running, finishing = world.begin(COMPLETE, ask("a"))
            await reached(lambda: bool(world.residency.models["a"].running))
            waiting, refused = world.begin(COMPLETE, ask("b"))
            await settled()
            world.models["a"].engine.free()
            await world.engines.stop(60.0)
            await asyncio.gather(finishing, refused)
            assert (running.messages[0]["status"], waiting.messages[0]["status"]) == (200, 503)
            for path, body in ((COMPLETE, ask("a")), ("/health", None)):
                assert (await world.call(path, body)).messages[0]["status"] == 503

    run(work)


def test_every_route_of_one_model_is_there_with_several():
    async def work():
        async with several("a") as world:
            for path, method, _ in ROUTES:
                if path == "/debug/events":
                    continue  # it has no end
                exchange = await world.call(path.replace("{name:path}", "a").replace("{name}", "a"), {}, method=method)
                message = exchange.json.get("error", "") if exchange.body.startswith(b"{") else ""
                assert "does not exist" not in str(message).replace("'a' does not exist", ""), path

    run(work)


def test_answers_are_those_of_the_engine():
    async def work():
        async with several("a", "b") as world:
            found = await world.call("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}})
            assert found.json["output_ids"] == answer([5, 6], 3)

    run(work)


def test_dispatch_holds_no_bytes_when_nothing_waits():
    async def work():
        async with several("a") as world:
            dispatch = Dispatch(world.engines, world.catalogue, 0.0)
            await world.call(COMPLETE, ask("a"))
            assert dispatch.held_bytes == 0

    run(work)


def test_one_model_has_aliases_too_which_must_be_its_own():
    async def work():
        async with application(ServerSettings(aliases=(("gpt-4o", "instant"),))) as app:
            found = await Exchange(app, COMPLETE, ask("gpt-4o")).answer()
            assert (found.status, found.json["model"]) == (200, "instant")
            [card] = (await Exchange(app, "/v1/models").answer()).json["data"]
            assert (card["id"], card["aliases"]) == ("instant", ["gpt-4o"])
        with pytest.raises(OptionError, match="alias gpt-4o must stand for instant, the only model, got other"):
            async with application(ServerSettings(aliases=(("gpt-4o", "other"),))):
                pass

    run(work)
