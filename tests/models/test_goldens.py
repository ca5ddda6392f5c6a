"""What a family computes changes only together with its number, so no engine reads states of other code.

`python -m tests.support.models.goldens` keeps new logits, if the number of their family was raised.
"""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch

from tests.support.kernels.operations import CPU, NATIVE
from tests.support.models import goldens
from tests.support.models.golden_cases import FAMILIES, ODD, cases_of
from tests.support.models.goldens import changed, computed, kept, logits_of, revision_of, unraised
from weft.kernels.choosing import REVISIONS, TITLES
from weft.kernels.plain import norm
from weft.models.llama import Llama
from weft.models.registry import FAMILIES as ARCHITECTURES
from weft.models.registry import family_of

REMEDY = "if this is meant, raise `revision` of the family's class, then run: python -m tests.support.models.goldens"
# Rounding of float32, over all layers of a tiny model.
ROUNDING = 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_change_only_with_the_number_of_their_family(family):
    before, now = kept()["families"][family], computed(family)
    assert changed(before, now) == [], f"the logits of {family} have changed; {REMEDY}"
    assert before["revision"] == now["revision"], (
        f"the number of {family} was raised; run: python -m tests.support.models.goldens"
    )
    assert list(before["logits"]) == list(now["logits"]), (
        f"{family} accepts other fields; run: python -m tests.support.models.goldens"
    )


def test_the_number_of_a_package_is_kept_with_the_logits():
    assert kept()["packages"] == REVISIONS, (
        "a number of a kernel package was changed; run: python -m tests.support.models.goldens"
    )
    assert REVISIONS.keys() == TITLES.keys()


def test_every_family_has_a_number_of_its_own_and_goldens():
    classes = {family_of({"architectures": [name]}) for name in ARCHITECTURES}
    assert [each.__name__ for each in classes if "revision" not in vars(each)] == []
    covered = {family_of({"architectures": [tiny.model_class]}) for tiny in FAMILIES.values()}
    assert covered == classes


@pytest.mark.parametrize(("name", "operations"), [("cpu", CPU), ("native", NATIVE)])
def test_the_packages_of_a_processor_compute_the_kept_logits(name, operations):
    """A package that computes something else needs a fix, or all packages and their numbers change."""
    before = kept()["families"]
    for family in FAMILIES:
        cases = cases_of(family)
        for case in ["as it is", *(case for case in cases if case in ODD)]:
            found, golden = logits_of(cases[case], operations, torch.float32), before[family]["logits"][case]
            most = max(map(abs, golden))
            assert max(abs(a - b) for a, b in zip(found, golden, strict=True)) < ROUNDING * most, (name, family, case)


# the check itself -----------------------------------------------------------------------------------------------------


def test_another_result_of_one_operation_is_noticed_in_every_family(monkeypatch):
    original = norm.normed
    monkeypatch.setattr(norm, "normed", lambda x, eps: original(x, eps) * 1.0001)
    for family in ("llama", "nemotron_h", "qwen3_5"):
        assert "as it is" in changed(kept()["families"][family], computed(family))


def test_changed_logits_are_kept_only_with_a_raised_number(monkeypatch, tmp_path):
    file = tmp_path / "goldens.json"
    file.write_text(json.dumps(kept()))
    monkeypatch.setattr(goldens, "FILE", file)
    monkeypatch.setattr(goldens, "FAMILIES", {"llama": FAMILIES["llama"]})
    assert goldens.main() == 0
    before = file.read_text()
    found = computed("llama")
    found["logits"]["as it is"][0] += 0.01
    monkeypatch.setattr(goldens, "computed", lambda family: found | {"revision": revision_of(family)})
    assert goldens.main() == 1
    assert file.read_text() == before
    monkeypatch.setattr(Llama, "revision", Llama.revision + 1)
    assert goldens.main() == 0
    assert kept()["families"]["llama"]["revision"] == Llama.revision


def test_new_and_refused_configurations_need_no_new_number():
    before = {"families": {"llama": {"revision": 1, "logits": {"one": [1.0], "two": [2.0]}}}}
    now = deepcopy(before)
    del now["families"]["llama"]["logits"]["one"]
    now["families"]["llama"]["logits"]["three"] = [3.0]
    assert unraised(before, now) == []
    now["families"]["llama"]["logits"]["two"] = [2.1]
    [line] = unraised(before, now)
    assert "llama: raise the revision 1 of its class; changed are two" in line
