"""Which cases of a parametrised test run by default: of all families one for each mixer, of Triton kernels the first.

Of tests that have many long cases, some run (`SOME`). All others have a marker, and run with `pytest -m families`,
`kernels` and `thorough`, as `.ci/run` does. Planted bugs and what needs a GPU are not touched. `conftest.py` applies
these rules to what was collected.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.fences import ROOT

# Short convolutions; Mamba2 beside attention; the gated delta rule with experts; windows; the delta rule by channel
# with latent attention and grouped experts.
REPRESENTATIVES = ("lfm2", "falcon_h1", "qwen3_next", "gemma3", "kimi_linear")
OTHERS = (
    "lfm2_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "nemotron_h", "granite_moe_hybrid", "granite", "llama",
    "mistral", "qwen3", "qwen3_moe", "gpt_oss", "lfm3", "qwen2", "phi3", "gemma2", "smollm3", "olmo2", "olmo3",
)  # fmt: skip
# Tests that take next to no time for a family.
QUICK = (
    "tests/models/test_config_bounds.py", "tests/models/test_contradictions.py", "tests/models/test_inventory.py",
    "tests/models/test_catalogue.py",
)  # fmt: skip
# Tests that run Triton kernels under the interpreter, by file or folder.
INTERPRETED = (
    "tests/kernels/cuda/", "tests/runner/cuda/", "tests/drafting/test_cuda_drafters.py",
    "tests/drafting/test_exact_drafts_cuda.py",
)  # fmt: skip
# Tests there that run no kernel, or next to nothing.
NOT_INTERPRETED = (
    "tests/kernels/cuda/test_cuda_launching.py", "tests/kernels/cuda/test_cuda_interpreter.py",
)  # fmt: skip
# Tests with many long cases: every n-th that is not slow runs by default.
SOME = {
    "tests/drafting/test_draft_default.py::test_default_options_give_the_answers_without_drafts": 2,
    "tests/drafting/test_draft_distribution.py::test_answers_after_drafts_have_the_undrafted_distribution": 2,
    "tests/drafting/test_draft_lengths.py::test_chosen_drafts_are_as_good_as_any_fixed_number": 3,
    "tests/drafting/test_drafts_of_grammars.py::test_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps": 3,
    "tests/drafting/test_drafts_of_grammars.py::test_slow_masks_change_no_answer_with_drafts_or_without": 3,
    "tests/drafting/test_drafts_of_models.py::test_drafts_change_no_token_whatever_the_parameters": 2,
    "tests/drafting/test_drafts_of_models.py::test_recorded_kernels_verify_drafts_bit_by_bit_as_decodes": 2,
    "tests/drafting/test_draft_sizes.py::test_trials_of_sizes_that_do_not_pay_cost_little": 2,
    "tests/drafting/test_leaving_heads.py::test_a_head_that_is_never_right_is_not_asked_until_it_is_right": 3,
    "tests/drafting/test_turning_down.py::test_drafts_that_are_never_right_take_less_than_two_percent_of_the_steps": 2,
    "tests/drafting/test_turning_down.py::test_plans_without_drafts_are_those_of_an_engine_without": 2,
    "tests/engine/test_edits.py::test_ten_turns_with_stripped_reasoning_compute_little_more_than_what_is_new": 4,
    "tests/engine/test_forks.py::test_after_the_first_fork_at_a_token_each_computes_less_than_a_cell": 3,
    "tests/memory/test_retention.py::test_with_host_memory_what_is_retained_moves_there_before_a_request_is_refused": 4,
    "tests/engine/test_preemption.py::test_scores_and_penalties_do_not_depend_on_preemptions": 5,
    "tests/engine/test_preparation.py::test_grammars_come_through_and_bad_ones_are_refused": 2,
    "tests/engine/test_sameness.py::test_answers_do_not_depend_on_how_they_are_computed": 4,
    "tests/engine/test_sameness.py::test_aborts_and_the_order_of_arrival_change_nothing_for_the_others": 2,
    "tests/kernels/formats/test_fp8.py::test_a_model_in_blocks_computes_what_its_numbers_say": 2,
    "tests/kernels/formats/test_fp8.py::test_every_tool_is_read": 3,
    "tests/kernels/formats/test_packed.py::test_every_family_is_read_and_stays_packed": 2,
    "tests/kernels/formats/test_packed.py::test_every_tool_is_read": 4,
    "tests/kernels/native/test_native_stored.py::test_experts_in_stored_formats_are_those_that_their_decode_gives": 11,
    "tests/kernels/test_attention.py::test_paged_attention_equals_a_dense_one": 5,
    "tests/kernels/test_causal_conv.py::test_packed_rows_of_any_length_equal_the_loop": 3,
    "tests/kernels/test_gated_delta.py::test_packed_rows_of_any_length_equal_the_loop": 5,
    "tests/kernels/test_lazy_norm.py::test_a_product_of_it_is_that_of_the_norm": 4,
    "tests/kernels/test_ssd.py::test_packed_rows_of_any_length_equal_the_loop": 5,
    "tests/memory/tiers/test_tiers.py::test_a_prefix_that_the_device_evicted_is_answered_from_host_memory": 3,
    "tests/models/test_family_forks.py::test_ten_turns_with_stripped_reasoning_compute_little_more_than_what_is_new": 2,
    "tests/models/test_parity_hybrid.py::test_odd_configurations_equal_the_public_implementation": 2,
    "tests/models/test_quantising.py::test_few_bits_are_what_rounding_with_a_search_for_the_range_gives": 5,
    "tests/models/test_quantised_traffic.py::test_every_digest_is_that_of_a_lone_cold_run": 3,
    "tests/server/http/test_descriptors.py::test_accepting_goes_on_when_a_descriptor_is_free_again": 2,
}  # fmt: skip


def family_of(values: dict[str, Any]) -> str | None:
    """Return the family that the values of a test's parameters name, if one does; variants follow a comma.

    >>> family_of({"depth": 1, "family": "granite, attention only"}), family_of({"name": "llama-guard"})
    ('granite', None)
    """
    found = [value.split(",")[0] for value in values.values() if isinstance(value, str)]
    return next((each for each in found if each in REPRESENTATIVES or each in OTHERS), None)


def markers_of(place: str, cases: Sequence[dict[str, Any]], name: str = "") -> list[str | None]:
    """Return the marker of each case of a test, by the values of its parameters. `place` is its file."""
    if any(word in f"{place} {name}" for word in ("planted", "caught", "be_seen", "is_seen", "noticed")):
        return [None] * len(cases)
    if place.startswith(INTERPRETED) and place not in NOT_INTERPRETED:
        return [None, *["kernels"] * (len(cases) - 1)]
    families = [family_of(values) for values in cases]
    found: list[str | None] = [None] * len(cases)
    if place not in QUICK and any(families):
        kept = set(REPRESENTATIVES).intersection(families) or {next(each for each in families if each)}
        found = [None if family is None or family in kept else "families" for family in families]
    return some_of(found, SOME.get(f"{place}::{name}", 1))


def some_of(markers: list[str | None], every: int) -> list[str | None]:
    """Mark all but every n-th of the cases that have no marker.

    >>> some_of([None, "families", None, None], 2)
    [None, 'families', 'thorough', None]
    """
    count = itertools.count()
    return [each or ("thorough" if next(count) % every else None) for each in markers]


def mark(items: Sequence[Any]) -> None:
    """Mark the collected cases that do not run by default."""
    tests: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("gpu") is None:
            place = Path(item.path).relative_to(ROOT).as_posix() if Path(item.path).is_relative_to(ROOT) else ""
            test = item.nodeid.split("[")[0]
            if test not in SOME or item.get_closest_marker("slow") is None:
                tests[place, test].append(item)
    for (place, test), cases in tests.items():
        markers = markers_of(place, [item.callspec.params for item in cases], test.rpartition("::")[2])
        for item, marker in zip(cases, markers, strict=True):
            if marker is not None:
                item.add_marker(marker)
