"""A model cut over ranks computes what the whole one does, for every family. Ranks are threads here.

`test_rank_processes.py` has ranks as processes.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.models.engines import FAMILIES, TINY, Ask, greedy, seeded, serve, tokens
from tests.support.models.oracle import Oracle
from tests.support.models.plain_models import QWEN3
from tests.support.models.ranks import Meeting, ThreadedRanks, ThreadGroup, threaded_engine
from tests.support.models.vector_models import VectorOracle
from tests.support.runner.tensor_parallel import constrained_answers
from weft.base.errors import InvalidOption, ModelError, OptionError
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.engine.events import Output
from weft.models import configurations, weights
from weft.models.config import read_config, text_part
from weft.models.sharding import Shard
from weft.models.weights import build, load_model
from weft.start.loading import check_shapes

TOLERANCE = 1e-4
ASKS = [
    Ask(tokens(90, 1), greedy(4)),
    Ask(tokens(5, 2), seeded(4, 7, top_p=0.9)),
    # A hit at 64, in the middle of a later step.
    Ask(tokens(90, 1)[:80] + tokens(9, 3), greedy(4), step=3),
]
# Biases, tied embeddings, replicated keys and values, norms over spread groups, replicated key heads.
ODD = [
    "llama, tied, biases, one kv head, llama3 rope",
    "nemotron_h, latent experts, biases, old names of layers",
    "falcon_h1, norm before gate, biases, width 2",
    "qwen3_5, attention bias, tied",
    "lfm2, adjusted feed-forward, conv bias and width 4, untied",
]

MIXTURES = ["lfm2_moe", "nemotron_h", "qwen3_moe", "qwen3_next", "granite_moe_hybrid", "gpt_oss"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda name: Oracle(TINY[name]).save(tmp_path_factory.mktemp("model")))


def assert_same(folder: Path, ranks: int, asks: list[Ask] = ASKS, **settings: object) -> None:
    alone, many = serve(threaded_engine(folder, 1), asks), serve(threaded_engine(folder, ranks, **settings), asks)
    for one, other in zip(alone, many, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_like_one(family, folder_of):
    assert_same(folder_of(family), 2)


@pytest.mark.parametrize("family", ["olmo_hybrid", "granite_moe_hybrid", ODD[0], ODD[1]])
def test_four_ranks_answer_like_one_even_with_fewer_keys_or_groups(family, folder_of):
    assert_same(folder_of(family), 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *ODD])
def test_four_ranks_answer_like_one(family, folder_of):
    assert_same(folder_of(family), 4)


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "qwen3_next"])
def test_two_ranks_with_whole_experts_answer_like_one(family, folder_of):
    assert_same(folder_of(family), 2, whole_experts=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*MIXTURES, ODD[1]])
def test_four_ranks_with_whole_experts_answer_like_one(family, folder_of):
    assert_same(folder_of(family), 4, whole_experts=True)


def test_vectors_and_classes_are_whole_on_every_rank(folder_of, tmp_path):
    classes = VectorOracle(QWEN3, ["a", "b", "c"]).save(tmp_path)
    for folder, size in ((folder_of("falcon_h1"), 64), (classes, 3)):
        asks = [
            Ask(tokens(90, seed), SamplingParams(max_tokens=0, vector_from=first)) for seed, first in ((1, 89), (2, 0))
        ]
        one, two = (serve(threaded_engine(folder, ranks), asks) for ranks in (1, 2))
        for alone, together in zip(one, two, strict=True):
            assert len(alone.report.vector.mean) == size
            assert together.report.vector.mean == pytest.approx(alone.report.vector.mean, abs=TOLERANCE)


def test_chunks_hits_preemption_and_drafts_work_with_ranks(folder_of, monkeypatch):
    folder, most, stem = folder_of("falcon_h1"), 4, tokens(10, 5) * 7
    # The last one repeats the first, whose answer is then guessed.
    asks = [Ask(stem + tokens(3, number % 2), greedy(40), step=step) for number, step in enumerate((0, 3, 70))]
    alone = serve(threaded_engine(folder, 1), asks)
    engine = threaded_engine(folder, 2, draft_room=most, drafting=Drafting(most), max_tokens_per_step=70)
    planner, step, preempted = engine.planner, engine.step, []

    def preempting() -> list[Output]:
        if planner.number % 10 == 9 and planner.decoding:
            preempted.append(planner.decoding[0])
            planner.leave(planner.decoding[0])
        return step()

    monkeypatch.setattr(engine, "step", preempting)
    found = serve(engine, asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in alone]
    assert len(preempted) > 1
    assert sum(answer.report.drafts.accepted for answer in found)
    assert any(answer.report.cached_tokens for answer in found)


def test_the_first_rank_alone_decides_what_is_sampled(folder_of, monkeypatch):
    """Another rank may see other logits, by rounding on another machine; its board has the first one's tokens."""
    gather = ThreadGroup.gather
    flipped = lambda self, x: [part if self.rank == 0 else -part for part in gather(self, x)]  # noqa: E731
    monkeypatch.setattr(ThreadGroup, "gather", flipped)
    assert_same(folder_of("llama"), 2)


def test_a_step_sums_once_for_each_part_of_a_block_and_once_for_the_embedding(folder_of):
    engine = threaded_engine(folder_of("llama"), 2)
    serve(engine, [Ask(tokens(5, 1), greedy(1))])
    layers, group = 3, engine._device.runners[0].group
    assert group.sums == 2 * layers + 1


# What a rank holds and reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in configurations.names() if name != "qwen3-next-mini"])
def test_each_of_two_ranks_holds_about_half_of_a_published_model(name):
    assert size_of(name, Shard(1, 2)) <= 0.55 * size_of(name, Shard())


def size_of(name: str, shard: Shard) -> int:
    model = build(text_part(read_config(configurations.find(name))), torch.bfloat16, "meta", shard=shard)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class CountedFile:
    """A checkpoint's file that counts the bytes it gives out."""

    def __init__(self, opened, counts: list[int]) -> None:
        self.opened, self.counts = opened, counts

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def get_tensor(self, name):
        return self.count(self.opened.get_tensor(name))

    def get_slice(self, name):
        return CountedSlice(self.opened.get_slice(name), self)

    def count(self, tensor):
        self.counts.append(tensor.nbytes)
        return tensor

    def __enter__(self):
        return CountedFile(self.opened.__enter__(), self.counts)

    def __exit__(self, *error):
        return self.opened.__exit__(*error)


class CountedSlice:
    def __init__(self, part, file: CountedFile) -> None:
        self.part, self.file = part, file

    def get_shape(self):
        return self.part.get_shape()

    def get_dtype(self):
        return self.part.get_dtype()

    def __getitem__(self, index):
        return self.file.count(self.part[index])


def test_a_rank_with_whole_experts_holds_about_half_of_a_mixture():
    name = "granite-4.0-h-tiny"
    assert size_of(name, Shard(1, 2, whole_experts=True)) <= 0.55 * size_of(name, Shard())


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_reads_its_part_of_the_checkpoint_only(whole_experts, folder_of, monkeypatch):
    counts: list[int] = []
    original = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda *a, **more: CountedFile(original(*a, **more), counts))
    load_model(folder_of("nemotron_h"), torch.float32, progress=False)
    everything = sum(counts)
    counts.clear()
    shard = Shard(1, 2, whole_experts)
    load_model(folder_of("nemotron_h"), torch.float32, progress=False, shard=shard)
    assert 0 < sum(counts) <= 0.55 * everything


def test_both_ranks_together_hold_every_number_of_a_cut_matrix(folder_of):
    parts = [load_model(folder_of("llama"), torch.float32, progress=False, shard=Shard(rank, 2))[0] for rank in (0, 1)]
    whole, _ = load_model(folder_of("llama"), torch.float32, progress=False)
    tables = [part.model.embed_tokens.weight for part in parts]
    assert torch.equal(torch.cat(tables), whole.model.embed_tokens.weight)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "ranks", "what"),
    [
        ("llama", 3, "must divide the model's 4 attention heads"),
        ("lfm2", 3, "64 convolution channels"),
        ("nemotron_h", 3, "2 Mamba2 groups"),
        ("qwen3_5", 8, "4 value heads of the gated delta rule"),
        ("falcon_h1, bias of attention alone, odd heads", 2, "5 Mamba2 heads"),
    ],
)
def test_a_shape_that_cannot_be_cut_is_refused_by_name(family, ranks, what, folder_of):
    with pytest.raises(ModelError, match=what):
        load_model(folder_of(family), torch.float32, progress=False, shard=Shard(0, ranks))


@pytest.mark.parametrize(
    "other",
    [
        {"exact": True},
        {"remote": "s3://bucket"},
        {"draft": "mtp"},
        {"draft": "owner/small"},
    ],
)
def test_options_that_do_not_work_with_ranks_are_refused_by_name(other):
    with pytest.raises(InvalidOption, match=f"tensor_parallel must be 1 with {next(iter(other))}"):
        Options(tensor_parallel=2, **other)


def test_experts_are_spread_only_if_there_are_ranks_and_experts_for_them(folder_of):
    with pytest.raises(InvalidOption, match="expert_parallel needs --tensor-parallel 2 or more"):
        Options(expert_parallel=True)
    with pytest.raises(OptionError, match="needs a mixture of experts"):
        check_shapes(Options(model=str(folder_of("llama")), device="cpu", tensor_parallel=2, expert_parallel=True))
    with pytest.raises(ModelError, match="must divide the model's 8 experts"):
        Shard(0, 3, whole_experts=True).cut_experts(8, 64)


@pytest.mark.parametrize("ranks", [0, -1, 65, True, "2"])
def test_the_number_of_ranks_is_bounded(ranks):
    with pytest.raises(InvalidOption, match="tensor_parallel must be"):
        Options(tensor_parallel=ranks)


def test_a_rank_that_fails_wakes_the_others():
    meeting = Meeting(2)
    with meeting.turn:
        meeting.broken = ValueError("planted")
        with pytest.raises(RuntimeError, match="another rank failed"):
            ThreadGroup(meeting, 0).sum(torch.zeros(1))


@pytest.mark.thorough
def test_a_check_of_shapes_imports_no_compiler():
    """The first rank makes it before it loads: the compiler would take two seconds and 120 MB."""
    code = """
import sys, torch
from weft.models import configurations
from weft.models.config import read_config, text_part
from weft.models.weights import build
for name in ("falcon-h1-7b", "gpt-oss-20b", "qwen3.5-9b"):
    build(text_part(read_config(configurations.find(name))), torch.float32, "meta")
print({"torch._dynamo", "triton", "sympy"} & sys.modules.keys())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stdout + found.stderr


def test_masks_that_follow_the_launch_reach_all_ranks(folder_of, monkeypatch):
    folder, supplied = folder_of("llama"), []
    supply = ThreadedRanks.supply_masks
    monkeypatch.setattr(ThreadedRanks, "supply_masks", lambda *given: supplied.append(given) or supply(*given))
    alone = constrained_answers(threaded_engine(folder, 1, depth=0))
    assert not supplied
    assert constrained_answers(threaded_engine(folder, 2, depth=1)) == alone
    assert len(supplied) > 10
