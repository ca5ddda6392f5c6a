"""Which cases run by default: families for each mixer, and every test that has cases has one of them."""

from __future__ import annotations

import ast

import pytest

from tests.support.cases import OTHERS, REPRESENTATIVES, SOME, family_of, markers_of
from tests.support.fences import ROOT, project_files
from tests.support.models.engines import FAMILIES, TINY

PLACE = "tests/models/test_x.py"


def families(*names: str) -> list[dict[str, object]]:
    return [{"family": name, "depth": 1} for name in names]


def test_the_rules_name_every_family_that_tests_have():
    assert {*REPRESENTATIVES, *OTHERS} == {*FAMILIES, "granite"}
    assert all(family_of({"name": name}) for name in TINY)


def test_of_all_families_the_representatives_run_by_default():
    found = dict(zip(FAMILIES, markers_of(PLACE, families(*FAMILIES)), strict=True))
    assert [name for name, marker in found.items() if marker is None] == [n for n in FAMILIES if n in REPRESENTATIVES]
    assert set(found.values()) == {None, "families"}


def test_a_test_without_a_representative_keeps_its_first_family():
    assert markers_of(PLACE, families("gpt_oss", "llama", "gpt_oss")) == [None, "families", None]
    assert markers_of(PLACE, [{"depth": 0}, {"depth": 1}]) == [None, None]


def test_of_triton_kernels_the_first_case_runs_by_default():
    found = markers_of("tests/kernels/cuda/test_cuda_ssd.py", [{"room": 0}, {"room": 3}, {"room": 0}])
    assert found == [None, "kernels", "kernels"]


def test_every_planted_bug_runs_by_default():
    assert markers_of("tests/kernels/test_planted_kernel_bugs.py", families(*FAMILIES)) == [None] * len(FAMILIES)
    name, cases = "test_a_planted_bug_of_shared_prefixes_is_caught", [{"bug": number} for number in range(5)]
    assert markers_of("tests/runner/cuda/test_cuda_shared_prefixes.py", cases, name) == [None] * 5


@pytest.mark.parametrize("test", SOME)
def test_a_test_with_some_cases_by_default_exists_and_has_the_others(test):
    place, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / place).read_text()
    markers = markers_of(place, [{"number": number} for number in range(2 * SOME[test])], name)
    assert markers.count(None) == 2
    assert set(markers) == {None, "thorough"}


def test_what_compiles_for_another_gpu_does_not_run_by_default():
    """It takes a process of its own and up to a minute."""
    found = {}
    for file in project_files(".py", under="tests"):
        if "assert_compiles(" in file.read_text() and file.name.startswith("test_") and file.name != "test_cases.py":
            functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
            for each in functions:
                if "assert_compiles(" in ast.unparse(each.body[-1]):
                    found[f"{file.name}::{each.name}"] = {ast.unparse(mark) for mark in each.decorator_list}
    assert len(found) > 15
    assert [name for name, marks in found.items() if not marks & {"pytest.mark.kernels", "pytest.mark.slow"}] == []
