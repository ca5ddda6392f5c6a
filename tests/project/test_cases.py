"""Which cases run by default: families for each mixer, and every test that has cases has one of them."""

from __future__ import annotations

import ast

from tests.support.cases import COSTS, OTHERS, REPRESENTATIVES, SECONDS, WHOLE, family_of, markers_of
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


def test_every_test_whose_cost_is_kept_exists():
    gone = [
        test for test in COSTS if f"def {test.partition('::')[2]}(" not in (ROOT / test.partition("::")[0]).read_text()
    ]
    assert not gone, "measure again: see tests/support/costs.py"


def test_of_a_long_test_no_more_cases_run_by_default_than_its_time_allows():
    place, cost = "tests/engine/test_x.py", SECONDS / 2.5
    for number in range(1, 30):
        name = f"test_{number}"
        found = markers_of(place, [{"number": each} for each in range(number)], name, {f"{place}::{name}": cost})
        assert 0 < found.count(None) * cost < SECONDS + cost
        assert set(found) <= {None, "thorough"}
        assert found.count(None) == len(found) or number > 2


def test_every_mixer_has_a_case_in_tests_of_the_whole_engine():
    [place], names = WHOLE, list(FAMILIES)
    found = markers_of(place, families(*sorted(names * 3)), "test_long", {f"{place}::test_long": SECONDS})
    run = [name for name, marker in zip(sorted(names * 3), found, strict=True) if marker is None]
    assert run == sorted(REPRESENTATIVES)


def test_the_first_case_of_a_long_test_depends_on_its_name():
    names = [f"test_{number}" for number in range(40)]
    cases = families(*FAMILIES)
    found = [markers_of(PLACE, cases, name, {f"{PLACE}::{name}": SECONDS}) for name in names]
    assert all(markers.count(None) == 1 for markers in found)
    assert {tuple(FAMILIES)[markers.index(None)] for markers in found} == set(REPRESENTATIVES)


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
