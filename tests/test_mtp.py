"""MTP heads against a plain implementation: every draft token of an engine, whatever happened to its row before.

The public implementation ignores `mtp.*`, so the oracle is written here: hidden states from that implementation's
model, then the head in a few lines of PyTorch, from nothing for every draft.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny_model
from tests.engines import Ask, greedy, seeded, serve, smallest_memory, tokens
from tests.hybrid_models import HYBRIDS
from tests.operations import CPU
from tests.oracle import Oracle, scatter
from weft import LLM
from weft.base.config import EngineConfig
from weft.base.errors import ModelError
from weft.base.options import Options
from weft.engine import draft_head
from weft.engine.draft_head import DraftHead
from weft.engine.draft_model import Guesses
from weft.engine.loop import Engine
from weft.loading import chosen_draft
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models import mtp
from weft.models.mtp import head_of
from weft.models.weights import build, has_head, load_head, load_model
from weft.runner.head import HeadRunner
from weft.runner.hidden_states import HiddenStates, KeepsStates
from weft.runner.runner import Runner
from weft.speculate.costs import FreeDrafts
from weft.speculate.drafting import Drafting, SequenceDrafts

FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h")
LARGER = ("qwen3_5_moe", "nemotron_h, latent experts in groups")
ROOM = 3
MEMORY = 32 << 20
NEMOTRON = HYBRIDS["nemotron_h"].variant({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]})
TINY = HYBRIDS | {
    "nemotron_h": NEMOTRON,
    "qwen3_5, one layer": HYBRIDS["qwen3_5"].variant(num_hidden_layers=1, layer_types=["full_attention"]),
    "nemotron_h, latent experts in groups": NEMOTRON.variant(
        {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E"},
        moe_latent_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint of the public implementation with an MTP head added."""

    oracle: Oracle
    folder: Path
    head: dict[str, Tensor]

    @torch.no_grad()
    def drafts(self, text: list[int], count: int, among: int | None = None) -> list[int]:
        """Guess the tokens after a text of which the model has computed all but the last, `among` the first ones."""
        model = self.oracle.model
        states = model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
        found: list[int] = []
        for _ in range(count):
            outputs = self.head_states(states, text[1:] + found)
            found.append(int(model.lm_head(outputs[-1])[:among].argmax()))
            # The next entry continues from the head's own output.
            states = torch.cat([states, outputs[-1:]])
        return found

    def head_states(self, hidden: Tensor, following: list[int]) -> Tensor:
        config, w = self.oracle.model.config, self.head
        x = self.oracle.model.model.embed_tokens(torch.tensor(following))
        joined = [self.norm(x, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = torch.cat(joined, -1) @ w["mtp.fc.weight"].T
        x = x + self.attend(self.norm(x, "layers.0.input_layernorm"), config)
        x = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"), config)
        return self.norm(x, "norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.head[f"mtp.{name}.weight"], self.oracle.model.config.rms_norm_eps)

    def attend(self, x: Tensor, config: object) -> Tensor:
        heads, kv, size, n = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
        q, k, v = (x @ self.head[f"mtp.layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, gate = q.view(n, heads, 2 * size).chunk(2, -1)
        q = self.rotate(self.norm(q, "layers.0.self_attn.q_norm"), config)
        k = self.rotate(self.norm(k.view(n, kv, size), "layers.0.self_attn.k_norm"), config)
        k, v = (each.view(n, kv, size).repeat_interleave(heads // kv, 1) for each in (k, v))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        return (mixed * gate.sigmoid()).reshape(n, -1) @ self.head["mtp.layers.0.self_attn.o_proj.weight"].T

    def rotate(self, x: Tensor, config: object) -> Tensor:
        rope = config.rope_parameters
        size = int(config.head_dim * rope["partial_rotary_factor"])
        frequency = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(len(x))[:, None, None] * frequency
        one, two = x[..., : size // 2], x[..., size // 2 : size]
        turned = [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()]
        return torch.cat([*turned, x[..., size:]], -1)

    def gated(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.head[f"mtp.layers.0.mlp.{name}{each}_proj.weight"] for each in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(self, x: Tensor, config: object) -> Tensor:
        if "mtp.layers.0.mlp.gate.weight" not in self.head:
            return self.gated(x, "")
        weight, chosen = (x @ self.head["mtp.layers.0.mlp.gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok)
        weight = weight / weight.sum(-1, keepdim=True)
        routed = [
            sum(w * self.gated(row, f"experts.{e}.") for w, e in zip(ws, es.tolist()))
            for row, ws, es in zip(x, weight, chosen)
        ]
        shared = self.gated(x, "shared_expert.")
        return torch.stack(routed) + (x @ self.head["mtp.layers.0.mlp.shared_expert_gate.weight"].T).sigmoid() * shared


class NemotronCheckpoint(Checkpoint):
    """A head of Nemotron: a block of attention without positions, and one of experts."""

    def head_states(self, hidden: Tensor, following: list[int]) -> Tensor:
        config, w = self.oracle.model.config, self.head
        x = self.oracle.model.get_input_embeddings()(torch.tensor(following))
        joined = torch.cat([self.norm(x, "layers.0.enorm"), self.norm(hidden, "layers.0.hnorm")], -1)
        x = joined @ w["mtp.layers.0.eh_proj.weight"].T
        x = x + self.attend(self.norm(x, "layers.0.norm"), config)
        x = x + self.mlp(self.norm(x, "layers.1.norm"), config)
        return self.norm(x, "layers.1.final_layernorm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.oracle.model.config.layer_norm_epsilon
        return F.rms_norm(x, x.shape[-1:], self.head[f"mtp.{name}.weight"], eps)

    def attend(self, x: Tensor, config: object) -> Tensor:
        heads, kv, size, n = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
        q, k, v = (x @ self.head[f"mtp.layers.0.mixer.{name}_proj.weight"].T for name in "qkv")
        k, v = (each.view(n, kv, size).repeat_interleave(heads // kv, 1) for each in (k, v))
        q, k, v = (each.view(n, heads, size).transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(n, -1)
        return mixed @ self.head["mtp.layers.0.mixer.o_proj.weight"].T

    def squared(self, x: Tensor, name: str) -> Tensor:
        up, down = (self.head[f"mtp.layers.1.mixer.{name}.{each}_proj.weight"] for each in ("up", "down"))
        return (x @ up.T).relu().square() @ down.T

    def mlp(self, x: Tensor, config: object) -> Tensor:
        w = {name.removeprefix("mtp.layers.1.mixer."): tensor for name, tensor in self.head.items()}
        scores = (x @ w["gate.weight"].T).sigmoid()
        chosen = scores + w["gate.e_score_correction_bias"]
        # The groups with the largest sum of their two best experts stay.
        groups = chosen.view(len(x), config.n_group, -1)
        kept = groups.topk(2, -1).values.sum(-1).topk(config.topk_group).indices
        masked = torch.zeros_like(groups[..., 0]).scatter(1, kept, 1.0)[..., None] * torch.ones_like(groups)
        experts = chosen.masked_fill(masked.view_as(chosen) == 0, 0.0).topk(config.num_experts_per_tok).indices
        weight = scores.gather(1, experts)
        weight = config.routed_scaling_factor * weight / weight.sum(-1, keepdim=True)
        latent = x @ w["fc1_latent_proj.weight"].T if "fc1_latent_proj.weight" in w else x
        routed = torch.stack(
            [
                sum(share * self.squared(row, f"experts.{e}") for share, e in zip(shares, es.tolist()))
                for row, shares, es in zip(latent, weight, experts)
            ]
        )
        routed = routed @ w["fc2_latent_proj.weight"].T if "fc2_latent_proj.weight" in w else routed
        return routed + self.squared(x, "shared_experts")


def nemotron_shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published Nemotron head."""
    hidden, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, latent = config.num_key_value_heads * config.head_dim, config.moe_latent_size
    norms = ("layers.0.enorm", "layers.0.hnorm", "layers.0.norm", "layers.1.norm", "layers.1.final_layernorm")
    found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,)) | {"layers.0.eh_proj": (hidden, 2 * hidden)}
    found |= {"layers.0.mixer.q_proj": (inner, hidden), "layers.0.mixer.o_proj": (hidden, inner)}
    found |= {f"layers.0.mixer.{name}_proj": (keys, hidden) for name in "kv"}
    parts = {f"experts.{e}": (config.moe_intermediate_size, latent or hidden) for e in range(config.n_routed_experts)}
    parts["shared_experts"] = (config.moe_shared_expert_intermediate_size, hidden)
    for part, (width, size) in parts.items():
        found |= {f"layers.1.mixer.{part}.up_proj": (width, size), f"layers.1.mixer.{part}.down_proj": (size, width)}
    if latent:
        found |= {
            "layers.1.mixer.fc1_latent_proj": (latent, hidden),
            "layers.1.mixer.fc2_latent_proj": (hidden, latent),
        }
    named = {f"mtp.{name}.weight": shape for name, shape in found.items()}
    router = "mtp.layers.1.mixer.gate."
    experts = config.n_routed_experts
    return named | {f"{router}weight": (experts, hidden), f"{router}e_score_correction_bias": (experts,)}


def shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published head."""
    if config.model_type == "nemotron_h":
        return nemotron_shapes(config)
    hidden, size = config.hidden_size, config.head_dim
    inner, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms += ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,)) | {"fc": (hidden, 2 * hidden)}
    found |= {f"layers.0.self_attn.{name}_norm": (size,) for name in "qk"}
    found |= {"layers.0.self_attn.q_proj": (2 * inner, hidden), "layers.0.self_attn.o_proj": (hidden, inner)}
    found |= {f"layers.0.self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    experts = getattr(config, "num_experts", 0)
    parts = (
        {"": config.intermediate_size} if not experts else {"shared_expert.": config.shared_expert_intermediate_size}
    )
    parts |= {f"experts.{number}.": config.moe_intermediate_size for number in range(experts)}
    for part, width in parts.items():
        found |= {f"layers.0.mlp.{part}{name}_proj": (width, hidden) for name in ("gate", "up")}
        found[f"layers.0.mlp.{part}down_proj"] = (hidden, width)
    if experts:
        found |= {"layers.0.mlp.gate": (experts, hidden), "layers.0.mlp.shared_expert_gate": (1, hidden)}
    return {f"mtp.{name}.weight": shape for name, shape in found.items()}


@cache
def checkpoint(family: str) -> Checkpoint:
    oracle = Oracle(TINY[family])
    folder = oracle.save(Path(mkdtemp()))
    generator = torch.Generator().manual_seed(5)
    head = {name: torch.zeros(shape) for name, shape in shapes(oracle.model.config).items()}
    for name, tensor in head.items():
        scatter(name, tensor, generator, -1, tied=False)
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors")
    return (NemotronCheckpoint if "nemotron" in family else Checkpoint)(oracle, folder, head)


class Recording(DraftHead):
    """Records every text with its drafts. If an answer is known, the target is given its tokens, partly garbled."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        # Texts, their drafts, and how many tokens those were chosen from.
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.followed = 0
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.random = Random(1)

    def begin(self, asked, flying=None):
        texts = {seat: self.text(seat, sequence, flying) for seat, (sequence, _) in asked.items()}
        found = super().begin(asked, flying)
        if found is None:
            return None
        guesses, board = dict(found.tokens()), self.hidden.board.tokens
        for seat, drafts in guesses.items():
            text, prompt = texts[seat], asked[seat][0].request.prompt.tolist()
            self.seen.append((text, list(drafts), self.frequent_tokens if self.frequent else self.vocab_size))
            self.followed += flying is not None
            answer = self.answers.get(tuple(prompt))
            if answer is not None:
                known = answer[len(text) - len(prompt) :][: len(drafts)]
                known += [3] * (len(drafts) - len(known))
                guesses[seat] = tuple(3 if self.random.random() < 0.2 else token for token in known)
                board[seat, : len(drafts)] = torch.tensor(guesses[seat], dtype=board.dtype)
        return Guesses(found.counts, lambda: guesses)

    def text(self, seat, sequence, flying):
        """What the guesses follow: what the host knows, and with drafts in flight what only the device knows."""
        text = sequence.tokens(0, sequence.length).tolist()
        if flying is None:
            return text
        board = self.hidden.board
        return text + board.tokens[seat, : flying[seat] + 1 - int(board.refused[seat])].tolist()


class Eager(SequenceDrafts):
    """Drafts of a sequence that never pauses, whatever becomes of them."""

    def pause(self) -> int:
        return 0


class Drafts(Drafting):
    """Drafts all that is offered."""

    def begin(self, prompt, salt, most, prediction):
        return Eager(prompt, salt, self.most, suffixes=False, model=self.model)

    def choose(self, proposals, rows, most):
        return [len(proposal.worth) for proposal in proposals]

    def follows(self, known, unknown, lost):
        return True


def engine_of(family: str, memory: int = MEMORY, head_memory: int = MEMORY, **settings: object) -> Engine:
    folder = checkpoint(family).folder
    model, _ = load_model(folder, torch.float32, progress=False)
    head = load_head(folder, model, torch.float32, "checkpoint", 0, CPU)
    options = {"max_sequences": 4, "max_tokens_per_step": 96, "max_length": 400, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory, **options)
    spec, own = (MemorySpec(each.memories(CPU), draft_room=ROOM) for each in (model, head))
    runner, hidden = Runner(model, spec, memory, 4, threads=1), HiddenStates(4, 1000, head.width, torch.float32)
    runner.use = KeepsStates(hidden)
    ledger = Ledger(own, head_memory, 4, 400, remember_freed=True)
    parts = (hidden, ledger, HeadRunner(hidden, head, own, head_memory, 4, "cpu", 1), 256, 96, True)
    drafter = Recording(*parts, frequent_tokens=head.frequent)
    drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=drafter.name)
    return Engine(spec, runner, config, drafting=drafting, draft_model=drafter)


def check_drafts(engine: Engine, family: str, least: int) -> None:
    seen = engine.planner.drafts.model.seen
    assert len(seen) >= least
    # Each takes a whole run of the public implementation.
    for text, drafts, among in seen[:: -(-len(seen) // 12)]:
        assert drafts == checkpoint(family).drafts(text, len(drafts), among), f"after {len(text)} tokens"


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.slow) for each in LARGER)])
def test_drafts_and_answers_are_those_of_a_plain_implementation(family: str) -> None:
    asks = [Ask(tokens(150, 1), greedy(16)), Ask(tokens(30, 2), seeded(16, 3), step=1), Ask([7], greedy(8), step=2)]
    engine = engine_of(family)
    found = serve(engine, asks)
    check_drafts(engine, family, least=20)
    logits = checkpoint(family).oracle.logits(asks[0].prompt + found[0].tokens)[149:-1]
    assert logits.argmax(-1).tolist() == found[0].tokens


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right(family: str) -> None:
    """With the head's output in place of the model's own hidden state, later drafts would differ."""
    ask = Ask(tokens(70, 4), greedy(60))
    [answer] = serve(engine_of(family), [ask])
    engine = engine_of(family)
    engine.planner.drafts.model.answers = {tuple(ask.prompt): answer.tokens}
    assert serve(engine, [ask])[0].tokens == answer.tokens
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 20
    assert counts.proposed.total() - counts.accepted.total() > 5
    check_drafts(engine, family, least=20)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_guesses_follow_drafts_in_flight(family: str) -> None:
    asks = [Ask(tokens(70 + 9 * n, n), greedy(60) if n else seeded(60, 3)) for n in range(3)]
    wanted = serve(engine_of(family), asks)
    engine = engine_of(family, depth=1)
    head = engine.planner.drafts.model
    head.answers = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted)}
    assert [answer.tokens for answer in serve(engine, asks)] == [answer.tokens for answer in wanted]
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 80
    assert counts.proposed.total() - counts.accepted.total() > 20
    assert head.followed > 40
    check_drafts(engine, family, least=50)


def test_guesses_are_frequent_tokens_where_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp.MtpHead, "limit", 100)
    monkeypatch.setattr(draft_head, "RARE_MEMORY", 2)
    asks = [Ask(tokens(40, 1), greedy(40))]
    engine = engine_of("qwen3_5")
    head = engine.planner.drafts.model
    [answer] = serve(engine, asks)
    logits = checkpoint("qwen3_5").oracle.logits(asks[0].prompt + answer.tokens)[39:-1]
    assert logits.argmax(-1).tolist() == answer.tokens
    rare = [token >= 100 for token in answer.tokens]
    assert 0 < sum(rare) < 40
    check_drafts(engine, "qwen3_5", least=20)
    assert {among for _, _, among in head.seen} == {100, 256}
    for text, _, among in head.seen[3:]:
        recent = [token >= 100 for token in text[-12:]]
        assert among == 256 or not all(recent)
        assert among == 100 or any(recent)


def test_after_a_hit_drafts_are_those_of_a_cold_run_and_never_from_another_salt() -> None:
    check_hits(engine_of("qwen3_5"))


def check_hits(engine: Engine) -> None:
    head = engine.planner.drafts.model
    prompt, entries = tokens(150, 1), []
    for salt, more in ((b"one", []), (b"one", [5, 6]), (b"other", [5, 6])):
        launch = head.executor.launch

        def counted(plan, launch=launch):
            entries[-1] += int((plan.end - plan.start)[plan.from_board == 0].sum())
            return launch(plan)

        head.executor.launch = counted
        entries.append(0)
        serve(engine, [Ask(prompt + more, greedy(12), salt=salt)])
        head.executor.launch = launch
    check_drafts(engine, "qwen3_5", least=12)
    assert entries[0] > 150
    assert entries[1] < 60
    assert entries[2] > 150


def test_a_row_without_hidden_states_of_its_prefix_is_not_drafted() -> None:
    """The target resumes behind cells that the head has lost."""
    engine = engine_of("qwen3_5")
    head = engine.planner.drafts.model
    serve(engine, [Ask(tokens(150, 1), greedy(4))])
    head.flush()
    seen = len(head.seen)
    report = serve(engine, [Ask([*tokens(150, 1), 9], greedy(30))])[0].report
    assert report.cached_tokens >= 64
    assert len(head.seen) == seen
    assert report.drafts.proposed == 0
    serve(engine, [Ask(tokens(40, 8), greedy(30))])
    assert len(head.seen) > seen


def test_preemptions_and_little_memory_change_neither_drafts_nor_answers() -> None:
    asks = [Ask(tokens(20 + 7 * n, n), greedy(150), step=n) for n in range(4)]
    wanted = serve(engine_of("qwen3_5"), asks)
    # Enough to begin with all of them, and not to end.
    spec = engine_of("qwen3_5").ledger.spec
    memory = 13 * smallest_memory("qwen3_5", 200, 4, spec) // 10
    engine = engine_of("qwen3_5", memory=memory, head_memory=200_000, depth=1)
    found = serve(engine, asks)
    assert [a.tokens for a in found] == [a.tokens for a in wanted]
    assert engine.planner.preemptions > 0
    check_drafts(engine, "qwen3_5", least=10)


def test_a_seat_that_was_left_keeps_no_hidden_states() -> None:
    """Otherwise the next sequence there could read those of another one."""
    engine = engine_of("qwen3_5")
    serve(engine, [Ask(tokens(30, 1), greedy(5)), Ask(tokens(90, 2), greedy(9), abort_after=3)])
    hidden = engine.planner.drafts.model.hidden
    assert hidden.first.tolist() == hidden.end.tolist() == [0] * 4


def test_reading_a_prompt_waits_for_no_landing() -> None:
    engine = engine_of("qwen3_5", depth=1)
    executor, silent = engine.planner.drafts.model.executor, []
    launch, land = executor.launch, executor.land

    def noted(plan):
        flight = launch(plan)
        silent.extend([] if len(plan.sampled) else [flight])
        return flight

    def landed(flight):
        assert not any(flight is each for each in silent)
        return land(flight)

    executor.launch, executor.land = noted, landed
    serve(engine, [Ask(tokens(150, 1), greedy(4))])
    assert silent


# loading --------------------------------------------------------------------------------------------------------------


def open_llm(**options: object) -> LLM:
    return LLM(progress=False, memory="32MiB", threads=1, max_length=512, draft="mtp", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_with_a_head_drafts_with_it(dtype: str) -> None:
    with open_llm(model=str(checkpoint("qwen3_5").folder), dtype=dtype) as llm:
        drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=DraftHead.name)
        llm.engine.planner.drafting = llm.engine.planner.drafts.drafting = drafting
        assert isinstance(llm.engine.planner.drafts.model, DraftHead)
        assert llm.engine.config.draft_bytes > 0
        assert llm.generate([np.arange(3, 40).tolist()], greedy(20), progress=False)[0].token_ids
        assert drafting.counts.proposed.total() > 0


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    plain = Oracle(HYBRIDS["qwen3_5"]).save(tmp_path)
    with pytest.raises(ModelError, match="has no MTP head"):
        open_llm(model=str(plain), dtype="float32")
    other = Oracle(HYBRIDS["lfm2"]).save(tmp_path / "lfm2")
    with pytest.raises(ModelError, match="or Nemotron-H with an MTP head"):
        open_llm(model=str(other), dtype="float32")


def test_auto_is_the_head_of_a_checkpoint_that_has_one_and_else_suffixes(tmp_path: Path) -> None:
    options = {"progress": False, "memory": "32MiB", "threads": 1, "max_length": 512, "draft": "auto"}
    with LLM(model=str(checkpoint("qwen3_5").folder), **options) as llm:
        assert isinstance(llm.engine.planner.drafts.model, DraftHead)
    with LLM(model=str(Oracle(HYBRIDS["qwen3_5"]).save(tmp_path)), **options) as llm:
        assert llm.engine.config.draft == "suffix"
        assert llm.engine.planner.drafts.model is None


@pytest.mark.parametrize(
    ("options", "device", "drafter"),
    [
        ({}, "cpu", "mtp"),
        ({"exact": True}, "cpu", "mtp"),
        ({"exact": True}, "cuda", "suffix"),
        ({"tensor_parallel": 2}, "cpu", "suffix"),
    ],
)
def test_auto_is_suffixes_where_a_head_is_not_supported(options: dict, device: str, drafter: str) -> None:
    folder = checkpoint("qwen3_5").folder
    assert chosen_draft(Options(model=str(folder), draft="auto", **options), folder, device)[0] == drafter


def test_random_weights_have_a_head_if_the_configuration_says_so(tmp_path: Path) -> None:
    config = json.loads((tiny_model.FOLDER / "config.json").read_text())
    for count, expected in ((None, False), (0, False), (1, True), (2, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": count}))
        assert has_head(tmp_path, "dummy") is expected


def test_heads_of_several_layers_are_refused_by_name(tmp_path: Path) -> None:
    config = json.loads((tiny_model.FOLDER / "config.json").read_text()) | {"mtp_num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mtp_num_hidden_layers is 2"):
        open_llm(model=str(tmp_path), weights="dummy")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"mtp_layers_block_type": ["mamba", "moe"]}, "its blocks are mamba, moe"),
        ({"mtp_hybrid_override_pattern": "*M"}, "its blocks are attention, mamba"),
        ({"mtp_hybrid_override_pattern": "*?"}, "mtp_hybrid_override_pattern has '[?]'"),
        ({"mtp_hybrid_override_pattern": 7}, "must be a string, got 7"),
    ],
)
def test_nemotron_heads_of_other_blocks_are_refused_by_name(fields: dict, message: str) -> None:
    config = {"architectures": ["NemotronHForCausalLM"]} | NEMOTRON.settings | fields
    with pytest.raises(ModelError, match=message):
        build(config, torch.float32, "meta", family=head_of(config))


def test_exact_answers_keep_their_bits_with_a_head() -> None:
    params = replace(greedy(20), logits_digest=True)
    folder, prompt = str(checkpoint("qwen3_5").folder), tokens(80, 3)
    digests = []
    # With the same room in the tails: where a ring begins again, its sums are split.
    for draft in ("suffix", "mtp"):
        options = {"model": folder, "dtype": "float32", "memory": "32MiB", "threads": 1, "max_length": 512}
        with LLM(progress=False, exact=True, draft=draft, **options) as llm:
            digests.append(serve(llm.engine, [Ask(prompt, params)])[0].digests)
    assert digests[0] == digests[1]
