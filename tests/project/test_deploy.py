"""Deployment files: every option, port, path and route in them is one that the project has."""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import pairwise

import pytest
import yaml

from tests.support.deployment import DEPLOY, complaints, documents, instructions, is_sent, served
from tests.support.fences import ROOT
from weft.cli.main import parse
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions, trusted_hosts
from weft.cli.sources import collect
from weft.ray.deployments import MARGIN_SECONDS
from weft.ray.settings import parse as parse_fleet
from weft.server.access.guard import OPEN_ROUTES

DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CACHES = ("XDG_CACHE_HOME", "HF_HOME")
GPU_CACHES = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


def open_paths() -> set[str]:
    return {path for method, path in OPEN_ROUTES if method == "GET"}


# images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_follows_the_rules_of_a_linter(name):
    assert complaints((DEPLOY / name).read_text()) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("FROM python:latest", "pinned"),
        ("FROM python:3", "pinned"),
        ("RUN apt-get update && apt-get install --yes --no-install-recommends gcc", "lists"),
        ("RUN apt-get update && apt-get install --yes gcc && rm -rf /var/lib/apt/lists/*", "recommended"),
        ("RUN pip install torch", "cache"),
        ("USER root", "root"),
        ("ADD x y", "COPY"),
    ],
)
def test_the_rules_find_what_breaks_them(line, complaint):
    text = (DEPLOY / "Dockerfile").read_text()
    assert any(complaint in each for each in complaints(f"{text}\n{line}\n"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_exists_and_is_sent_to_the_builder(name):
    ignored = (DEPLOY / f"{name}.dockerignore").read_text()
    steps = instructions((DEPLOY / name).read_text())
    copied = [w for s in steps if s.name == "COPY" and "--from" not in s.text for w in s.words[:-1]]
    for_kernels = {"MANIFEST.in", "release"} if name == "Dockerfile" else set()
    assert {"pyproject.toml", "README.md", "LICENSE", "weft"} | for_kernels == set(copied)
    for path in copied:
        assert (ROOT / path).exists()
        assert is_sent(path, ignored), path
    for path in ("weft/kernels/native/pool.h", "weft/builtin/model/config.json"):
        assert is_sent(path, ignored), path
    for path in ("deploy/weft.key", ".git/config", "tests/project/test_deploy.py", "weft/cli/__pycache__/x.pyc"):
        assert not is_sent(path, ignored), path


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_serves_where_it_says_and_its_health_check_needs_no_key(name):
    steps = {step.name: step for step in instructions((DEPLOY / name).read_text())}
    assert steps["ENTRYPOINT"].words == ["weft"]
    options = served(steps["CMD"].words)
    assert (options.host, str(options.port)) == ("0.0.0.0", steps["EXPOSE"].text)
    [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", steps["HEALTHCHECK"].text)
    assert (int(port), path in open_paths()) == (options.port, True)


@pytest.mark.parametrize(("name", "caches"), [("Dockerfile", CACHES), ("Dockerfile.cuda", CACHES + GPU_CACHES)])
def test_everything_that_an_image_writes_is_in_its_volume(name, caches):
    steps = {step.name: step for step in instructions((DEPLOY / name).read_text())}
    variables = dict(word.partition("=")[::2] for word in steps["ENV"].words)
    volume = steps["VOLUME"].text
    assert all(variables[each].startswith(volume) for each in (*caches, "HOME"))
    [user] = re.findall(r"useradd --uid (\d+)", (DEPLOY / name).read_text())
    assert steps["USER"].text == f"{user}:{user}"


def test_images_install_what_the_project_asks_for():
    cpu, cuda = ((DEPLOY / name).read_text() for name in DOCKERFILES)
    [torch] = [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert f'"{torch}"' in cpu
    assert re.search(r'ARG TORCH_INDEX="https://\S+/cpu"', cpu)
    # A compiler is needed to build, and not to run.
    build, image = cpu.split("FROM ")[1:]
    assert "g++" in build
    assert "g++" not in image
    assert '".[${EXTRAS}]"' in cuda
    offered = re.findall(r"EXTRAS=([\w,]+)", cuda + (DEPLOY / "kubernetes/weft-ray.yaml").read_text())
    assert {"cuda", "ray"} == {extra for each in offered for extra in each.split(",")}
    assert {"cuda", "ray"} <= PROJECT["optional-dependencies"].keys()


@pytest.mark.slow
def test_the_first_stage_builds_a_wheel_with_all_that_the_project_needs(tmp_path):
    """The image's own command, on the files that the builder gets."""
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("weft", "release"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    runs = [s.text for s in instructions((DEPLOY / "Dockerfile").read_text()) if "release/wheel.py" in s.text]
    command = shlex.split(runs[0].removeprefix("python ").replace("/wheels", str(wheels)))
    subprocess.run([sys.executable, *command, "--no-isolation", "--here"], cwd=source, check=True, capture_output=True)
    [wheel] = wheels.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"weft/kernels/native/prebuilt/kernels-\w+-\w+-\w+\.so", name) for name in names)
    for path in ("weft/kernels/native/pool.h", "weft/builtin/model/config.json", "weft/cli/main.py"):
        assert path in names


# compose --------------------------------------------------------------------------------------------------------------

[COMPOSE] = documents("compose.yaml")
SERVICES = COMPOSE["services"]


def with_defaults(words: list[str]) -> list[str]:
    """Return a command with `${NAME:-default}` as its default."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


@pytest.mark.parametrize("name", ["weft", "weft-gpu"])
def test_compose_starts_a_server_that_exists_with_a_key(name):
    service = SERVICES[name]
    options = served(with_defaults(service["command"]))
    assert service["ports"] == [f"127.0.0.1:{options.port}:{options.port}"]
    assert options.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert COMPOSE["secrets"].keys() == set(service["secrets"])
    assert service["volumes"] == ["cache:/cache"]
    assert service["read_only"] is True
    assert "cache" in COMPOSE["volumes"]
    assert int(service["stop_grace_period"].removesuffix("s")) > options.drain_seconds
    assert with_defaults([service["build"]["dockerfile"]]) == ["deploy/Dockerfile"]
    # Prometheus and probes name the server as they reach it.
    assert trusted_hosts(options, has_keys=True) == ()


def test_compose_scrapes_the_served_port_with_the_servers_key():
    options = served(with_defaults(SERVICES["weft"]["command"]))
    [job] = documents("compose/prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"weft:{options.port}"]}]
    assert SERVICES["weft-gpu"]["networks"]["default"]["aliases"] == ["weft"]
    assert job["authorization"]["credentials_file"] == options.api_key_file
    assert job["metrics_path"] == "/metrics"
    assert SERVICES["prometheus"]["secrets"] == SERVICES["weft"]["secrets"]
    [alone] = documents("prometheus.yml")[0]["scrape_configs"]
    assert alone["static_configs"] == [{"targets": [f"127.0.0.1:{options.port}"]}]


def test_files_that_compose_mounts_exist_where_their_readers_look():
    mounts = {}
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source, target, *mode = mount.split(":")
            if source.startswith("./"):
                assert (DEPLOY / source).is_file(), source
                assert mode == ["ro"]
                mounts[target] = source
    config = SERVICES["prometheus"]["command"][0].removeprefix("--config.file=")
    folder = config.rpartition("/")[0]
    rules = documents(mounts[config])[0]["rule_files"]
    assert all(f"{folder}/{rule}" in mounts for rule in rules)
    [provider] = documents("grafana/dashboards.yaml")[0]["providers"]
    assert f"{provider['options']['path']}/grafana-weft.json" in mounts
    assert {target for target in mounts if "/provisioning/" in target} == {
        "/etc/grafana/provisioning/datasources/weft.yaml",
        "/etc/grafana/provisioning/dashboards/weft.yaml",
    }


def test_grafana_reads_prometheus_and_images_are_pinned():
    [source] = documents("grafana/datasources.yaml")[0]["datasources"]
    [port] = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    assert source["type"] == "prometheus"
    assert all(re.search(r":v?\d+\.\d+\.\d+$", s["image"]) for s in SERVICES.values() if "image" in s)


def test_grafana_has_no_password_that_everybody_knows():
    password = SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    # Compose refuses to start without the variable.
    assert re.fullmatch(r"\$\{GRAFANA_PASSWORD:\?[^}]+\}", password)
    assert "export GRAFANA_PASSWORD=" in (DEPLOY / "compose.yaml").read_text()


def test_the_key_of_compose_is_never_committed():
    assert "deploy/weft.key" in (ROOT / ".gitignore").read_text().split()


# Kubernetes -----------------------------------------------------------------------------------------------------------

OBJECTS = {each["kind"]: each for each in documents("kubernetes/weft.yaml")}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def options_of_pod():
    given = vars(parse(CONTAINER["args"]))
    return read_options(ServeOptions, collect(ServeOptions, given, OBJECTS["ConfigMap"]["data"], ()).values)


def test_a_pod_starts_a_server_that_exists():
    options = options_of_pod()
    assert options.model == OBJECTS["ConfigMap"]["data"]["WEFT_MODEL"]
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": options.port}]
    assert POD["terminationGracePeriodSeconds"] > options.drain_seconds + 5
    assert trusted_hosts(options, has_keys=True) == ()


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_a_route_without_a_key_at_the_served_port(probe):
    asked = CONTAINER[probe]["httpGet"]
    assert asked["path"] in open_paths()
    assert asked["port"] == CONTAINER["ports"][0]["name"]
    assert CONTAINER[probe]["timeoutSeconds"] < CONTAINER[probe]["periodSeconds"]


def test_a_first_start_may_take_as_long_as_under_systemd():
    probe = CONTAINER["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert OBJECTS["Deployment"]["spec"]["strategy"]["type"] == "Recreate"


def test_a_pod_finds_its_key_its_caches_and_its_settings():
    mounts = {mount["name"]: mount for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert options_of_pod().api_key_file == f"{mounts['keys']['mountPath']}/keys"
    manifest = (DEPLOY / "kubernetes/weft.yaml").read_text()
    assert f"secret generic {volumes['keys']['secret']['secretName']} --from-literal=keys=" in manifest
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    settings = OBJECTS["ConfigMap"]
    assert CONTAINER["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    for name in CACHES + GPU_CACHES:
        assert settings["data"][name].startswith(mounts["cache"]["mountPath"])


def test_a_pod_has_no_more_rights_than_it_needs():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert f"USER {POD['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile.cuda").read_text()
    inner = CONTAINER["securityContext"]
    assert inner["readOnlyRootFilesystem"] is True
    assert inner["allowPrivilegeEscalation"] is False
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False
    assert POD["enableServiceLinks"] is False
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "memory" in CONTAINER["resources"]["requests"]


def test_the_service_sends_requests_to_the_pods_port():
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    service = OBJECTS["Service"]
    assert service["spec"]["selector"] == labels == OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(options_of_pod().port)


# KubeRay --------------------------------------------------------------------------------------------------------------

# What the operator knows of the parts that the file uses, by the reference of its API (KubeRay 1.6).
RAY_SERVICE = {"serveConfigV2", "rayClusterConfig", "serviceUnhealthySecondThreshold"}
RAY_SERVICE |= {"deploymentUnhealthySecondThreshold", "upgradeStrategy", "serveService", "excludeHeadPodFromServeSvc"}
RAY_CLUSTER = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec"}
RAY_CLUSTER |= {"workerGroupSpecs", "headServiceAnnotations", "gcsFaultToleranceOptions", "suspend"}
HEAD_GROUP = {"rayStartParams", "template", "serviceType", "headService", "enableIngress"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "numOfHosts"}
SERVE_CONFIG = {"proxy_location", "http_options", "grpc_options", "logging_config", "applications"}
APPLICATION = {"name", "route_prefix", "import_path", "args", "runtime_env", "deployments"}

RAY = {each["kind"]: each for each in documents("kubernetes/weft-ray.yaml")}
CLUSTER = RAY["RayService"]["spec"]["rayClusterConfig"]
HEAD, [WORKERS] = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]
SERVE = yaml.safe_load(RAY["RayService"]["spec"]["serveConfigV2"])
[APPLIED] = SERVE["applications"]


def pod_of(group):
    spec = group["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def test_the_operator_knows_every_key():
    assert RAY["RayService"]["apiVersion"] == "ray.io/v1"
    assert RAY["RayService"]["spec"].keys() <= RAY_SERVICE
    assert CLUSTER.keys() <= RAY_CLUSTER
    assert HEAD.keys() <= HEAD_GROUP
    assert WORKERS.keys() <= WORKER_GROUP
    assert SERVE.keys() <= SERVE_CONFIG
    assert APPLIED.keys() <= APPLICATION


def test_the_application_is_one_that_can_be_built():
    module, name = APPLIED["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    settings = parse_fleet(APPLIED["args"])
    assert settings.engine_options("a").model == settings.serve_options.model


def test_replicas_fit_on_the_workers_and_the_ingress_beside_them():
    settings = parse_fleet(APPLIED["args"])
    _, worker = pod_of(WORKERS)
    room = worker["resources"]["limits"]
    assert settings.gpus_per_replica == room["nvidia.com/gpu"]
    assert settings.cpus + settings.ingress.cpus <= int(room["cpu"])
    assert WORKERS["minReplicas"] <= settings.autoscaling.min <= settings.autoscaling.max <= WORKERS["maxReplicas"]
    assert HEAD["rayStartParams"]["num-cpus"] == "0"


def test_workers_find_keys_and_caches_and_drain_before_they_end():
    settings = parse_fleet(APPLIED["args"])
    pod, worker = pod_of(WORKERS)
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert settings.serve_options.api_key_file == f"{mounts['keys']}/keys"
    assert volumes["keys"]["secret"] == POD["volumes"][-1]["secret"]
    assert mounts["cache"] == "/cache"
    assert mounts.keys() == volumes.keys()
    assert pod["terminationGracePeriodSeconds"] > settings.serve_options.drain_seconds + MARGIN_SECONDS


@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "worker"])
def test_pods_of_ray_have_no_more_rights_than_they_need(group):
    pod, container = pod_of(group)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile.cuda").read_text()
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # What Ray and Weft write are these folders: `HOME` is in the first, Ray's sockets and logs are in the second.
    assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert not any("serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["serve"] == SERVE["http_options"]["port"]
    for probe in ("readinessProbe", "livenessProbe"):
        port = container[probe]["httpGet"]["port"]
        assert isinstance(port, int) or port in ports


def test_only_the_autoscaler_of_ray_has_a_token_for_kubernetes():
    options = CLUSTER["autoscalerOptions"]
    assert options["securityContext"] == pod_of(HEAD)[1]["securityContext"]
    volumes = {volume["name"]: volume for volume in HEAD["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in options["volumeMounts"]}
    token = mounts["/var/run/secrets/kubernetes.io/serviceaccount"]["projected"]["sources"]
    # As Kubernetes itself would mount it.
    assert [set(source) for source in token] == [{"serviceAccountToken"}, {"configMap"}, {"downwardAPI"}]
    assert token[0]["serviceAccountToken"]["path"] == "token"
    assert {"/cache", "/tmp"} <= mounts.keys()


def test_only_the_api_of_a_ray_cluster_is_open():
    policy = RAY["NetworkPolicy"]["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert all(group["template"]["metadata"]["labels"] == labels for group in (HEAD, WORKERS))
    open_to_all = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": SERVE["http_options"]["port"]}]]
    assert CLUSTER["authOptions"] == {"mode": "token"}


# systemd --------------------------------------------------------------------------------------------------------------


def unit() -> dict[str, str]:
    text = (DEPLOY / "weft.service").read_text().replace("\\\n", " ")
    reader = configparser.RawConfigParser(strict=False)
    reader.optionxform = str
    reader.read_string(text)
    return dict(reader["Service"])


def test_the_unit_starts_a_server_that_exists_and_waits_long_enough_for_it():
    service = unit()
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/weft")
    options = served(arguments)
    assert options.api_key_file == f"%d/{service['LoadCredential'].partition(':')[0]}"
    assert float(service["WatchdogSec"]) > options.front_timeout
    assert float(service["TimeoutStopSec"]) > options.drain_seconds
    cache = dict(pair.split("=") for pair in service["Environment"].split())["XDG_CACHE_HOME"]
    assert cache == f"/var/cache/{service['CacheDirectory']}"


# the page -------------------------------------------------------------------------------------------------------------


def test_the_page_about_serving_explains_every_file():
    page = (ROOT / "docs" / "serve.md").read_text()
    for name in ("weft.service", "Dockerfile", "Dockerfile.cuda", "compose.yaml", "kubernetes/weft.yaml"):
        assert f"](../deploy/{name})" in page, name


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cuda", "compose.yaml", "kubernetes/weft.yaml"])
def test_commands_in_headers_name_files_that_exist(file):
    header = "\n".join(line for line in (DEPLOY / file).read_text().splitlines() if line.startswith("#"))
    for word, following in pairwise(header.split()):
        if word == "-f":
            assert (ROOT / following).is_file(), following
