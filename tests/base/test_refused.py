"""One table says which features exclude each other; the options, `weft doctor` and the docs use it."""

from itertools import combinations

import pytest

from tests.support.fences import ROOT
from weft.base.errors import InvalidOption
from weft.base.options import Options, features
from weft.base.refused import CPU, GPU, REFUSED, refuse, table

ASKED = {
    "ranks": {"tensor_parallel": 2},
    "exact": {"exact": True},
    "MTP head": {"draft": "mtp"},
    "draft model": {"draft": "owner/small"},
    "FP8 activations": {"activations": "fp8"},
    "whole experts": {"expert_parallel": True, "tensor_parallel": 2},
    "host memory": {"host_memory": "1GiB"},
    "file": {"disk": "tier", "disk_size": "1GiB"},
    "remote store": {"remote": "s3://bucket"},
    "no cache": {"cache": False},
    "prompts in files": {"prefix_key": "keys"},
    "small states": {"state_dtype": "int8"},
}
DEVICES = {CPU: "cpu", GPU: "cuda"}


@pytest.mark.parametrize("each", REFUSED, ids=lambda each: " + ".join(each.features))
def test_features_that_exclude_each_other_are_refused_with_the_reason(each) -> None:
    options = {name: value for feature in each.features for name, value in ASKED.get(feature, {}).items()}
    device = next((DEVICES[feature] for feature in each.features if feature in DEVICES), None)
    with pytest.raises(InvalidOption, match=f"{each.option} {each.demand}: {each.reason}"):
        refuse(features(Options(**options), device))


def test_every_other_pair_is_accepted() -> None:
    for pair in combinations(ASKED, 2):
        if pair == ("MTP head", "draft model") or any({*each.features} <= {*pair, "ranks"} for each in REFUSED):
            continue
        options = {name: value for feature in pair for name, value in ASKED[feature].items()}
        assert features(Options(**options)) >= {*pair}


def test_the_docs_have_the_table() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "operate.md").read_text()
