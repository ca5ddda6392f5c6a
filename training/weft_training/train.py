"""Training: `python -m weft_training.train DATA RUN --minutes 9`, again and again until the schedule is done.

Every call goes on where the last one stopped (RUN/state.safetensors). What is drawn for a step depends on the seed and
the step alone. Matrices are moved by Muon, everything else by AdamW; the rate warms up, stays, and falls to zero.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft_training.architecture import configuration
from weft_training.delta import gated_delta_rule
from weft_training.muon import Muon
from weft_training.template import END, OVER

# How often each source is drawn, whatever its size: talking first.
MIX = {
    "made": 0.44, "taught": 0.25, "instructed": 0.06, "calls": 0.08, "library": 0.06, "manual": 0.04, "novels": 0.03,
    "speeches": 0.03, "jargon": 0.01,
}  # fmt: skip

# The same for a second stage, which makes a trained model talk as it was meant to: hardly anything of a small teacher.
AFTERWARDS = {"made": 0.66, "taught": 0.06, "instructed": 0.09, "calls": 0.09, "library": 0.06, "manual": 0.04}
EVALUATE_EVERY = 300
SAVE_EVERY = 500


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: int
    warmup: int = 200
    falling: float = 0.3  # the last share of steps, in which the rate falls to zero
    long_from: float = 0.92  # from here on whole contexts are seen
    batch_tokens: int = 1 << 17
    length: int = 1024
    long_length: int = 4096

    def rate(self, step: int) -> float:
        """
        >>> schedule = Schedule(1000)
        >>> schedule.rate(100), schedule.rate(500), schedule.rate(1000)
        (0.5, 1.0, 0.0)
        """
        return min(1.0, step / self.warmup, (self.steps - step) / (self.falling * self.steps))

    def shape(self, step: int) -> tuple[int, int]:
        length = self.long_length if step >= self.long_from * self.steps else self.length
        return self.batch_tokens // length, length


class Packed:
    """The sources of a folder, drawn in windows of so many tokens. Each begins with a text, as every prompt does."""

    def __init__(self, folder: Path, part: str, over: int, mix: dict[str, float] = MIX) -> None:
        self.counts = json.loads((folder / "sources.json").read_text())
        self.names = [name for name in self.counts if name in mix and self.counts[name][part]["tokens"] > 0]
        self.tokens = {name: np.memmap(folder / f"{name}.{part}.bin", np.uint16, "r") for name in self.names}
        self.starts = {name: starts_of(tokens, over) for name, tokens in self.tokens.items()}
        weights = np.array([mix[name] for name in self.names])
        self.weights = weights / weights.sum()

    def draw(self, rows: int, length: int, seed: int, step: int) -> Tensor:
        random = np.random.default_rng([seed, step])
        chosen = random.choice(len(self.names), rows, p=self.weights)
        places = random.random(rows)
        windows = []
        for source, place in zip(chosen, places):
            tokens, starts = self.tokens[self.names[source]], self.starts[self.names[source]]
            first = starts[int(place * np.searchsorted(starts, len(tokens) - length, "right"))]
            windows.append(np.resize(tokens[first : first + length + 1], length + 1))
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def starts_of(tokens: np.ndarray, over: int) -> np.ndarray:
    """Where texts begin.

    >>> starts_of(np.array([5, 6, 0, 7, 0]), 0)
    array([0, 3])
    """
    return np.concatenate([[0], np.flatnonzero(np.asarray(tokens[:-1]) == over) + 1])


def make_model(tokenizer: Path, device: str, seed: int) -> nn.Module:
    from tokenizers import Tokenizer
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    torch.manual_seed(seed)
    settings = configuration(known.token_to_id(END), known.token_to_id(OVER))
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif "embed" in name:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("dt_bias"):
            # Steps of 0.001 to 0.1, so that heads remember from a few tokens to thousands.
            step = torch.exp(torch.empty_like(parameter).uniform_(math.log(0.001), math.log(0.1)))
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model.to(device).train()


def use_faster_parts() -> None:
    """Instead of the parts of transformers that are slow to train where no other library is installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    modeling.torch_chunk_gated_delta_rule = gated_delta_rule
    modeling.causal_conv1d_fn = convolve
    modeling.Qwen3_5RMSNorm.forward = normalise
    modeling.Qwen3_5RMSNormGated.forward = normalise_and_gate


def normalise(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight.to(x.dtype), self.eps)


def normalise_and_gate(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.variance_epsilon) * F.silu(gate)


def convolve(x: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: object) -> Tensor:
    """Each channel's last few values, weighed: a sum of shifted inputs. Of [rows, channels, tokens]."""
    width, tokens = weight.shape[1], x.shape[2]
    padded = F.pad(x.mT, (0, 0, width - 1, 0))
    total = padded[:, :tokens] * weight[:, 0].to(x.dtype)
    for at in range(1, width):
        total = torch.addcmul(total, padded[:, at : at + tokens], weight[:, at].to(x.dtype))
    return F.silu(total).mT


def make_optimisers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside; AdamW for embeddings, norms, decays and convolutions."""
    inside, others = [], []
    for name, parameter in model.named_parameters():
        (inside if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    muon = Muon(inside, lr=rate)
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["highest"] = rate
    return [muon, adam]


def compile_parts(model: nn.Module) -> None:
    """Layers of one kind are compiled once: most of their time goes into passes over memory that can be joined."""
    global _mean_loss
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    _mean_loss = torch.compile(_mean_loss, dynamic=False)


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    hidden = model.model(window[:, :-1], use_cache=False).last_hidden_state
    return _mean_loss(model.lm_head, hidden, window[:, 1:])


def _mean_loss(head: nn.Module, states: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(states).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, held: Packed, device: str, windows: int = 16) -> dict[str, float]:
    """On held-out text, source by source."""
    model.eval()
    found = {}
    for name in held.names:
        tokens, counts = held.tokens[name], held.counts[name]["held"]
        count = max(1, min(windows, len(tokens) // 1025))
        lines = np.stack([np.resize(tokens[i * 1025 : (i + 1) * 1025], 1025) for i in range(count)]).astype(np.int64)
        # Few windows, of other shapes than those that are trained on: compiling for them would take longer.
        with torch.autocast(device, torch.bfloat16), torch.compiler.set_stance("force_eager"):
            nats = loss_of(model, torch.from_numpy(lines).to(device)).item()
        found[name] = nats / math.log(2) * counts["tokens"] / counts["bytes"]
    model.train()
    return found


@torch.no_grad()
def fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


class Run:
    """A folder with a training's state and its log."""

    def __init__(self, folder: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.optimisers, self.step = folder, model, optimisers, 0
        if (folder / "state.safetensors").exists():
            self._load()

    def save(self) -> None:
        """Nothing is kept that could not be gone on from."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise FloatingPointError(f"step {self.step}: weights are not finite any more")
        state = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for number, optimiser in enumerate(self.optimisers):
            for index, values in optimiser.state_dict()["state"].items():
                state |= {f"{number}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
        state["step"] = torch.tensor(self.step)
        save_file({name: t.contiguous().cpu() for name, t in state.items()}, self.folder / "new.safetensors")
        (self.folder / "new.safetensors").replace(self.folder / "state.safetensors")

    def _load(self) -> None:
        state = load_file(self.folder / "state.safetensors")
        self.step = int(state.pop("step"))
        fill(self.model, {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")})
        for number, optimiser in enumerate(self.optimisers):
            whole = optimiser.state_dict()
            for name, tensor in state.items():
                owner, _, rest = name.partition(".")
                if owner == str(number):
                    index, _, key = rest.partition(".")
                    whole["state"].setdefault(int(index), {})[key] = tensor
            optimiser.load_state_dict(whole)

    def note(self, **values: object) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")
        print(" ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()), flush=True)


def compute_gradients(model: nn.Module, window: Tensor, device: str) -> Tensor:
    """Where optimisers look for them, clipped; returns the mean loss."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16):
        loss = loss_of(model, window.to(device, non_blocking=True))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach()


def train(run: Run, data: Packed, held: Packed, schedule: Schedule, seed: int, device: str, seconds: float) -> None:
    began, last, noted = time.monotonic(), time.monotonic(), run.step
    while run.step < schedule.steps and time.monotonic() - began < seconds:
        window = data.draw(*schedule.shape(run.step), seed, run.step)
        loss = compute_gradients(run.model, window, device)
        for optimiser in run.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["highest"] * schedule.rate(run.step + 1)
            optimiser.step()
        run.step += 1
        if run.step % 20 == 0 or run.step == 1:
            now = time.monotonic()
            rate = (run.step - noted) * schedule.batch_tokens / (now - last)
            run.note(loss=float(loss), tokens_per_second=rate, of=schedule.steps)
            last, noted = now, run.step
        if run.step % EVALUATE_EVERY == 0:
            bits = bits_per_byte(run.model, held, device)
            run.note(**{f"bits_{name}": value for name, value in bits.items()})
        if run.step % SAVE_EVERY == 0:
            run.save()
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch-tokens", type=int, default=1 << 17)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--after", type=Path, help="folder of a trained model: a second stage, from there on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    model = make_model(asked.data / "tokenizer", asked.device, asked.seed)
    use_faster_parts()
    if asked.device == "cuda":
        compile_parts(model)
    run = Run(asked.run, model, make_optimisers(model, asked.rate))
    mix, falling = (AFTERWARDS, 1.0) if asked.after else (MIX, 0.3)
    if run.step:
        print(f"goes on at step {run.step} of {asked.run}")
    elif asked.after:
        fill(model, load_file(asked.after / "model.safetensors"))
    over = model.config.pad_token_id
    data, held = Packed(asked.data / "packed", "train", over, mix), Packed(asked.data / "packed", "held", over)
    schedule = Schedule(asked.steps, batch_tokens=asked.batch_tokens, falling=falling)
    train(run, data, held, schedule, asked.seed, asked.device, asked.minutes * 60)
    if run.step == schedule.steps:
        run.note(**{f"bits_{name}": value for name, value in bits_per_byte(model, held, asked.device, 64).items()})
        model.to(torch.bfloat16).save_pretrained(asked.run / "model")


if __name__ == "__main__":
    main()
