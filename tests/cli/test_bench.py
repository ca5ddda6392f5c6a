"""`weft bench`: every workload against a real server, numbers by their definitions, failures counted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.servers.http_server import serving
from weft.base.errors import OptionError
from weft.cli.bench.load import arrivals, ask, body_of, due_times
from weft.cli.bench.measures import MeasuredRequest, quantile, report, summary
from weft.cli.bench.options import KINDS, BenchOptions
from weft.cli.bench.workloads import WORKLOADS, BenchSession, BenchTurn, words
from weft.cli.client import Chunks, Client, ServerError
from weft.cli.main import main
from weft.server.settings import ServerSettings

TINY = ["--prompts", "4", "--input-length", "20", "--output-length", "4", "--groups", "2", "--turns", "3"]
TINY += ["--prefix-length", "130", "--document-length", "300", "--concurrency", "2"]


@pytest.fixture(scope="module")
def served():
    settings = ServerSettings(api_keys=("secret",), model_name="tiny")
    with serving(settings, memory="64MiB", max_length=4096) as found:
        yield found


@pytest.fixture
def bench(served, tmp_path, capsys):
    """Runs `weft bench`; its exit code, what was measured and what was shown."""

    def run(*arguments: str) -> tuple[int, dict, str]:
        served.client.post("/flush_cache").raise_for_status()
        file = tmp_path / "result.json"
        code = main(["bench", "--url", served.url, "--api-key", "secret", "--json", str(file), *TINY, *arguments])
        return code, json.loads(file.read_text()), capsys.readouterr().out

    return run


def test_random_prompts_share_nothing(bench):
    code, found, text = bench()
    assert code == 0
    assert (found["completed"], found["failed"], found["errors"]) == (4, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["cached_tokens"]) == (80, 16, 0)
    assert 0 < found["mean_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"] <= 1000 * found["duration"]
    assert found["output_throughput"] == pytest.approx(16 / found["duration"])
    for label in ("Successful requests", "Benchmark duration", "Mean TTFT", "Median TPOT", "P99 ITL", "P99 E2E"):
        assert label in text
    assert found["model"] == "tiny"
    assert "secret" not in json.dumps(found)


def test_prefixes_of_a_group_are_reused(bench):
    code, found, text = bench("--workload", "generated-shared-prefix", "--prompts", "8", "--concurrency", "1")
    assert code == 0
    assert found["total_input_tokens"] == 8 * 150
    # The first of a group computes, the second leaves a state where they part, later ones resume there.
    assert found["cached_tokens"] >= 4 * 128
    assert found["cached_share"] == found["cached_tokens"] / found["total_input_tokens"]
    assert f"{found['cached_share']:.1%}" in text


def test_documents_are_reused(bench):
    code, found, _ = bench("--workload", "long-document", "--prompts", "6", "--concurrency", "1")
    assert (code, found["total_input_tokens"]) == (0, 6 * 320)
    assert found["cached_tokens"] >= 2 * 256


def test_turns_of_a_conversation_build_upon_answers(bench):
    code, found, _ = bench("--workload", "multi-turn", "--prompts", "2", "--input-length", "40")
    assert (code, found["completed"]) == (0, 6)
    assert found["cached_tokens"] > 0
    # Each turn sends all that was said before: more than three times the first.
    assert found["total_input_tokens"] > 2 * (1 + 2 + 3) * 40


def test_a_trace_is_played_with_its_shared_blocks(bench, tmp_path):
    rows = [(0, [1, 2]), (30, [1, 2]), (60, [1, 3]), (90, [1, 3])]
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": due, "input_length": 1000, "output_length": 20, "hash_ids": blocks} for due, blocks in rows]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--workload", "trace", "--trace", str(trace), "--trace-scale", "0.25", "--concurrency", "1"]
    code, found, _ = bench(*arguments)
    assert (code, found["completed"], found["total_input_tokens"]) == (0, 4, 1000)
    # The second is the first again; the fourth is the third again.
    assert found["cached_tokens"] >= 2 * 192
    assert found["duration"] >= 0.09


def test_prompts_may_be_text(bench):
    code, found, _ = bench("--form", "text")
    assert (code, found["completed"]) == (0, 4)
    assert bench("--form", "chat")[1]["completed"] == 4


def test_failures_are_counted_and_told(bench):
    code, found, text = bench("--workload", "random", "--input-length", "4200", "--spread", "0.2", "--prompts", "6")
    assert 0 < found["failed"] < 6
    assert (code, found["completed"] + found["failed"]) == (0, 6)
    assert sum(found["errors"].values()) == found["failed"]
    assert "failed 1 times: status 400: " in text
    assert bench("--input-length", "5000")[0] == 1


def test_a_first_request_that_fails_ends_it_in_one_line(served, capsys):
    assert main(["bench", "--url", served.url, "--api-key", "wrong", *TINY]) == 2
    assert capsys.readouterr().err.startswith("weft bench: status 401: ")
    assert main(["bench", "--url", served.url, "--api-key", "secret", "--model", "other", *TINY]) == 2
    assert "the first request failed: status 404" in capsys.readouterr().err
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot connect" in capsys.readouterr().err


# workloads, without a server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trace"])
def test_the_same_seed_sends_the_same(kind):
    def made(**changes):
        return list(WORKLOADS[kind](BenchOptions(workload=kind, prompts=6, spread=0.5, **changes)))

    assert made() == made()
    assert made() != made(seed=1)
    assert all(number < 256 for session in made() for turn in session.turns for number in turn.drawn)


def test_lengths_vary_by_the_spread():
    sessions = WORKLOADS["random"](BenchOptions(prompts=200, input_length=100, output_length=10, spread=0.3))
    lengths = [len(session.turns[0].drawn) for session in sessions]
    assert min(lengths) >= 70
    assert max(lengths) <= 130
    assert len(set(lengths)) > 30


def test_traces_give_equal_tokens_for_equal_blocks(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [(27482, 1300, 52, [46, 47, 48]), (30535, 1100, 26, [46, 47, 2366]), (31000, 1200, 1, [46])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(keys, row))) for row in rows) + "\n\n")
    options = BenchOptions(workload="trace", trace=str(trace), trace_speed=2.0)
    first, second, third = list(WORKLOADS["trace"](options))
    assert (first.due, second.due) == (13.741, 15.2675)
    one, two, three = (each.turns[0].drawn for each in (first, second, third))
    assert (len(one), len(two), len(three)) == (1300, 1100, 1200)
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:]
    # What the trace does not name is nobody else's.
    assert three[:512] == one[:512]
    assert three[512:1024] != one[512:1024]
    assert first.turns[0].max_tokens == 52


@pytest.mark.parametrize("line", ["no json", "{}", '{"timestamp": 1, "input_length": "x"}', "[]"])
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    with pytest.raises(OptionError, match="line 1: no request"):
        list(WORKLOADS["trace"](BenchOptions(workload="trace", trace=str(trace))))


def test_requests_are_due_by_chance_at_the_rate_or_as_the_trace_says():
    plain = [BenchSession((BenchTurn((1,), 1),))] * 2000
    due = list(due_times(plain, BenchOptions(request_rate=50.0)))
    gaps = [after - before for before, after in pairwise([0.0, *due])]
    assert min(gaps) >= 0
    # An exponential law deviates by as much as its mean.
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert due == list(due_times(plain, BenchOptions(request_rate=50.0)))
    assert due != list(due_times(plain, BenchOptions(request_rate=50.0, seed=1)))
    timed = [BenchSession((BenchTurn((1,), 1),), due=seconds) for seconds in (0.0, 0.5, 0.75)]
    assert list(due_times(timed, BenchOptions())) == [0.0, 0.5, 0.75]
    assert set(due_times(plain, BenchOptions())) == {0.0}


@dataclass
class Clock:
    """Moves only when somebody sleeps."""

    now: float

    def read(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_request_is_sent_when_it_is_due_and_at_once_when_that_has_passed():
    timed = [BenchSession((BenchTurn((1,), 1),), due=seconds) for seconds in (0.5, 0.75, 2.0, 4.0)]
    clock, sent = Clock(100.0), []

    async def send():
        async for session in arrivals(timed, BenchOptions(), clock.read, clock.sleep):
            sent.append((session.due, clock.now - 100.0))
            clock.now += 1.0

    asyncio.run(send())
    assert sent == [(0.5, 0.5), (0.75, 1.5), (2.0, 2.5), (4.0, 4.0)]


def test_bodies_are_what_the_form_says():
    turn, said = BenchTurn((1, 2), 7), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens = body_of("m", [], turn, BenchOptions(form="tokens"))
    assert (tokens["prompt"], tokens["max_tokens"], tokens["ignore_eos"]) == ([1, 2], 7, True)
    assert body_of("m", said, turn, BenchOptions(form="text"))["prompt"] == "a\nb\n" + words((1, 2))
    chat = body_of("m", said, turn, BenchOptions(form="chat", ignore_eos=False))
    assert chat["messages"] == [*said, {"role": "user", "content": words((1, 2))}]
    assert "ignore_eos" not in chat


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": 0},
        {"spread": 2.0},
        {"trace_scale": 0.0},
        {"workload": "trace"},
        {"trace": "x"},
        {"form": "tokens", "workload": "multi-turn"},
        {"vocabulary": 1},
        {"request_rate": float("nan")},
        {"workload": "unknown"},
    ],
)
def test_options_that_cannot_work_are_refused(changes):
    with pytest.raises(OptionError):
        BenchOptions(**changes)


# numbers --------------------------------------------------------------------------------------------------------------


def test_numbers_follow_their_definitions():
    one = MeasuredRequest(10.0, [10.5, 10.7, 11.0], ended=11.0, prompt_tokens=100, tokens=5, cached_tokens=64)
    two = MeasuredRequest(10.0, [12.0], ended=12.0, prompt_tokens=50, tokens=1)
    failed = MeasuredRequest(10.0, ended=13.0, error="broken")
    found = summary([one, two, failed], duration=4.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"broken": 1})
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (1250.0, 1250.0)
    assert found["mean_tpot_ms"] == pytest.approx(1000 * 0.5 / 4)
    assert found["mean_itl_ms"] == pytest.approx(250.0)
    assert found["p99_e2el_ms"] == pytest.approx(1000 * quantile([1.0, 2.0], 0.99))
    assert (found["request_throughput"], found["total_token_throughput"]) == (0.5, 39.0)
    assert found["accepted_length"] is None
    drafted = summary([replace(one, draft_steps=2, accepted_drafts=3), two], duration=4.0)
    assert drafted["accepted_length"] == 2.5
    # Who does not tell is not counted as a miss.
    assert (found["cached_tokens"], found["cached_share"]) == (64, 0.64)
    assert "failed 1 times: broken" in report(found)


def test_nothing_measured_is_not_zero():
    found = summary([MeasuredRequest(0.0, ended=1.0, error="x")], duration=1.0)
    assert found["mean_ttft_ms"] is None
    assert "n/a" in report(found)


# the client, against servers that behave oddly ------------------------------------------------------------------------


@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    extension=st.sampled_from([b"", b";name=value"]),
    trailer=st.sampled_from([b"", b"x-checksum: 1\r\n"]),
)
def test_chunks_are_decoded_however_they_are_split(parts, cuts, extension, trailer):
    wire = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailer + b"\r\n"
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    chunks, found = Chunks(), b""
    for start, end in pairwise(places):
        assert not chunks.ended
        found += chunks.feed(wire[start:end])
    assert chunks.ended
    assert found == b"".join(parts)


def test_a_chunk_of_no_size_is_an_error():
    with pytest.raises(ValueError):
        Chunks().feed(b"many\r\n")


async def _with_server(answers, use):
    """A server that sends these bytes, piece by piece, one list for each request; then closes."""

    async def talk(reader, writer):
        for pieces in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}/v1", timeout_seconds=60)
    try:
        return await use(client)
    finally:
        await client.close()
        server.close()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_events_are_found_wherever_the_bytes_are_cut():
    body = b"".join(b'data: {"choices": [{"text": "%d"}]}\n\n' % number for number in range(5)) + b"data: [DONE]\n\n"
    whole = STREAM + b"".join(chunk(body[i : i + 7]) for i in range(0, len(body), 7)) + b"0\r\n\r\n"

    async def use(client):
        outcomes = [await ask(client, "/v1/completions", {}) for _ in range(2)]
        return [outcome.text for outcome in outcomes], len(client._idle)

    for size in (1, 3, 1000):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert asyncio.run(_with_server([pieces, pieces], use)) == (["01234", "01234"], 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "status 500: oops"),
        (STREAM + chunk(b'data: {"error": {"message": "gone"}}\n\n') + b"0\r\n\r\n", "gone"),
        (STREAM + chunk(b'data: {"choices": [{"text": "a"}]}\n\n'), "closed the connection"),
        (STREAM + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "no choices"),
        (b"", "closed the connection"),
        (b"nonsense\r\n\r\n", "closed the connection"),
    ],
)
def test_what_is_no_answer_is_an_error(answer, message):
    outcome = asyncio.run(_with_server([[answer]], lambda client: ask(client, "/v1/completions", {})))
    assert message in outcome.error


def test_a_connection_that_was_closed_meanwhile_is_opened_again():
    async def use(client):
        first = await client.get("/v1/models")
        await asyncio.sleep(0.02)
        return first, await client.get("/v1/models")

    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    assert asyncio.run(_with_server([[answer]], use)) == ({}, {})


def test_a_wrong_address_is_refused():
    with pytest.raises(OptionError, match="url must look like"):
        Client("ftp://somewhere")
    with pytest.raises(ServerError, match="cannot connect"):
        asyncio.run(Client("127.0.0.1:1").get("/"))


def test_the_server_may_stand_first_and_a_wrong_name_of_an_option_is_corrected(served, capsys):
    assert main(["bench", served.url, "--api-key", "secret", *TINY]) == 0
    assert main(["bench", "--requests", "5"]) == 2
    assert "--requests 5: did you mean --num-prompts?" in capsys.readouterr().err
