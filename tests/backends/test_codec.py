"""Whatever is sent arrives as it was, and whatever else arrives harms nobody."""

from __future__ import annotations

import math
import socket
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.models import tiny_model
from tests.support.texts import texts
from weft.backends.backend import ModelInfo
from weft.backends.codec import MAX_GRAMMAR, Begin, EngineWriter, EventReader, decode_begin, decode_command
from weft.base.errors import RequestError
from weft.base.grammar import Grammar
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.engine.events import DraftReport, FinishReason, Output, PromptScore, PromptScores, Report, VectorSum
from weft.engine.protocol import (
    SCORES_PER_PIECE,
    End,
    Outputs,
    Question,
    Refusal,
    Refuse,
    Replies,
    ScoresPiece,
    Shutdown,
    Stopped,
    Submit,
    Topic,
)
from weft.engine.request import Request
from weft.engine.service import Service
from weft.memory.misses import Miss, Reason
from weft.start.engine_process import SocketInbox, load_engine
from weft.wire.frames import HEADER_BYTES, Frames, ProtocolError

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True, database=None)

numbers = st.integers(0, 1 << 62)
tokens = st.integers(0, 258) | st.integers(0, (1 << 31) - 1)
counts = st.integers(0, 1 << 40)
floats = st.floats(width=32, allow_nan=False)
words = texts(max_size=20)

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 1 << 24),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    stop=st.lists(words.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    draft=st.none() | st.integers(0, 64),
)
prompts = st.lists(st.integers(0, 258), max_size=30) | st.lists(tokens, max_size=40)
requests = st.builds(
    Request,
    prompt=prompts.map(lambda found: np.array(found, np.int32)),
    params=params,
    stop_tokens=st.frozensets(tokens, max_size=4),
    salt=st.binary(max_size=40),
    priority=st.integers(-(1 << 31), 1 << 31),
    snapshots=st.lists(tokens, max_size=4).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["regex", "json_schema"]), words),
    prediction=st.none() | prompts.map(lambda found: np.array(found, np.int32)),
)
commands = st.one_of(
    st.builds(Submit, numbers, requests),
    st.builds(End, numbers, st.booleans()),
    st.builds(Question, numbers, st.sampled_from(Topic), st.integers(0, 1 << 20)),
    st.just(Shutdown()),
)
misses = st.builds(Miss, st.sampled_from(Reason), counts, counts, counts, counts)


@st.composite
def prompt_scores(draw: st.DrawFn) -> PromptScores:
    tops = draw(st.integers(0, 3))
    top = st.lists(st.tuples(tokens, floats), min_size=tops, max_size=tops)
    return PromptScores(draw(st.lists(st.builds(PromptScore, floats, top), max_size=6)))


small = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=5)
vectors = st.builds(VectorSum, st.none() | small.map(lambda values: np.array(values, np.float32)))
reports = st.builds(
    Report,
    cached_tokens=counts,
    miss=st.none() | misses,
    preemptions=counts,
    queued_seconds=st.floats(0, 1e6),
    prompt_scores=prompt_scores(),
    drafts=st.builds(DraftReport, counts, counts, counts, counts, counts),
    vector=vectors,
)
WRITER = EngineWriter()
encode_command, encode_event, frame = WRITER.command, WRITER.event, WRITER.frame


@st.composite
def outputs(draw: st.DrawFn) -> Outputs:
    found, told = [], {}
    for number in draw(st.lists(numbers, unique=True, max_size=8)):
        output = Output(number, draw(st.none() | tokens))
        if draw(st.booleans()):
            output.logprob, output.top = draw(floats), draw(st.lists(st.tuples(tokens, floats), max_size=3))
        if draw(st.booleans()):
            output.finish, output.error = draw(st.sampled_from(FinishReason)), draw(st.none() | words)
            output.error_field = draw(st.none() | words)
            told[number] = draw(reports)
        found.append(output)
    return Outputs(found, told)


events = st.one_of(
    outputs(),
    st.builds(
        Replies,
        st.lists(numbers, max_size=4),
        st.lists(st.builds(Refusal, numbers, words, st.integers(400, 599), st.none() | words), max_size=4),
        st.dictionaries(numbers, st.dictionaries(words, counts | floats | words, max_size=3), max_size=3),
    ),
    st.builds(Stopped, words),
)


def same(a: object, b: object) -> bool:
    if isinstance(a, Submit):
        assert isinstance(b, Submit)
        x, y = a.request, b.request
        arrays = ("prompt", "prediction")
        others = [name for name in Request.__struct_fields__ if name not in arrays]
        equal = all(getattr(x, name) == getattr(y, name) for name in others)
        equal &= (x.prediction is None) == (y.prediction is None)
        equal &= all(np.array_equal(getattr(x, name), getattr(y, name)) for name in arrays)
        return a.number == b.number and equal and y.prompt.dtype == np.int32
    return a == b


def bodies(data: bytes) -> list[bytes]:
    return Frames().feed(data)


def read_event(data: bytes) -> object:
    reader = EventReader()
    heard = [reader.read(body) for body in bodies(data)]
    assert heard[:-1] == [None] * (len(heard) - 1)
    return heard[-1]


@EXAMPLES
@given(commands)
def test_commands_arrive_as_they_were_sent(command):
    (body,) = bodies(encode_command(command))
    assert same(command, decode_command(body))


@EXAMPLES
@given(events)
def test_events_arrive_as_they_were_sent(event):
    assert read_event(encode_event(event)) == event


def test_options_and_the_models_facts_travel():
    options = Options(model="a/b", memory="2GiB", max_sequences=3, cache=False, seed=7)
    begin = decode_begin(bodies(frame(Begin(options, True, 20)))[0])
    assert (begin.options, begin.progress, begin.log_level) == (options, True, 20)
    info = ModelInfo("a", "B", "float32", 10, 20, 30, 40, 50, {"depth": 1, "end_tokens": [1, 2]})
    assert read_event(frame(info)) == info


def test_scores_of_a_long_prompt_travel_in_pieces():
    scores = [PromptScore(-float(i), [(i, -0.5), (i + 1, -math.inf)]) for i in range(3 * SCORES_PER_PIECE + 5)]
    event = Outputs([Output(4, None, finish=FinishReason.LENGTH)], {4: Report(prompt_scores=PromptScores(scores))})
    data = encode_event(event)
    assert len(bodies(data)) == 5
    assert read_event(data) == event


@EXAMPLES
@given(st.lists(commands, max_size=4), st.lists(st.integers(1, 50), max_size=60))
def test_frames_survive_any_cut_of_the_stream(sent, cuts):
    data = b"".join(map(encode_command, sent))
    frames, found, place = Frames(), [], 0
    for size in [*cuts, len(data)]:
        found += frames.feed(data[place : place + size])
        place += size
    assert all(same(a, decode_command(b)) for a, b in zip(sent, found, strict=True))


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    with pytest.raises(ProtocolError, match="the limit is 100"):
        Frames(limit=100).feed((101).to_bytes(HEADER_BYTES, "big"))
    assert Frames(limit=100).feed((3).to_bytes(HEADER_BYTES, "big") + b"abc") == [b"abc"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"salt": b"s" * 1025}, "salt"),
        ({"snapshots": (-1,)}, "snapshots"),
        ({"priority": 1 << 40}, "priority"),
        ({"stop_tokens": frozenset({1 << 31})}, "stop_tokens"),
        ({"grammar": Grammar("regex", "a" * (MAX_GRAMMAR + 1))}, "grammar"),
    ],
)
def test_a_request_beyond_the_bounds_is_refused_by_name(change, complaint):
    request = Request(**{"prompt": np.array([1], np.int32), "params": SamplingParams()} | change)
    command = decode_command(bodies(encode_command(Submit(5, request)))[0])
    assert isinstance(command, Refuse)
    assert command.number == 5
    assert complaint in command.message


@pytest.mark.parametrize("change", [{"priority": 1 << 70}, {"grammar": Grammar("regex", "\ud800")}])
def test_what_cannot_be_written_is_the_callers_error(change):
    request = Request(np.array([1], np.int32), SamplingParams(), **change)
    with pytest.raises(RequestError):
        encode_command(Submit(5, request))


def test_parameters_are_checked_again_where_they_arrive():
    good = bodies(encode_command(Submit(5, Request(np.array([1], np.int32), SamplingParams(top_p=0.625)))))[0]
    bad = good.replace(msgspec.msgpack.encode(0.625), msgspec.msgpack.encode(7.0))
    assert bad != good
    assert decode_command(bad) == Refuse(5, "top_p must be a number from 1e-06 to 1.0, got 7.0", "top_p")


def test_a_message_of_the_wrong_side_is_refused():
    for data in (encode_event(Stopped("x")), frame(Begin(Options(), True, 0)), b"\0\0\0\0", b"\0\0\0\1\xc1"):
        with pytest.raises(ProtocolError):
            decode_command(bodies(data)[0])
    with pytest.raises(ProtocolError):
        EventReader().read(bodies(encode_command(Shutdown()))[0])
    with pytest.raises(ProtocolError):
        decode_begin(bodies(encode_command(Shutdown()))[0])
    with pytest.raises(ProtocolError, match="must be one of"):
        decode_begin(msgspec.msgpack.encode(["begin", {"dtype": "int3"}, True, 0]))


@pytest.mark.parametrize(
    "message",
    [
        Outputs([Output(-1, 3)], {}),
        Outputs([Output(1, 1 << 31)], {}),
        Outputs([Output(1, 3, -1.0, [(4, -1.0)] * 33)], {}),
        Outputs([Output(1, 3)], {-1: Report()}),
        Outputs([Output(1, 3)], {1: Report(cached_tokens=-1)}),
        Outputs([Output(1, None, error="e" * (1 << 20) + "e")], {}),
        ScoresPiece(1, 2, b"\0" * 8, b"\0" * 16, b"\0" * 12),
        ScoresPiece(1, 0, b"\0" * 7, b"", b""),
    ],
)
def test_outputs_beyond_the_bounds_are_refused(message):
    with pytest.raises(ProtocolError):
        EventReader().read(bodies(frame(message))[0])


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,  # an array in an array in an array
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff\xa3end",  # an array of four milliards
        b"\x93\xa7replies\xdd\xff\xff\xff\xff\x01",
        b"\x93\xa6submit\x01\xc6\xff\xff\xff\xff",  # bytes without end
        b"\x93\xa6submit\x01" + b"\x91" * 100_000,
        b"\x94\xa7replies\x90\x90\x81\x01" + b"\x91" * 100_000 + b"\x01",
        b"",
    ],
)
def test_depth_and_length_that_are_only_claimed_cost_nothing(body):
    for read in (decode_command, decode_begin, EventReader().read):
        with pytest.raises(ProtocolError):
            read(body)


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """A valid body with some bytes changed, cut out or put in; or no valid body at all."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=60))
    body = bytearray(draw(good))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(body)))
        body[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(body)


def command_bodies() -> st.SearchStrategy[bytes]:
    return commands.filter(lambda c: not isinstance(c, Shutdown)).map(lambda c: bodies(encode_command(c))[0])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(damaged(command_bodies()))
def test_a_damaged_command_is_a_command_or_a_protocol_error(body):
    with suppress(ProtocolError):
        decode_command(body)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(damaged(events.map(lambda event: bodies(encode_event(event))[-1])))
def test_a_damaged_event_is_an_event_or_a_protocol_error(body):
    with suppress(ProtocolError):
        EventReader().read(body)


@pytest.fixture(scope="module")
def engine():
    return load_engine(Options(**tiny_model.OPTIONS, max_length=24, memory="16MiB", threads=1), progress=False)[0]


SANE = Submit((1 << 62) - 12345, Request(np.array([5], np.int32), SamplingParams(max_tokens=3, temperature=0.0)))


def answer_to_sane(engine, *others) -> list[int]:
    told: list[object] = []
    assert Service(engine, told.append, vocab_size=259).run(Once([*others, SANE]))
    return [o.token for event in told if isinstance(event, Outputs) for o in event.outputs if o.sequence == SANE.number]


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(nonsense=st.lists(damaged(command_bodies()), max_size=8))
def test_an_engine_that_is_sent_nonsense_still_answers(engine, nonsense):
    front, back = socket.socketpair()
    with front, back:
        for body in nonsense:
            front.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)
        front.sendall(encode_command(End(0)))
        sense = SocketInbox(back).take(wait=True)
    assert sense[-1] == End(0)
    assert answer_to_sane(engine, *sense) == answer_to_sane(engine)
    assert engine.stats()["leases"] == 0


class Once:
    """Gives its commands, and ends the service when all is answered."""

    def __init__(self, commands: list[object]) -> None:
        self._commands = commands

    def put(self, command: object) -> None:
        self._commands.append(command)

    def take(self, wait: bool) -> list[object]:
        given, self._commands = self._commands, []
        return given or ([Shutdown()] if wait else [])


def test_a_frame_without_end_ends_the_service():
    front, back = socket.socketpair()
    with front, back:
        front.sendall(b"\xff\xff\xff\xff rest")
        assert SocketInbox(back).take(wait=True) == [Shutdown()]


def test_the_fronts_end_is_a_shutdown():
    front, back = socket.socketpair()
    with back:
        front.close()
        assert SocketInbox(back).take(wait=True) == [Shutdown()]
