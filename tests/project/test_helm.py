"""The Helm chart: its values have a schema, and what it renders starts a server that exists, with few rights."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.support.deployment import DEPLOY, documents
from tests.support.fences import ROOT
from tests.support.helm import merged, render
from weft import __version__
from weft.base.errors import OptionError
from weft.base.hub.short_names import SHORT_NAMES
from weft.cli.main import COMMANDS, collected, parse
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions

CHART = DEPLOY / "helm" / "weft"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "autoscaled": {"autoscaling": {"enabled": True}, "cache": {"accessMode": "ReadWriteMany", "storageClass": "nfs"}},
    "on a CPU": {
        "resources": {"limits": {"memory": "8Gi"}},
        "cache": {"enabled": False},
        "hubToken": {"secret": "hub"},
    },
    # Helm reads `off` and `on` as booleans, and a large number as one with an exponent.
    "options": {
        "options": {
            "max-length": 1048576.0,
            "draft": False,
            "exact": True,
            "allowed-host": ["a", "*.b"],
            "cache": "on",
        },
        "replicas": 3,
        "drainSeconds": 120,
    },
}


def objects(given: dict[str, Any]) -> dict[str, Any]:
    values = merged(VALUES, given)
    texts = [render(path.read_text(), values) for path in sorted((CHART / "templates").glob("*.yaml"))]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {each["kind"]: each for each in found}


def options_of(given: dict[str, Any], folder: Path) -> ServeOptions:
    """Return the options of a pod, whose file has the place that the container's arguments name."""
    file = folder / "weft.yaml"
    file.write_text(objects(given)["ConfigMap"]["data"]["weft.yaml"] or "")
    _, container = container_of(given)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    args = [each.replace(f"{mounts['options']}/weft.yaml", str(file)) for each in container["args"]]
    return read_options(ServeOptions, collected(COMMANDS["serve"], vars(parse(args))).values)


def container_of(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = objects(given)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_rendered_starts_a_server_that_exists_and_is_probed(name, tmp_path):
    pod, container = container_of(VARIANTS[name])
    options = options_of(VARIANTS[name], tmp_path)
    assert options.model in SHORT_NAMES
    assert container["ports"] == [{"name": "http", "containerPort": options.port}]
    assert pod["terminationGracePeriodSeconds"] > options.drain_seconds + 5
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert options.api_key_file == f"{mounts['keys']}/keys"
    assert all(each["value"].startswith(mounts["cache"]) for each in container["env"] if "value" in each)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert container[probe]["timeoutSeconds"] < container[probe]["periodSeconds"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@pytest.mark.parametrize("name", VARIANTS)
def test_a_pod_has_no_more_rights_than_it_needs(name):
    pod, container = container_of(VARIANTS[name])
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    inner = container["securityContext"]
    assert (inner["readOnlyRootFilesystem"], inner["allowPrivilegeEscalation"]) == (True, False)
    assert inner["capabilities"] == {"drop": ["ALL"]}


def test_options_are_a_config_file_whose_change_replaces_the_pods(tmp_path):
    found = options_of(VARIANTS["options"], tmp_path)
    assert (found.max_length, found.draft, found.exact, found.cache) == ("1048576", "off", True, True)
    assert found.allowed_host == ("a", "*.b")
    with pytest.raises(OptionError, match=r"weft.yaml:1: unknown option 'max-lenght'; did you mean max-length"):
        options_of({"options": {"max-lenght": 1}}, tmp_path)
    marks = {
        objects(given)["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/options"]
        for given in ({}, VARIANTS["options"], {"options": {"draft": False}})
    }
    assert len(marks) == 3


def test_values_decide():
    assert objects(VARIANTS["options"])["Deployment"]["spec"]["replicas"] == 3
    assert "PersistentVolumeClaim" not in objects(VARIANTS["on a CPU"])
    assert "HorizontalPodAutoscaler" not in objects({})
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in container_of(
        VARIANTS["on a CPU"]
    )[1]["env"]
    claim = objects(VARIANTS["autoscaled"])["PersistentVolumeClaim"]["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteMany"], "nfs")


def test_the_autoscaler_reads_a_metric_that_is_served_and_sets_the_replicas_alone():
    found = objects(VARIANTS["autoscaled"])
    [metric] = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert f"`{metric['pods']['metric']['name']}`" in (ROOT / "docs" / "metrics.md").read_text()
    assert "replicas" not in found["Deployment"]["spec"]
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]


def test_the_service_finds_the_pods():
    found = objects({})
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels == found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert found["Service"]["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_the_schema_admits_the_variants_and_refuses_misspelt_values():
    valid = jsonschema_rs.validator_for(SCHEMA)
    for given in VARIANTS.values():
        valid.validate(merged(VALUES, given))
    wrong = (
        {"modle": "x"},
        {"replicas": -1},
        {"cache": {"size": "many"}},
        {"image": {"tag": ""}},
        {"logLevel": "loud"},
    )
    for given in wrong:
        assert not valid.is_valid(merged(VALUES, given)), given


def test_the_chart_has_the_projects_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert VALUES["image"]["tag"] == f"cuda-{__version__}"


def test_our_renderer_refuses_what_it_does_not_know():
    with pytest.raises((AssertionError, KeyError)):
        render('{{ include "x" . }}', {})
    with pytest.raises(AssertionError):
        render("{{ end }}", {})
    assert render("a {{- if .Values.a }} b{{ else }} c{{ end }}", {"a": False}) == "a c"


@pytest.mark.parametrize("version", ["1.27.0", "1.37.0"])
def test_kubernetes_knows_every_field_of_the_manifests_and_of_what_is_rendered(version):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    found = [
        *documents("kubernetes/weft.yaml"),
        *(each for given in VARIANTS.values() for each in objects(given).values()),
    ]
    for each in found:
        kubernetes.validate(each, version, strict=True)
    wrong = merged(found[-1], {"spec": {"slector": {}}})
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, version, strict=True)


@pytest.mark.skipif(shutil.which("helm") is None, reason="Helm is not installed")
def test_helm_finds_nothing_wrong(tmp_path: Path):
    for name, given in VARIANTS.items():
        values = tmp_path / f"{name}.yaml"
        values.write_text(yaml.safe_dump(given))
        subprocess.run(["helm", "lint", "--strict", str(CHART), "--values", str(values)], check=True)
