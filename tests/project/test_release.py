"""What is released: what a wheel and a source distribution hold, how light the package is to import, the bill."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fences import ROOT
from weft import __version__
from weft.kernels.native import prebuilt

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "release" / f"{name}.py"))


def test_the_version_is_one():
    assert PROJECT["version"] == __version__ == "0.2.0"
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[4] == f"## {__version__} (unreleased)"


def wheel_of(folder: Path, name: str, *names: str) -> Path:
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as archive:
        for each in ("weft/py.typed", "weft/builtin/model/config.json", *names):
            archive.writestr(each, "")
    return wheel


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ((), None),
        (("tests/cli/test_cli.py",), "tests/cli/test_cli.py does not belong"),
        (("weft/tests/a.py",), "weft/tests/a.py does not belong"),
        (("benchmarks/start.py",), "benchmarks/start.py does not belong"),
        (("training/train.py",), "training/train.py does not belong"),
        (("examples/loop.py",), "examples/loop.py does not belong"),
        (("weft/kernels/native/prebuilt/kernels-avx2-a-b.so",), "has 1 libraries"),
    ],
)
def test_a_wheel_with_other_files_is_refused(tmp_path, names, complaint):
    found = program("wheel")["complaints"](wheel_of(tmp_path, "weft_serve-0.2.0-py3-none-any.whl", *names))
    assert found == [] if complaint is None else any(complaint in each for each in found)


def test_a_wheel_for_linux_without_libraries_is_refused(tmp_path):
    wheel = wheel_of(tmp_path, "weft_serve-0.2.0-py3-none-manylinux_2_28_x86_64.whl")
    assert any("has 0 libraries" in each for each in program("wheel")["complaints"](wheel))


def test_the_tag_is_the_newest_glibc_that_is_needed(tmp_path):
    library = tmp_path / "a.so"
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0")
    assert program("wheel")["glibc_of"]([library]) == (2, 34)


@pytest.mark.slow
def test_a_pure_wheel_and_a_source_distribution_hold_what_they_should(tmp_path):
    command = [sys.executable, str(ROOT / "release" / "wheel.py"), "--pure", "--no-isolation", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "weft").rglob("*.py")}
    assert packaged <= names
    assert "weft/kernels/native/linear.cpp" in names, "a machine with a compiler needs them"
    source = program("wheel")["copied"](tmp_path / "tree")
    (source / "release").mkdir()
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < 60_000_000
    with tarfile.open(archive) as found:
        assert not any("/training/" in name or name.endswith(".so") for name in found.getnames())


def test_importing_the_package_loads_nothing_that_takes_time():
    """`weft --help` has a test of its own, for each command."""
    slow = ("torch", "numpy", "tokenizers", "asyncio", "ssl", "huggingface_hub", "yaml", "weft.offline", "weft.engine")
    code = f"import sys, weft; print([name for name in {slow!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_bill_names_the_package_and_what_it_requires():
    try:
        found = program("sbom")["bill"]()
    except SystemExit as error:
        pytest.skip(str(error))
    assert found["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["name"] == "weft-serve"
    names = {each["name"].lower() for each in found["components"]}
    assert {"torch", "numpy", "safetensors"} <= names
    assert "pytest" not in names, "an extra that was not asked for"
    references = {each["bom-ref"] for each in (*found["components"], found["metadata"]["component"])}
    for each in found["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= references
    json.dumps(found)


def test_the_upload_of_a_release_is_switched_off_and_waits_for_all_tests():
    upload = CI["jobs"]["upload"]
    assert upload["if"] is False
    assert set(upload["needs"]) == {"source", "first-run", "suite"}
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert all((ROOT / "release" / f"{name}.py").is_file() for name in ("wheel", "first_run"))
    assert "release/first_run.py --wheel" in text
    assert CI["permissions"] == {"contents": "read"}


def test_kernels_are_built_for_both_architectures():
    runners = {each["runner"] for each in CI["jobs"]["wheel"]["strategy"]["matrix"]["include"]}
    assert len(runners) == len({each.machine for each in prebuilt.VARIANTS}) == 2


def test_the_build_machine_runs_the_wheel_outside_of_the_checkout():
    script = (ROOT / ".ci" / "run").read_text()
    assert "release/wheel.py --here" in script
    assert "release/first_run.py --wheel" in script
    assert 'grep -q "^http://"' in script
