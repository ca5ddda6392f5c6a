"""Weft on Ray Serve, without Ray: settings, the list of replicas, scaling, and a whole fleet in one process."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import fields
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from tests.support.models import tiny_model
from tests.support.servers.backends import in_loop
from tests.support.servers.held_steps import SECONDS, HeldSteps
from weft.base.errors import EngineStopped, OptionError
from weft.base.options import Options
from weft.cli.serve import FrontOptions, ServeOptions
from weft.fleet.member import MemberState
from weft.ray import build
from weft.ray.ingress import IngressApp
from weft.ray.members import LIFE_SECONDS, Announcement, Follower, MemberList
from weft.ray.replica import EngineReplica
from weft.ray.scaling import LOAD, QueueMeter, load_of, wanted_replicas
from weft.ray.settings import ELSEWHERE, MAX_BYTES, Autoscaling, parse, read

SMALL = {**tiny_model.OPTIONS, "memory": "16MiB", "max_length": 512, "max_sequences": 4, "in_process": True}


# settings -------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_by_its_argument_or_by_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "fleet.yaml"
    path.write_text("options: {model: here, memory: 2GiB, api_key: [a, b]}\nautoscaling: {max: 3}\ncpus: 2\n")
    found = read({"config": str(path)})
    assert (found.serve_options.model, found.serve_options.api_key) == ("here", ("a", "b"))
    assert found.autoscaling == Autoscaling(max=3)
    monkeypatch.setenv("WEFT_FLEET", str(path))
    assert read({}) == found == parse(found.plain())
    monkeypatch.delenv("WEFT_FLEET")
    with pytest.raises(OptionError, match="pass config=FILE"):
        read({})
    with pytest.raises(OptionError, match="omit the other arguments"):
        read({"config": str(path), "cpus": 1})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"replica": 2}, "replica is unknown; did you mean replicas?"),
        ({"options": {"max_lenght": 5}}, "options.max_lenght is unknown; did you mean max_length?"),
        ({"autoscaling": {"maximum": 5}}, "autoscaling.maximum is unknown"),
        ({"options": {"memory": "many"}}, "options.memory must be a size"),
        ({"options": {"cache": "yes"}}, "options.cache must be true or false, got yes"),
        ({"options": {"max_open_requests": True}}, "options.max_open_requests must be an integer"),
        ({"options": {"api_key": "one"}}, "options.api_key must be a list of strings"),
        ({"options": {"port": 80}}, "options.port belongs to Ray Serve's proxies"),
        ({"options": {"disk": "file"}}, "options.disk is not supported on Ray"),
        ({"options": ["model"]}, "options must be a mapping"),
        (["model"], "the settings must be a mapping"),
        ({"replicas": 0}, "replicas must be an integer from 1"),
        ({"replicas": 2, "autoscaling": {}}, "replicas and autoscaling exclude each other"),
        ({"autoscaling": {"min": 3, "max": 2}}, "autoscaling.max must be at least min"),
        ({"autoscaling": {"min": 0}}, "autoscaling.min must be an integer from 1"),
        ({"gpus": 2}, "gpus must be a number from 0 to 1"),
        ({"gpus": 1, "options": {"device": "cpu"}}, "gpus is 1 but options.device is cpu"),
        ({"gpus": 0.5}, "set memory_fraction to 0.5 or less"),
        ({"gpus": 1, "options": {"tensor_parallel": 2}}, "gpus is 1 but must be 2, one for each rank"),
        ({"gpus": 3, "options": {"tensor_parallel": 2}}, "gpus must be a number from 0 to 2"),
        ({"options": {"role": "prefill"}}, "options.role is not set by replica: with the section prefill"),
        ({"options": {"prefill_replicas": 1}}, "options.prefill_replicas must be at the top level"),
        ({"options": {"arrivals": "1GiB"}}, "options.arrivals needs the section prefill"),
        ({"options": {"transfer": "nixl"}}, "options.transfer is not supported on Ray"),
        ({"prefill": {"secret_file": "x"}, "options": {"arrivals": "much"}}, "arrivals must be a size"),
        ({"prefill": {"replicas": 1}}, "prefill.secret_file must name a file with a secret"),
        ({"prefill": {"replicas": 0, "secret_file": "x"}}, "prefill.replicas must be an integer from 1"),
        ({"prefill": {"secret_file": "x"}, "options": {"cache": False}}, "prefill cannot be combined with no cache"),
        ({"prefill": {"secret_file": "x"}, "options": {"in_process": True}}, "prefill cannot be combined with in_proc"),
        ({"ingress": {"replicas": 17}}, "ingress.replicas must be an integer from 1 to 16"),
    ],
)
def test_wrong_settings_are_refused_by_their_place(given, complaint):
    with pytest.raises(OptionError) as found:
        parse(given)
    assert complaint in str(found.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: &x [1]\nb: [*x, *x]", "must not use aliases"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("#" * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes"),
        ("[" * 2000, "not valid YAML"),
    ],
)
def test_a_file_that_is_no_plain_small_yaml_is_refused(tmp_path, text, complaint):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(OptionError, match=complaint):
        read({"config": str(path)})


def test_every_option_of_weft_serve_has_an_effect_or_is_refused():
    known = {each.name for options in (Options, FrontOptions) for each in fields(options)}
    others = {each.name for each in fields(ServeOptions)} - known - ELSEWHERE.keys()
    assert others == {"engine_timeout", "in_process", "arrivals"}, (
        "an option that weft.ray must honour, or refuse by its name"
    )


def test_an_engine_gets_its_device_and_threads_by_its_resources_and_a_seed_of_its_own():
    one, other = (parse({"cpus": 3}).engine_options(name) for name in ("a", "b"))
    assert (one.device, one.threads) == ("cpu", 3)
    assert one.seed != other.seed
    assert parse({"options": {"weights": "dummy", "seed": 5}}).engine_options("a").seed == 5, "it draws the weights"
    assert parse({"gpus": 1}).engine_options("a").device == "cuda"
    assert parse({"options": {"device": "cuda"}}).gpus_per_replica == 1
    assert parse({"cpus": 3, "options": {"threads": 2}}).engine_options("a").threads == 2


def test_the_ranks_of_a_replica_have_a_gpu_each_or_share_its_cpus():
    cut = parse({"options": {"device": "cuda", "tensor_parallel": 2}})
    assert (cut.gpus_per_replica, cut.engine_options("a").tensor_parallel) == (2, 2)
    assert parse({"cpus": 4, "options": {"tensor_parallel": 2}}).engine_options("a").threads == 2
    assert parse({"options": {"tensor_parallel": 2}}).engine_options("a").threads == 1


def test_replicas_have_roles_and_one_secret_if_there_are_prefill_engines(tmp_path):
    path = tmp_path / "secret"
    path.write_text("s" * 64)
    path.chmod(0o600)
    settings = parse({"prefill": {"secret_file": str(path)}, "options": {"arrivals": "32MiB"}})
    assert parse(settings.plain()) == settings
    found = [settings.transfer(role, "10.0.0.1") for role in ("prefill", "decode")]
    assert [(each.role, each.arrivals, each.host) for each in found] == [
        ("prefill", "32MiB", "10.0.0.1"),
        ("decode", "32MiB", "10.0.0.1"),
    ]
    assert found[0].secret == found[1].secret
    assert parse({}).transfer("decode", "10.0.0.1") is None
    with pytest.raises(OptionError, match=r"prefill.secret_file"):
        parse({"prefill": {"secret_file": str(tmp_path / "absent")}}).transfer("decode", "10.0.0.1")


def test_the_version_follows_the_engines_options_only():
    version = parse({"options": {"model": "a", "api_key": ["x"]}}).version
    assert version == parse({"options": {"model": "a"}, "replicas": 3}).version
    assert version != parse({"options": {"model": "b"}}).version


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"weft-serve\[ray\]"):
        build({"cpus": 1})


@pytest.mark.filterwarnings("ignore")
def test_deployments_get_what_the_settings_say():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'weft-serve[ray]'")
    from weft.ray.deployments import application, scale_of

    settings = parse({"gpus": 1, "cpus": 4, "autoscaling": {"min": 2, "max": 5}, "options": {"drain_seconds": 7}})
    assert scale_of(settings)["autoscaling_config"]["max_replicas"] == 5
    found = application(settings)._bound_deployment
    _, members, engine = found.init_args
    assert [each._bound_deployment.name for each in (members, engine)] == ["members", "engine"]
    deployed = engine._bound_deployment
    assert deployed.ray_actor_options == {"num_cpus": 4, "num_gpus": 1}
    assert deployed._deployment_config.graceful_shutdown_timeout_s > 7
    assert deployed._deployment_config.autoscaling_config.min_replicas == 2
    assert found.max_ongoing_requests > 1024


@pytest.mark.filterwarnings("ignore")
def test_prefill_engines_are_a_deployment_of_their_own_that_does_not_scale():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'weft-serve[ray]'")
    from weft.ray.deployments import application

    prefill = {"replicas": 3, "secret_file": "x"}
    found = application(parse({"prefill": prefill, "autoscaling": {"min": 2}}))._bound_deployment
    _, _, decode, pool = (getattr(each, "_bound_deployment", None) for each in found.init_args)
    assert (decode.name, pool.name) == ("engine", "prefill")
    assert (decode.init_args[2:], pool.init_args[2:]) == ((), ("prefill",))
    assert pool._deployment_config.num_replicas == 3
    assert pool._deployment_config.autoscaling_config is None


# scaling --------------------------------------------------------------------------------------------------------------


def test_the_wanted_number_of_replicas_is_the_sum_of_their_loads():
    context = SimpleNamespace(target_num_replicas=4, aggregated_metrics={LOAD: {"a": 1.5, "b": 1.0}})
    assert wanted_replicas(context) == (2.5, {})
    assert wanted_replicas(SimpleNamespace(target_num_replicas=4, aggregated_metrics={})) == (4, {})
    targets = Autoscaling(target_open=4, target_waiting_tokens=100)
    assert [load_of(8, 0, targets), load_of(1, 300, targets)] == [2, 3]


@in_loop
async def test_a_replica_reports_waiting_tokens_until_the_first_output_and_fails_its_check_at_its_end(monkeypatch):
    steps = HeldSteps(monkeypatch)
    replica = engine_replica("a", MemberList())
    await replica.backend.start()
    try:
        meter: QueueMeter = replica.backend
        steps.hold()
        stream = await meter.submit(request := tiny_request())
        assert meter.waiting_tokens == len(request.prompt)
        steps.release()
        await anext(stream)
        assert meter.waiting_tokens == 0
        replica.check()
    finally:
        await replica.backend.stop(0)
    with pytest.raises(EngineStopped):
        replica.check()


def tiny_request():
    from weft.base.sampling import SamplingParams
    from weft.engine.request import Request

    return Request(prompt=np.array([1, 2, 3], np.int32), params=SamplingParams(max_tokens=2))


# replicas -------------------------------------------------------------------------------------------------------------


def announcement(name: str, **more) -> Announcement:
    return Announcement(**{"name": name, "host": "h", "port": 1, "secret": "s", "version": "v"} | more)


@in_loop
async def test_an_announcement_that_is_not_repeated_is_forgotten():
    now = [0.0]
    found = MemberList(lambda: now[0])
    await found.announce({"name": "a"})
    now[0] = LIFE_SECONDS - 1
    await found.announce({"name": "b"})
    assert [each["name"] for each in await found.members()] == ["a", "b"]
    now[0] = LIFE_SECONDS + 1
    assert [each["name"] for each in await found.members()] == ["b"]


class RecordingFleet:
    """Notes who joins and who leaves."""

    def __init__(self) -> None:
        self.members = []
        self.log = []

    def add(self, name, backend) -> None:
        self.log.append(f"+{name}")
        self.members.append(SimpleNamespace(name=name, backend=backend, state=MemberState.UP))

    def remove(self, name, seconds) -> None:
        self.log.append(f"-{name}")


def test_members_follow_the_list_and_their_connections():
    fleet, backends, now = RecordingFleet(), {}, [0.0]

    def connect(each):
        return backends.setdefault(each.name, SimpleNamespace(healthy=True))

    follower = Follower(fleet, "v", connect, 5.0, clock=lambda: now[0])
    follower.apply([announcement("a"), announcement("b"), announcement("old", version="w")])
    follower.apply([])
    assert fleet.log == ["+a", "+b"], "a lost list takes no connected replica away"
    backends["b"].healthy = False
    follower.apply([announcement("a"), announcement("b")])
    assert fleet.log == ["+a", "+b"], "a replica on the list may come back"
    follower.apply([announcement("a", leaving=True)])
    assert fleet.log == ["+a", "+b", "-a"], (
        "one that is silent for a moment, while the list is empty, finishes its work"
    )
    now[0] = LIFE_SECONDS
    follower.apply([announcement("a", leaving=True)])
    assert fleet.log == ["+a", "+b", "-a", "-b"]
    fleet.members.clear()
    follower.apply([announcement("a", leaving=True)])
    follower.apply([announcement("a")])
    assert fleet.log == ["+a", "+b", "-a", "-b"], "a replica that leaves does not return under its name"
    follower.apply([announcement("b")])
    assert fleet.log[-1] == "+b", "one that was only out of reach does"


def test_a_replica_that_was_out_of_reach_twice_has_its_time_twice():
    fleet, backend, now = RecordingFleet(), SimpleNamespace(healthy=True), [0.0]
    follower = Follower(fleet, "v", lambda each: backend, 5.0, clock=lambda: now[0])
    follower.apply([announcement("a")])
    for step in range(8):
        now[0] += LIFE_SECONDS - 1
        backend.healthy = step % 2 == 0
        follower.apply([])
    assert fleet.log == ["+a"]


@in_loop
async def test_without_an_answer_of_the_list_everything_stays():
    fleet = RecordingFleet()
    follower = Follower(fleet, "v", lambda each: SimpleNamespace(healthy=False), 5.0)
    follower.apply([announcement("a")])

    async def broken():
        raise RuntimeError("the actor is dead")

    async def strange():
        return [{"name": "b"}]

    for list_of_replicas in (broken, strange):
        await follower.read(list_of_replicas)
    assert fleet.log == ["+a"]


# all of it in one process ---------------------------------------------------------------------------------------------


def engine_replica(name: str, members: MemberList) -> EngineReplica:
    return EngineReplica(parse({"options": SMALL}), name, "127.0.0.1", members.announce)


class Lifespan:
    """Runs an application's lifespan as Ray Serve does."""

    def __init__(self, app: IngressApp) -> None:
        self._told: asyncio.Queue = asyncio.Queue()
        self._said: asyncio.Queue = asyncio.Queue()
        self._running = asyncio.ensure_future(app({"type": "lifespan"}, self._told.get, self._said.put))

    async def tell(self, word: str) -> str:
        self._told.put_nowait({"type": f"lifespan.{word}"})
        return (await self._said.get())["type"]


@in_loop
async def test_an_ingress_serves_what_its_replicas_answer_while_they_come_and_go(monkeypatch):
    monkeypatch.setattr("weft.ray.members.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("weft.ray.replica.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("weft.ray.replica.READ_SECONDS", 0.05)
    monkeypatch.setattr("weft.ray.ingress.READ_SECONDS", 0.02)
    members = MemberList()
    app = IngressApp(parse({"options": SMALL}).plain(), lambda: members.members)
    lifespan = Lifespan(app)
    first = engine_replica("first", members)
    await first.start()
    assert await lifespan.tell("startup") == "lifespan.startup.complete"
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 4
        second = engine_replica("second", members)
        await second.start()
        async with asyncio.timeout(SECONDS):
            while 'weft_replica_up{replica="second"} 1.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
        # Ends when no router sends it anything any more.
        await first.stop()
        again = await client.post("/v1/completions", json=body)
        assert again.json()["choices"][0]["text"] == answer["choices"][0]["text"]
        assert first.backend.open == 0
    assert await lifespan.tell("shutdown") == "lifespan.shutdown.complete"
    await second.stop()


@in_loop
async def test_an_ingress_that_cannot_start_says_why():
    app = IngressApp({"options": {"reasoning": "x"}}, lambda: None)
    told: asyncio.Queue = asyncio.Queue()
    told.put_nowait({"type": "lifespan.startup"})
    said = []

    async def send(message) -> None:
        said.append(message)

    await app({"type": "lifespan"}, told.get, send)
    assert said[0]["type"] == "lifespan.startup.failed"
    assert "options.reasoning is unknown" in said[0]["message"]
