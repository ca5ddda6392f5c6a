"""Training of an MTP head: `python -m weft_training.head ANSWERS HEAD --seconds 80`.

The model stays as it is. Its final hidden states over its own answers are computed once. The head learns the model's
distribution of the token after the next, in three passes over a text: the second and third read the head's own output,
as the second and third guess do when Weft serves the model (weft/models/mtp.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from weft import builtin

from weft_training.answers import Answers
from weft_training.delta import CHUNK
from weft_training.train import make_optimisers, use_faster_parts

# How much each pass counts.
WEIGHTS = (1.0, 0.8, 0.6)
GUESSES = len(WEIGHTS)
# The model's distribution is sharpened, because most of its tokens are drawn at low temperatures.
TEMPERATURE = 0.5
WARMUP = 0.03
Cells = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """RMS norm whose weight is stored as the difference from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], (1 + self.weight).to(x.dtype), self.eps)


class Attention(nn.Module):
    """Gated attention of Qwen3.5. Entries of a later pass see those of the passes before, as guesses do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.size = config.hidden_size, config.head_dim
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        rope = config.rope_parameters
        self.turned = int(self.size * rope["partial_rotary_factor"])
        self.theta = rope["rope_theta"]
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.q_norm, self.k_norm = (Norm(self.size, config.rms_norm_eps) for _ in "qk")

    def forward(self, x: Tensor, before: list[Cells]) -> tuple[Tensor, Cells]:
        """Of [rows, entries, hidden]; `before` are keys and values of the passes before."""
        rows, entries, _ = x.shape
        q, gate = self.q_proj(x).view(rows, entries, self.heads, 2 * self.size).chunk(2, -1)
        q = self.rotate(self.q_norm(q)).transpose(1, 2)
        k = self.rotate(self.k_norm(self.k_proj(x).view(rows, entries, self.kv, self.size)))
        v = self.v_proj(x).view(rows, entries, self.kv, self.size)
        own = tuple(each.repeat_interleave(self.heads // self.kv, 2).transpose(1, 2) for each in (k, v))
        mixed = mix(q, [*before, own]) if before else F.scaled_dot_product_attention(q, *own, is_causal=True)
        mixed = mixed.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(mixed.reshape(rows, entries, -1)), own

    def rotate(self, x: Tensor) -> Tensor:
        half = self.turned // 2
        frequency = self.theta ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, two = x[..., :half], x[..., half : self.turned]
        return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., self.turned :]], -1)


def mix(q: Tensor, passes: list[Cells]) -> Tensor:
    """Attention of a later pass, of [rows, heads, entries, size].

    Guess r + 1 at entry i was preceded by the guesses of passes 1 to r - 1 at entries i - r + 1 to i - 1; up to entry
    i - r the model's own hidden states were known, which are the entries of the first pass.
    """
    later, entries = len(passes) - 1, q.shape[2]
    (k, v), guesses = passes[0], passes[1:]
    # The own pass comes last: shifts are r - 1, ..., 1, 0.
    moved = [(shifted(a, n), shifted(b, n)) for (a, b), n in zip(guesses, range(later - 1, -1, -1))]
    place = torch.arange(entries, device=q.device)
    unseen = place[None, :] > place[:, None] - later
    whole = (q @ k.mT).masked_fill(unseen, -math.inf)
    # A guess whose first ones lie before the text has only entries of its own; it is not counted anywhere.
    single = torch.stack([(q * a).sum(-1) for a, _ in moved], -1)
    scores = torch.cat([whole, single], -1).float() * q.shape[-1] ** -0.5
    shares = scores.softmax(-1).to(v.dtype)
    mixed = shares[..., :entries] @ v
    for at, (_, b) in enumerate(moved):
        mixed = mixed + shares[..., entries + at, None] * b
    return mixed


def shifted(x: Tensor, count: int, dim: int = 2) -> Tensor:
    """Move entries `count` places to the end, and put zeros before them.

    >>> shifted(torch.tensor([1, 2, 3]), 1, dim=0)
    tensor([0, 1, 2])
    """
    if not count:
        return x
    kept = x.narrow(dim, 0, max(0, x.shape[dim] - count))
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, min(count, x.shape[dim]))), kept], dim)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, before: list[Cells]) -> tuple[Tensor, Cells]:
        mixed, own = self.self_attn(self.input_layernorm(x), before)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), own


class Head(nn.Module):
    """The head under its checkpoint names, but for the `mtp.` before each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(hidden, eps), Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Block(config)])
        self.norm = Norm(hidden, eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, embedded: Tensor, hidden: Tensor, before: list[Cells]) -> tuple[Tensor, Cells]:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        x, own = self.layers[0](x, before)
        return self.norm(x), own

    def passes(self, embedded: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """The head's states of the first guess at every entry, then of the second after a right first one, ..."""
        before: list[Cells] = []
        for _ in range(GUESSES):
            hidden, own = self(embedded, hidden, before)
            before.append(own)
            yield hidden
            hidden = shifted(hidden, 1, dim=1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of some texts. Entry i has hidden state i and token i + 1, and guesses token i + 2."""

    following: Tensor  # token i + 1
    hidden: Tensor
    later: Tensor  # the model's hidden state of token i + 1, which knows the distribution of token i + 2
    targets: Tensor  # token i + 2
    asked: list[Tensor]  # for each guess, the entries that make it when an answer is drafted


class Texts:
    """Answers on a device with the model's final hidden states."""

    def __init__(self, answers: Answers, states: Tensor, chosen: Tensor, device: str) -> None:
        self.tokens, self.said, self.states = answers.tokens.to(device).long(), answers.said.to(device), states
        self.parts = torch.stack([answers.starts, answers.lengths])[:, chosen]
        self.parts = self.parts[:, self.parts[1].argsort(stable=True)]
        self.device = device

    def batches(self, most: int) -> list[tuple[int, int]]:
        """Texts of about one length together, up to `most` tokens with padding: the first, and the end."""
        lengths = self.parts[1].tolist()
        found, first = [], 0
        for at, length in enumerate(lengths):
            if (at + 1 - first) * length > most and at > first:
                found.append((first, at))
                first = at
        return [*found, (first, len(lengths))] if lengths else []

    def places(self, first: int, end: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Where the tokens of some texts are, of [texts, tokens], and which of them are no padding."""
        starts, lengths = self.parts[:, first:end].to(self.device)[:, :, None]
        longest = max(3, int(self.parts[1, end - 1]))
        place = torch.arange(-(-longest // multiple) * multiple, device=self.device)
        return starts + place.minimum(lengths - 1), place < lengths

    def batch(self, first: int, end: int) -> Batch:
        at, known = self.places(first, end)
        tokens, states, said = self.tokens[at], self.states[at], self.said[at] & known
        # The first token of an answer is computed with the prompt; guesses follow it.
        asked = [said[:, 2:] & said[:, 1:-1]]
        for _ in range(GUESSES - 1):
            asked.append(asked[0] & shifted(asked[-1], 1, dim=1))
        return Batch(tokens[:, 1:-1], states[:, :-2], states[:, 1:-1], tokens[:, 2:], asked)


@torch.no_grad()
def states_of(model: nn.Module, answers: Answers, device: str, most: int = 1 << 16) -> Tensor:
    """The model's final hidden states over all texts, one after another."""
    found = torch.empty(len(answers.tokens), model.config.hidden_size, dtype=model.dtype, device=device)
    texts = Texts(answers, found, torch.ones_like(answers.held), device)
    for first, end in texts.batches(most):
        at, known = texts.places(first, end, CHUNK)
        states = model.model(input_ids=texts.tokens[at], use_cache=False).last_hidden_state
        found[at[known]] = states[known]
    return found


def loss_of(head: Head, embedding: Tensor, batch: Batch) -> list[Tensor]:
    """Cross-entropy of each guess with the model's own distribution, in nats."""
    some = batch.asked[0]
    with torch.no_grad():
        expected = ((batch.later[some] @ embedding.mT).float() / TEMPERATURE).softmax(-1)
    found = []
    for states, asked in zip(head.passes(embedding[batch.following], batch.hidden), batch.asked):
        logits = (states[some].to(embedding.dtype) @ embedding.mT).float()
        each = F.cross_entropy(logits, expected, reduction="none")
        counted = asked[some].float()
        found.append((each * counted).sum() / counted.sum().clamp(min=1))
    return found


@torch.no_grad()
def acceptance(head: Head, embedding: Tensor, texts: Texts, most: int) -> dict[str, Any]:
    """The share of right guesses by place, of those whose guesses before were right, and what a step then yields."""
    right, possible = torch.zeros(GUESSES), torch.zeros(GUESSES)
    for first, end in texts.batches(most):
        batch = texts.batch(first, end)
        before = torch.ones_like(batch.asked[0])
        for guess, states in enumerate(head.passes(embedding[batch.following], batch.hidden)):
            drafted = batch.asked[guess] & before
            hits = drafted.clone()
            hits[drafted] = (states[drafted].to(embedding.dtype) @ embedding.mT).argmax(-1) == batch.targets[drafted]
            possible[guess] += drafted.sum().cpu()
            right[guess] += hits.sum().cpu()
            before = shifted(hits, 1, dim=1)
    shares = right / possible.clamp(min=1)
    return {
        "guesses": [int(n) for n in possible],
        "acceptance": [round(share, 4) for share in shares.tolist()],
        "tokens_per_step": [round(1 + shares.cumprod(0)[: n + 1].sum().item(), 3) for n in range(GUESSES)],
    }


def rate(share: float) -> float:
    """How much of the learning rate is used after a share of the time.

    >>> rate(0.015), rate(0.03), round(rate(0.515), 3), rate(1.0)
    (0.5, 1.0, 0.5, 0.0)
    """
    fallen = max(0.0, share - WARMUP) / (1 - WARMUP)
    return min(1.0, share / WARMUP) * (1 + math.cos(math.pi * min(1.0, fallen))) / 2


def train(
    head: Head,
    embedding: Tensor,
    texts: Texts,
    seconds: float,
    steps: int,
    batch_tokens: int,
    highest: float,
    seed: int,
) -> int:
    """Train until the time or the steps are used up, and return the number of steps."""
    optimisers = make_optimisers(head, highest)
    batches, random = texts.batches(batch_tokens), torch.Generator().manual_seed(seed)
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        if step % len(batches) == 0:
            order = torch.randperm(len(batches), generator=random).tolist()
        batch = texts.batch(*batches[order[step % len(batches)]])
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=embedding.is_cuda):
            losses = loss_of(head, embedding, batch)
        head.zero_grad(set_to_none=True)
        sum(weight * loss for weight, loss in zip(WEIGHTS, losses)).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        step += 1
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["highest"] * rate(max(share, step / steps))
            optimiser.step()
        if step % 100 == 0 or step == 1:
            told = " ".join(f"{loss.item():.4f}" for loss in losses)
            print(f"step {step} after {time.monotonic() - began:.1f} s: loss {told}", flush=True)
        share = max(step / steps, (time.monotonic() - began) / seconds)
    return step


def load_model(folder: str, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    use_faster_parts()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("head", type=Path, help="the file to write; its figures go beside it, as JSON")
    parser.add_argument("--model", default=str(builtin.FOLDER))
    parser.add_argument("--seconds", type=float, default=80.0, help="when the training ends, from the start")
    parser.add_argument("--steps", type=int, default=20_000, help="and how long at most")
    parser.add_argument("--batch-tokens", type=int, default=1 << 15)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    began = time.monotonic()
    model, answers = load_model(asked.model, asked.device), Answers.load(asked.answers)
    states = states_of(model, answers, asked.device)
    print(f"hidden states of {len(answers.tokens)} tokens after {time.monotonic() - began:.1f} s", flush=True)
    embedding = model.get_output_embeddings().weight
    torch.manual_seed(asked.seed)
    head = Head(model.config).to(asked.device)
    texts = Texts(answers, states, ~answers.held, asked.device)
    settings = (asked.seconds - (time.monotonic() - began), asked.steps, asked.batch_tokens, asked.rate, asked.seed)
    steps = train(head, embedding, texts, *settings)
    head.to(torch.bfloat16)
    weights = {f"mtp.{name}": parameter.detach().cpu().contiguous() for name, parameter in head.named_parameters()}
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise FloatingPointError(f"after {steps} steps weights are not finite any more")
    save_file(weights, asked.head, {"format": "pt"})
    head.to(model.dtype)
    found: dict[str, Any] = {
        "texts": len(answers.lengths),
        "tokens": len(answers.tokens),
        "answer_tokens": int(answers.said.sum()),
        "steps": steps,
        "batch_tokens": asked.batch_tokens,
    }
    for name, chosen in (("greedy", answers.greedy), ("sampled", ~answers.greedy)):
        held = Texts(answers, states, answers.held & chosen, asked.device)
        found[name] = acceptance(head, embedding, held, asked.batch_tokens)
    asked.head.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
