"""Ranks as processes: they answer like one engine, none outlives the group, and a death is one clear error."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.models.engines import TINY, Ask, greedy, make_engine, seeded, serve, tokens
from tests.support.models.oracle import Oracle
from tests.support.runner.tensor_parallel import constrained_answers
from weft import LLM, SamplingParams
from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.base.errors import EngineStopped, ModelError
from weft.base.options import Options
from weft.base.plan import Captures, Plan, Sampling, StepDrafts
from weft.base.transfers import (
    Granted,
    Offer,
    Offered,
    ReceivingEnded,
    SendingEnded,
    StagedUnit,
    UnitReceived,
    UnitsSent,
)
from weft.memory.kinds import Kind
from weft.runner.ranks import part
from weft.runner.ranks.channel import (
    CopyUnits,
    FromRank,
    Happened,
    Launch,
    PartLoaded,
    ToRank,
    decode_plan,
    encode_plan,
    rank_channel,
)
from weft.runner.ranks.processes import RankProcesses
from weft.start import rank_loading, rank_process
from weft.wire.channel import Channel, ChannelClosed
from weft.wire.frames import framed
from weft.wire.versions import RANKS, VersionError

OPTIONS = {"memory": "32MiB", "max_length": 256, "threads": 1, "dtype": "float32", "progress": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
PROMPTS = [tokens(90, 1), tokens(7, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Oracle(TINY["nemotron_h"]).save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(folder, tmp_path):
    # With a tier, which a group that has lost a rank must close too.
    with LLM(str(folder), tensor_parallel=2, disk=str(tmp_path / "tier"), disk_size="16MiB", **OPTIONS) as llm:
        yield llm


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def loopback_only(number: int) -> bool:
    """Whether every TCP socket on which a process listens is bound to 127.0.0.1."""
    own = set()
    for name in os.listdir(f"/proc/{number}/fd"):
        # The descriptor of the listing itself is gone by now.
        with suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/{number}/fd/{name}"))
    lines = [line.split() for line in Path(f"/proc/{number}/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    return bool(listening) and all(address.startswith("0100007F:") for address in listening)


@pytest.mark.parametrize("expert_parallel", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_two_processes_answer_like_one_and_end_with_the_llm(expert_parallel, folder):
    with LLM(str(folder), **OPTIONS) as llm:
        alone = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with LLM(str(folder), tensor_parallel=2, expert_parallel=expert_parallel, **OPTIONS) as llm:
        numbers = [process.pid for process in llm.engine._device.others.processes]
        assert [is_alive(number) for number in numbers] == [True]
        assert loopback_only(numbers[0])
        assert loopback_only(os.getpid())
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert not any(map(is_alive, numbers))


@pytest.mark.parametrize(("asked", "expected"), [(0, 4), (3, 3)])
def test_a_rank_loads_with_its_share_of_the_cores(asked, expected, folder, monkeypatch):
    usual, found = torch.get_num_threads(), []

    def load_model(*_, **__):
        found.append(torch.get_num_threads())
        raise ModelError("enough was seen")

    monkeypatch.setattr(part, "available_cores", lambda: 8)
    monkeypatch.setattr(rank_loading, "load_model", load_model)
    try:
        with pytest.raises(ModelError, match="enough"):
            rank_loading.load_part(Options(model=str(folder), threads=asked), 1, 2)
        assert found == [expected]
    finally:
        torch.set_num_threads(usual)


@pytest.mark.thorough
def test_masks_that_follow_a_launch_reach_other_processes(folder):
    found = []
    for options in ({"depth": 0}, {"depth": 1, "tensor_parallel": 2}):
        with LLM(str(folder), **OPTIONS, **options) as llm:
            found.append(constrained_answers(llm.engine))
    assert found[0] == found[1]


@pytest.mark.thorough
def test_a_rank_that_dies_ends_the_group_with_one_error_that_names_it(pair, caplog):
    others = pair.engine._device.others
    pair.generate(PROMPTS, GREEDY, use_tqdm=False)
    os.kill(others.processes[0].pid, signal.SIGKILL)
    with pytest.raises(EngineStopped, match=r"rank 1 of 2 \(process \d+\) has ended with exit code -9"):
        pair.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [others.failure]
    assert others.processes[0].poll() is not None
    with pytest.raises(EngineStopped, match="no longer answers"):
        pair.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_a_model_that_cannot_be_cut_is_refused_before_any_process_starts(folder, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(RankProcesses, "__init__", never)
    with pytest.raises(ModelError, match="tensor_parallel is 3 but must divide the model's"):
        LLM(str(folder), tensor_parallel=3, **OPTIONS)


@pytest.mark.thorough
def test_a_rank_that_cannot_load_is_reported_with_its_number(folder):
    others = RankProcesses(2)
    try:
        others.load(Options(model=str(folder / "absent"), tensor_parallel=2))
        with pytest.raises(ModelError, match=r"rank 1: .*absent"):
            others.join(make_engine("llama").config, 0, 1)
    finally:
        others.close()
    assert others.processes[0].poll() is not None


# Plans on the wire ---------------------------------------------------------------------------------------------------


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Plan | Sampling | Captures | StepDrafts):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return type(one) is type(other) and one == other


def test_a_plan_arrives_as_it_was_sent(monkeypatch):
    engine = make_engine("falcon_h1", max_tokens_per_step=96)
    plans, launch = [], engine._device.launch
    monkeypatch.setattr(engine._device, "launch", lambda plan: plans.append(plan) or launch(plan))
    asks = [
        Ask(tokens(130, 1), greedy(4, logit_bias={5: 2.0}, repetition_penalty=1.2)),
        Ask(tokens(5, 2), seeded(4, 1, top_k=5, allowed_token_ids=range(90), bad_words=((3, 4),))),
        Ask(tokens(70, 3), greedy(2, prompt_logprobs=1), abort_after=2),
    ]
    serve(engine, asks)
    ours, theirs = map(rank_channel, socket.socketpair())
    for plan in plans:
        ours.send(Launch(encode_plan(plan)))
        assert same(plan, decode_plan(theirs.receive(ToRank).plan))
    assert len(plans) > 4


PAGE = StagedUnit(1, "page", 5, b"k" * 32, None, 64, b"t" * 16)


@pytest.mark.parametrize(
    "event",
    [
        Granted(1, 2, 3, True),
        UnitsSent(1, (PAGE,)),
        SendingEnded(1, None),
        SendingEnded(1, "why"),
        Offered(1, Offer((b"k" * 32,), b"t" * 16, b"g" * 16)),
        UnitReceived(1, 2),
        ReceivingEnded(1),
    ],
)
def test_an_event_of_a_transport_arrives_as_it_was_sent(event):
    ours, theirs = map(rank_channel, socket.socketpair())
    ours.send(Happened.of(event))
    assert theirs.receive(FromRank).event == event


def test_copies_arrive_as_they_were_sent():
    label = UnitLabel(b"k" * 32, None, 64, "regular", b"t" * 16)
    plan = CopyPlan(3, Direction.LOAD, (UnitCopy(Kind.PAGE, 1, 2),), 100, True, (label,), ((Kind.STATE, 4),), level=1)
    ours, theirs = map(rank_channel, socket.socketpair())
    ours.send(CopyUnits(8, plan))
    assert theirs.receive(ToRank) == CopyUnits(8, plan)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00", b""])
def test_bytes_that_are_no_message_close_the_channel(data):
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(framed(RANKS.greeting) + data)
        ours.close()
        with pytest.raises(ChannelClosed):
            rank_channel(theirs).receive(ToRank)


def test_ranks_of_different_versions_refuse_each_other_with_one_line():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        old, new = Channel(ours, replace(RANKS, version=1)), Channel(theirs, replace(RANKS, version=2))
        old.send(PartLoaded())
        new.send(PartLoaded())
        with pytest.raises(
            VersionError, match="the other process speaks 'weft ranks 2', not 'weft ranks 1'; start both"
        ):
            old.receive(FromRank)
        with pytest.raises(VersionError, match="the other process speaks 'weft ranks 1', not 'weft ranks 2'"):
            new.receive(FromRank)


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff", b"\0\0\0\3abc"])
def test_a_process_that_does_not_greet_is_refused(data):
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(data)
        ours.close()
        with pytest.raises((ChannelClosed, VersionError)):
            rank_channel(theirs).receive(ToRank)


def test_an_array_of_an_unknown_kind_is_refused():
    plan = encode_plan(make_plan())
    plan[1] = plan[1] | {"kind": "|O"}
    with pytest.raises(ChannelClosed, match="an array must be one of"):
        decode_plan(plan)


def make_plan() -> Plan:
    engine, plans = make_engine("llama"), []
    launch = engine._device.launch
    engine._device.launch = lambda plan: plans.append(plan) or launch(plan)
    serve(engine, [Ask(tokens(3, 1), greedy(1))])
    return plans[0]


SLOW_END = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace
from weft.start import rank_process

def close():
    # The main thread hears of the end too.
    threading.main_thread().join(0.5)
    Path(sys.argv[2]).write_text("durable")

def run_rank(channel, lifeline):
    lifeline.before_end = close
    channel.send(rank_process.PartJoined())
    channel.receive(rank_process.ToRank)

rank_process.run_rank = run_rank
rank_process.main()
"""


def test_a_rank_ends_when_what_it_has_saved_is_durable(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", SLOW_END, str(theirs.fileno()), str(tmp_path / "saved")]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        rank_channel(ours).receive(FromRank)
    assert process.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "durable"


def test_a_rank_that_ends_does_not_close_its_file_while_it_is_being_erased():
    lifeline, runner, closes = SimpleNamespace(before_end=None), SimpleNamespace(close=lambda: None), []
    part = SimpleNamespace(begin=lambda _: closes.append(lifeline.before_end))
    messages = iter([rank_process.BeginPart()])

    def receive(_):
        message = next(messages, None)
        if message is None:
            raise ChannelClosed("the first rank has ended")
        return message

    channel = SimpleNamespace(receive=receive, send=lambda _: None)
    with pytest.raises(ChannelClosed):
        rank_process._execute(channel, lifeline, part, runner, SimpleNamespace())
    assert closes == [None]
    assert lifeline.before_end is runner.close


async def server(folder: Path, ends: Callable[[subprocess.Popen[bytes], int], None]) -> None:
    """Start a server's engine process with two ranks, and end it in some way."""
    options = Options(model=str(folder), tensor_parallel=2, memory="32MiB", max_length=256, threads=1)
    backend = ProcessBackend(options, progress=False)
    await backend.start()
    engine = backend._process
    [rank] = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    await asyncio.to_thread(ends, engine, int(rank))
    await backend.stop(0)
    assert engine.poll() is not None
    assert not is_alive(int(rank))


@pytest.mark.slow
def test_a_servers_engine_process_ends_with_its_rank(folder):
    def ends(engine: subprocess.Popen[bytes], rank: int) -> None:
        os.kill(rank, signal.SIGKILL)
        assert engine.wait(60) == 1

    asyncio.run(server(folder, ends))


@pytest.mark.slow
def test_a_servers_ranks_end_with_it(folder):
    asyncio.run(server(folder, lambda engine, rank: None))
