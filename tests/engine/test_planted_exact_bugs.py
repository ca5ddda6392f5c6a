"""Bugs against exact mode, planted here and caught by random workloads on a device that rounds.

`docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.fences import ROOT
from tests.support.hashed.workloads import random_workload, run_and_check
from weft.engine import planner
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger

SEEDS = 300
# Workloads that notice at once, to save time. If they no longer do, others will.
SOONEST = {"cells_of_prompt_and_answer_are_named_like_prompts": 291}
Patch = pytest.MonkeyPatch
BUGS: list[Callable[[Patch], None]] = []


def plant(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS.append(sow)
    return sow


@plant
def a_chunk_ends_wherever_the_budget_does(patch: Patch) -> None:
    def anywhere(start, budget, prompt, total, cell):
        return start + 1 if start >= prompt else min(prompt, start + budget)

    patch.setattr(planner, "canonical_end", anywhere)


@plant
def a_last_token_is_computed_with_the_cell_before(patch: Patch) -> None:
    def together(start, budget, prompt, total, cell):
        end = original(start, budget, prompt, total, cell)
        return prompt if end == prompt - 1 else end

    original = planner.canonical_end
    patch.setattr(planner, "canonical_end", together)


@plant
def tokens_return_together_after_a_preemption(patch: Patch) -> None:
    def together(start, budget, prompt, total, cell):
        return original(start, budget, total, total, cell)

    original = planner.canonical_end
    patch.setattr(planner, "canonical_end", together)


@plant
def decoded_cells_are_named_like_prompts(patch: Patch) -> None:
    original = PrefixIdentity.keys
    patch.setattr(
        PrefixIdentity, "keys", lambda self, tokens, after=None, decoded_from=None: original(self, tokens, after)
    )
    patch.setattr(Ledger, "publishable", lambda self, lease, computed: computed)


@plant
def cells_of_prompt_and_answer_are_named_like_prompts(patch: Patch) -> None:
    def unmarked(self, tokens, after=None, decoded_from=None):
        mixed = decoded_from is not None and 0 < decoded_from < self.cell
        return original(self, tokens, after, self.cell if mixed else decoded_from)

    original = PrefixIdentity.keys
    patch.setattr(PrefixIdentity, "keys", unmarked)


def harvest(soonest: int) -> str:
    """Run random workloads until one of them notices; what it said."""
    for seed in (soonest, *range(SEEDS)):
        try:
            run_and_check(random_workload(seed, exact=True))
        except AssertionError as caught:
            return str(caught)
    return ""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_against_exact_mode_is_caught(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    noticed = harvest(SOONEST.get(bug.__name__, 0))
    print(noticed)
    assert "answered" in noticed or "astray" in noticed, noticed


def test_every_bug_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert not [bug.__name__ for bug in BUGS if f"`{bug.__name__}`" not in table]
