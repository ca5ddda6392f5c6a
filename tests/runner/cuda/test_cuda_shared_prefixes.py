"""Decodes that begin with the same pages read them once per group, and find what they would find on their own.

Without a GPU, Triton's interpreter runs the kernels at small odd sizes; what is marked `gpu` runs at real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.support.kernels.coded_pages import KINDS, held, in_codes
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import CPU, GPU_ROWS, PLAIN
from tests.support.kernels.plans import Row, make_plan
from tests.support.models.engines import TINY, Ask, dummy_model, greedy, serve, tokens
from tests.support.runner.cuda_runner import FEW_LAYERS, SHORT_CELL, cpu_engine, cuda_engine
from tests.support.runner.prefix_groups import check_reused_seats, random_paths
from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm
from weft.kernels.choosing import assemble, exact_packages
from weft.kernels.cuda.attention import read_pages
from weft.kernels.cuda.attention import shared as attention_shared
from weft.kernels.cuda.attention.decode import DecodeSharing, attend_decodes
from weft.kernels.cuda.attention.shared import attend_shared, prefix_members
from weft.kernels.interface import Batch
from weft.memory.kinds import Kind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.cuda import shared_prefixes
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.recorded import RecordedSteps
from weft.runner.cuda.shared_prefixes import PrefixGroups, PrefixSharing, find_groups, members_of
from weft.runner.passes import ModelPass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# kernels --------------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Decodes over `paths` of pages, the last one open, padded to some rows. What no row may read is NaN."""

    paths: list[list[int]]
    padding: int = 0
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    cell: int = 16
    members: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        rng, generator = random.Random(self.seed), torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(self.dtype)

        real, self.rows = len(self.paths), len(self.paths) + self.padding
        names = sorted({page for path in self.paths for page in path})
        number = dict(zip(names, rng.sample(range(len(names)), len(names))))
        self.tables = [[number[page] for page in path] for path in self.paths]
        self.scratch = len(names)
        self.starts = [(len(path) - 1) * self.cell + rng.randrange(self.cell) for path in self.paths]
        shape = (len(names) + 1, 3, self.cell, self.kv_heads, self.head_dim)
        self.store = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        for table, start in zip(self.tables, self.starts):
            for page in table[:-1]:
                self.store[page, :2] = normal(2, *shape[2:])
            self.store[table[-1], :2, : start % self.cell + 1] = normal(2, start % self.cell + 1, *shape[3:])
        self.store[self.scratch, :2, :1] = normal(2, 1, *shape[3:])
        self.q, self.sinks = normal(self.rows, self.heads, self.head_dim), normal(self.heads)
        self.scale = self.head_dim**-0.5
        spec = MemorySpec((AttentionMemory(self.kv_heads, self.head_dim, "float32"),), cell=self.cell)
        width = max(map(len, self.paths))
        self.inputs = DecodeInputs(self.rows, width, spec, {Kind.PAGE: self.scratch}, DEVICE, GPU_ROWS)
        self.plan = make_plan([Row(s, s + 1, pages=table) for s, table in zip(self.starts, self.tables)])
        self.groups = find_groups(self.plan.page_table, self.plan.start // self.cell, self.members)
        assert real <= self.rows

    def batch(self) -> Batch:
        self.inputs.buffer.fill_(1 << 30)
        self.inputs.fill(self.plan, self.rows, groups=self.groups)
        return self.inputs.batch(self.rows, self.inputs.tensor("token", self.rows), self.members)

    def view(self) -> AttentionView:
        return AttentionView(self.store[:, 0], self.store[:, 1], None)

    def reference(self, softcap: float | None, sinks: bool) -> Tensor:
        """Return the definition in float32, row by row."""
        out = []
        tables = [*self.tables, *[[self.scratch]] * self.padding]
        for q, table, start in zip(self.q.float(), tables, [*self.starts, *[0] * self.padding]):
            keys, values = self.store[table, :2].float().transpose(0, 1).flatten(1, 2)[:, : start + 1]
            keys, values = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("hd,phd->hp", q, keys) * self.scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks:
                scores = torch.cat([scores, self.sinks.float()[:, None]], 1)
            out.append(torch.einsum("hp,phd->hd", scores.softmax(1)[:, : start + 1], values))
        return torch.stack(out)

    def check(
        self,
        sharing: DecodeSharing | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        tolerance: float = 3e-6,
    ) -> None:
        out = torch.full(self.q.shape, torch.nan, dtype=self.dtype, device=DEVICE)
        sink = self.sinks if sinks else None
        attend_shared(self.q, out, self.batch(), self.view(), self.scale, softcap, sink, sharing)
        wanted = self.reference(softcap, sinks)
        assert torch.isfinite(out).all()
        assert float((out.float() - wanted).norm() / wanted.norm()) < tolerance


def scene_of(seed: int) -> tuple[Scene, dict]:
    """Draw a scene, and the options of its layer."""
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2]), rng.randint(1, 8)
    paths = random_paths(rng, rng.randint(2, 9))
    paths[1] = [*paths[0][:-1], 20_000] if len(paths[0]) > 1 else [*paths[0][:1], 20_000]
    paths[0] = [*paths[1][:-1], 20_001]
    scene = Scene(
        paths, rng.choice([0, 0, 3]), kv_heads * group, kv_heads, rng.choice([16, 24, 32]), rng.choice([16, 32]),
        rng.choice([2, 4, 8]), seed=seed,
    )  # fmt: skip
    options = {
        "sharing": rng.choice([None, DecodeSharing(1, 1), DecodeSharing(5, 1), DecodeSharing(40, 1)]),
        "softcap": rng.choice([None, 2.0]),
        "sinks": rng.random() < 0.5,
    }
    return scene, options


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.gpu) for seed in range(8, 200))])
def test_rows_that_read_prefixes_together_find_what_they_find_alone(seed):
    scene, options = scene_of(seed)
    assert scene.groups is not None
    scene.check(**options)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_prefixes_of_codes_are_read_together(kind):
    scene = Scene([[1, 2, 3], [1, 2, 4], [1, 5], [9, 8, 7]], 1, 8, 2, 32, dtype=torch.bfloat16)
    coded, out = in_codes(scene.view(), kind), torch.full_like(scene.q, torch.nan)
    attend_shared(scene.q, out, scene.batch(), coded, scene.scale, None, scene.sinks, DecodeSharing(3, 1))
    what_they_hold = held(coded, torch.float32)
    scene.store = torch.stack([what_they_hold.keys, what_they_hold.values], 1)
    wanted = scene.reference(None, True)
    assert float((out.float() - wanted).norm() / wanted.norm()) < 6e-3


def test_a_step_without_groups_is_that_of_rows_on_their_own():
    """As in recording, when inputs are those of padding."""
    scene = Scene([[1, 2], [3], [4]])
    scene.inputs.fill_with_padding()
    batch = scene.inputs.batch(3, scene.inputs.tensor("token", 3), 4)
    out = torch.full(scene.q.shape, torch.nan, device=DEVICE)
    attend_shared(scene.q, out, batch, scene.view(), scene.scale, None, None)
    values = scene.store[scene.scratch, 1, 0].repeat_interleave(3, 0)
    torch.testing.assert_close(out, values.expand_as(out))


def test_windowed_layers_ignore_groups():
    scene = Scene([[1, 2, 3], [1, 2, 4]])
    batch, view = scene.batch(), replace(scene.view(), window=20)
    batch = replace(batch, windowed=batch.full)
    out = torch.full_like(scene.q, torch.nan)
    attend_decodes(scene.q, out, replace(batch, shared=None), view, scene.scale, None, None)
    assert read_pages(scene.q, batch, view, scene.scale).equal(out)


def big_group(members: int, head_dim: int = 16, sinks: bool = True) -> None:
    """A group of 40, another with one of its pages, and rows of their own."""
    paths = [[1, 2, 3, 100 + row] for row in range(40)] + [[1, 9, 8, 7, 200 + row] for row in range(3)]
    paths = [*paths[::2], [300], [301, 302], *paths[1::2]]
    Scene(paths, 2, 4, 1, head_dim, members=members).check(sinks=sinks)


def test_groups_larger_than_what_reads_together_are_cut():
    big_group(16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128), (16, 2, 128), (16, 4, 256), (8, 8, 80)]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_real_sizes_in_bfloat16(heads, kv_heads, head_dim, sinks):
    form = AttentionForm(heads, kv_heads, head_dim, 1.0)
    members = prefix_members(form, torch.bfloat16)
    prefixes = [[1000 * (number + 1) + page for page in range(32)] for number in range(8)]
    paths = [[*prefixes[row % 8], *range(100_000 + 4 * row, 100_000 + 4 * row + 1 + row % 3)] for row in range(126)]
    Scene(paths, 2, heads, kv_heads, head_dim, 64, members, torch.bfloat16).check(sinks=sinks, tolerance=6e-3)


def launch_groups(heads: int = 32, kv_heads: int = 8, head_dim: int = 64) -> None:
    """As on an H200, in a step of 64 rows."""
    members = prefix_members(AttentionForm(heads, kv_heads, head_dim, 1.0), torch.bfloat16)
    scene = Scene([[1, 2], [1, 3]], 62, heads, kv_heads, head_dim, 64, members, torch.bfloat16)
    sharing, out = DecodeSharing(264 // kv_heads, 1), torch.empty_like(scene.q)
    attend_shared(scene.q, out, scene.batch(), scene.view(), scene.scale, None, None, sharing)


def launch_groups_of_heads_of_128() -> None:
    launch_groups(16, 2, 128)


def launch_groups_of_heads_of_256() -> None:
    launch_groups(16, 4, 256)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90_and_stay_in_registers():
    assert_compiles(launch_groups, launch_groups_of_heads_of_128, in_registers=True)
    assert_compiles(launch_groups_of_heads_of_256)


# runners --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_steps(monkeypatch) -> list[PrefixGroups]:
    """Groups of the steps that share prefixes, which a few cells are worth here."""
    found: list[PrefixGroups] = []
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_CELLS", 2)
    look = PrefixSharing.of

    def note(sharing, plan):
        groups = look(sharing, plan)
        found.extend([] if groups is None else [groups])
        return groups

    monkeypatch.setattr(PrefixSharing, "of", note)
    return found


def shared_asks() -> list[Ask]:
    """Run two prompts that share two cells with earlier ones, beside a row that shares nothing."""
    prompt = tokens(2 * SHORT_CELL + 2, seed=1)
    return [
        Ask([*prompt, *tokens(2, seed=2)], greedy(5)),
        Ask(tokens(3, seed=3), greedy(4)),
        Ask([*prompt, *tokens(3, seed=4)], greedy(3), step=2),
        Ask([*prompt, *tokens(9, seed=5)], greedy(2), step=2),
    ]


@pytest.mark.kernels
@pytest.mark.parametrize("family", ["lfm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_answers_are_those_of_rows_on_their_own(family, shared_steps):
    model = dummy_model(FEW_LAYERS[family], operations=PLAIN)
    found, wanted = serve(cuda_engine(model), shared_asks()), serve(cpu_engine(model), shared_asks())
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for mine, theirs in zip(found, wanted):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
    assert any(len(groups.order) == 3 for groups in shared_steps)


def test_only_models_with_full_attention_share_and_exact_answers_never_do():
    lfm2, latent = (dummy_model(TINY[family], operations=PLAIN) for family in ("lfm2", "kimi_linear"))
    assert members_of(lfm2, GPU_ROWS) == 16
    assert members_of(latent, GPU_ROWS) == 1
    for others in (assemble(exact_packages()), PLAIN, CPU):
        assert members_of(lfm2, others) == 1


def test_steps_of_a_drafter_share_nothing():
    model = dummy_model(FEW_LAYERS["lfm2"], operations=PLAIN)
    usual = cuda_engine(model)._device.recorded
    assert (usual.sharing is None, usual.shared_rows) == (False, [4])
    drafter = RecordedSteps(model, (), usual.boards, usual.decodes, [], ModelPass(is_drafter=True), 16)
    assert (drafter.sharing, drafter.shared_rows) == (None, [])


# planted bugs ---------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
BUGS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = []


def plant(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def note(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append((sow, check))
        return sow

    return note


def check_two_groups() -> None:
    """Two groups of different depth, whose members are not adjacent."""
    paths = [[1, 2, 10], [3, 4, 5, 11], [1, 2, 12, 13], [20], [3, 4, 5, 14], [1, 2, 15]]
    Scene(paths, 1, 4, 2).check(DecodeSharing(5, 1), sinks=True)


@plant(check_two_groups)
def the_own_pages_of_a_row_begin_one_cell_too_late(patch: Patch) -> None:
    original = DecodeInputs.fill

    def skip(inputs, plan, rows, lines=None, groups=None):
        # Of a row that has two pages of its own.
        groups = replace(groups, shared=groups.shared + np.array([0, 0, 1, 0, 0, 0], np.int32))
        original(inputs, plan, rows, lines, groups)

    patch.setattr(DecodeInputs, "fill", skip)


@plant(check_two_groups)
def a_group_reads_the_pages_of_another(patch: Patch) -> None:
    original = DecodeInputs.fill

    def mix_up(inputs, plan, rows, lines=None, groups=None):
        original(inputs, plan, rows, lines, groups)
        inputs.tensor("shared.place", 2).copy_(inputs.tensor("shared.place", 2).flip(0))

    patch.setattr(DecodeInputs, "fill", mix_up)


@plant(check_two_groups)
def members_are_taken_for_neighbours(patch: Patch) -> None:
    original = DecodeInputs.fill

    def in_order(inputs, plan, rows, lines=None, groups=None):
        original(inputs, plan, rows, lines, replace(groups, order=np.sort(groups.order)))

    patch.setattr(DecodeInputs, "fill", in_order)


@plant(check_two_groups)
def a_sink_is_added_by_both_passes(patch: Patch) -> None:
    original = attention_shared.attend_rows

    def add(q, out, batch, view, scale, softcap, sinks, *more):
        sinks = torch.zeros(q.shape[1], device=q.device) if sinks is None else sinks
        original(q, out, batch, view, scale, softcap, sinks, *more)

    patch.setattr(attention_shared, "attend_rows", add)


@plant(check_reused_seats)
def the_groups_of_a_plan_are_kept_while_its_seats_are_the_same(patch: Patch) -> None:
    seats: list[list[int]] = []

    def trust(sharing, plan):
        seats.append(plan.seat.tolist())
        return len(seats) > 1 and seats[-1] == seats[-2]

    patch.setattr(PrefixSharing, "hold", trust)


@pytest.mark.parametrize(("sow", "check"), BUGS, ids=lambda each: each.__name__)
def test_a_planted_bug_of_shared_prefixes_is_caught(sow, check, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_CELLS", 4)
    check()
    sow(monkeypatch)
    with pytest.raises(AssertionError):
        check()
