"""Parity with the public implementation: tiny models of it, and a runner that drives ours by hand-made plans.

The runner stands in for planner and memory: it hands out pages, window pages, slots and tails from a buffer full of
NaN, never twice, and poisons what a sequence has left behind. So whatever reads beyond its own shows at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kernels.operations import CPU
from weft.base.grid import cells_covering, first_window_cell, floor_to_grid
from weft.base.plan import Captures, Plan, Sampling
from weft.device.store import Store
from weft.kernels.interface import Operations
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.models.weights import load_model
from weft.runner.batching import build_batch

LENGTHS = (1, 2, 63, 64, 65, 127, 200)
# Some answers decode past the end of a cell.
GREEDY_TOKENS = 24
TOLERANCE = 1e-4


class TinyModel(Protocol):
    """`config_class` and `model_class` name classes of transformers; `settings` are the configuration's fields.

    `published` are fields that replace those of the saved configuration file, as other checkpoints spell them (None
    removes a field).
    """

    config_class: str
    model_class: str
    settings: dict[str, Any]
    published: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tiny:
    config_class: str
    model_class: str
    settings: dict[str, Any]
    published: dict[str, Any] = field(default_factory=dict)

    def variant(self, published: dict[str, Any] | None = None, **changes: Any) -> Tiny:
        settings = {key: value for key, value in (self.settings | changes).items() if value is not ...}
        return Tiny(self.config_class, self.model_class, settings, self.published | (published or {}))


class Oracle:
    """A model of the public implementation with weights that make every part of it matter."""

    def __init__(self, tiny: TinyModel, seed: int = 0) -> None:
        import transformers

        if not hasattr(transformers, tiny.model_class):
            pytest.skip(f"transformers {transformers.__version__} has no {tiny.model_class}")
        transformers.logging.set_verbosity_error()
        self.tiny = tiny
        config = getattr(transformers, tiny.config_class)(**json.loads(json.dumps(tiny.settings)))
        torch.manual_seed(seed)
        kind = getattr(transformers, tiny.model_class)
        self.model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        tied = self.model.get_input_embeddings().weight is self.model.get_output_embeddings().weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in [*self.model.named_parameters(), *persistent_buffers(self.model)]:
                # Only gpt-oss keeps its experts as [experts, inputs, outputs].
                transposed = tiny.model_class.startswith("GptOss") and tensor.ndim == 3
                scatter(name, tensor, generator, -2 if transposed else -1, tied)

    def save(self, folder: Path) -> Path:
        """A checkpoint, as this implementation writes it, with the fields of `published` put in place."""
        self.model.save_pretrained(folder)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | self.tiny.published
        removed = [name for name, value in self.tiny.published.items() if value is None]
        file.write_text(json.dumps({name: value for name, value in config.items() if name not in removed}))
        return folder

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary], computed from nothing."""
        ids = torch.tensor([list(tokens)])
        return self.model(input_ids=ids, use_cache=False).logits[0].float()


def config_of(tiny: TinyModel) -> dict[str, Any]:
    """The configuration with its defaults; the settings alone if this transformers does not know the model."""
    import transformers

    settings = json.loads(json.dumps(tiny.settings))
    known = getattr(transformers, tiny.config_class, None)
    return (settings if known is None else known(**settings).to_dict()) | {"architectures": [tiny.model_class]}


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point())


def scatter(name: str, tensor: Tensor, generator: torch.Generator, inputs: int, tied: bool) -> None:
    """Draw values of a size that lets signals, states and positions through; dimension `inputs` is summed over.

    A `tied` embedding is drawn as the head that it also is: with larger vectors the logit of the last token exceeds
    all others, whatever the layers compute.
    """
    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("A_log"):
        return
    if tensor.ndim < 2:
        # Norms, biases, decays: near what they start from.
        tensor.add_(0.1 * noise)
    elif "embed_tokens" in name and not tied:
        tensor.copy_(noise)
    elif "conv" in name and tensor.ndim == 3:
        tensor.copy_(0.5 * noise)
    else:
        tensor.copy_(noise / math.sqrt(tensor.shape[inputs]))


@dataclass(slots=True, eq=False)
class Running:
    """A sequence of the direct runner."""

    seat: int
    tokens: list[int]
    tail: int
    computed: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def all_logits(self) -> Tensor:
        return torch.cat(self.logits)


class DirectRunner:
    """Runs a model by plans made here. `poison=False` leaves what was left behind as it is."""

    def __init__(
        self, model: CausalModel, budget_bytes: int = 8 << 20, poison: bool = True, operations: Operations = CPU
    ) -> None:
        self.model = model
        self.operations = operations
        self.spec = MemorySpec(model.memories(operations))
        self.store = Store(self.spec, budget_bytes)
        self.store.buffer.fill_(0xFF)
        self.unit_bytes = unit_bytes(self.spec)
        self.poison = poison
        self.used_bytes = 0
        self.seats = 0
        self.plans = 0

    def open(self, tokens: Sequence[int]) -> Running:
        self.seats += 1
        return Running(self.seats - 1, list(tokens), self._take(Kind.TAIL))

    def step(self, work: Sequence[tuple[Running, int]]) -> list[Tensor]:
        """Compute so many further tokens of each sequence, in one batch; the logits of each, [tokens, vocabulary]."""
        # Plans have rows of one token first.
        ordered = sorted(work, key=lambda item: item[1] != 1)
        plan = self._plan(ordered)
        with torch.inference_mode():
            batch = build_batch(plan, self.spec, torch.zeros(self.seats, dtype=torch.int64), "cpu", self.operations)
            logits = self.model.logits(self.model(batch, self.store.views), batch).float()
        for (sequence, count), part in zip(ordered, logits.split([count for _, count in ordered])):
            sequence.logits.append(part)
            self._leave_behind(sequence, sequence.computed + count)
        self._keep_captures(plan, [sequence for sequence, _ in ordered])
        return [sequence.logits[-1] for sequence, _ in work]

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int = 1 << 30, stagger: int = 0
    ) -> list[Running]:
        """Greedy answers of `count` tokens to all prompts together; prompt i joins at step i * stagger."""
        sequences = [self.open(prompt) for prompt in prompts]
        step = 0
        while True:
            joined = [s for i, s in enumerate(sequences) if i * stagger <= step]
            work = []
            for sequence, prompt in zip(joined, prompts):
                left = len(sequence.tokens) - sequence.computed
                if sequence.computed < len(prompt) + count - 1:
                    work.append((sequence, min(chunk, left)))
            if not work and len(joined) == len(sequences):
                return sequences
            if work:
                self.step(work)
            for sequence, _ in work:
                if sequence.computed == len(sequence.tokens):
                    sequence.tokens.append(int(sequence.logits[-1][-1].argmax()))
            step += 1

    def _take(self, kind: Kind) -> int:
        """The next unit of a kind that overlaps with nothing handed out before."""
        if kind not in self.unit_bytes:
            return 0
        size = self.unit_bytes[kind]
        index = -(-self.used_bytes // size)
        self.used_bytes = (index + 1) * size
        assert self.used_bytes <= len(self.store.buffer), "the direct runner's buffer is too small for this test"
        return index

    def _plan(self, work: Sequence[tuple[Running, int]]) -> Plan:
        cell, window = self.spec.cell, self.spec.window or 0
        start = [sequence.computed for sequence, _ in work]
        end = [sequence.computed + count for sequence, count in work]
        for (sequence, _), last in zip(work, end):
            while len(sequence.pages) < cells_covering(last, cell):
                sequence.pages.append(self._take(Kind.PAGE))
                sequence.window_pages.append(self._take(Kind.WINDOW))
        first = [first_window_cell(s, window, cell) for s in start]
        passed = [(row, floor_to_grid(b, cell)) for row, (a, b) in enumerate(zip(start, end)) if floor_to_grid(b) > a]
        if Kind.STATE not in self.unit_bytes:
            passed = []
        self.plans += 1
        return Plan(
            number=self.plans,
            seat=ints([sequence.seat for sequence, _ in work]),
            start=ints(start),
            end=ints(end),
            tokens=ints([t for (s, _), a, b in zip(work, start, end) for t in s.tokens[a:b]]),
            from_board=ints([0] * len(work)),
            read_slot=ints([sequence.slot for sequence, _ in work]),
            tail=ints([sequence.tail for sequence, _ in work]),
            page_table=table([sequence.pages for sequence, _ in work]),
            window_table=table(
                [s.window_pages[low : cells_covering(b, cell)] for (s, _), low, b in zip(work, first, end)]
            ),
            window_first=ints(first),
            captures=Captures(
                ints([row for row, _ in passed]),
                ints([position for _, position in passed]),
                ints([self._take(Kind.STATE) for _ in passed]),
            ),
            sampled=ints([]),
            sampling=no_sampling(),
            score_index=ints([]),
            score_token=ints([]),
            score_top=0,
        )

    def _leave_behind(self, sequence: Running, computed: int) -> None:
        """Advance a sequence, and poison the window pages that it cannot see again."""
        if self.spec.window and self.poison:
            before = first_window_cell(sequence.computed, self.spec.window, self.spec.cell)
            after = first_window_cell(computed, self.spec.window, self.spec.cell)
            for page in sequence.window_pages[before:after]:
                self.store.poison(Kind.WINDOW, page)
        sequence.computed = computed

    def _keep_captures(self, plan: Plan, sequences: Sequence[Running]) -> None:
        for row, position, slot in zip(plan.captures.row, plan.captures.position, plan.captures.slot):
            sequence = sequences[row]
            if self.poison and plan.start[row] >= self.spec.cell:
                self.store.poison(Kind.STATE, sequence.slot)
            sequence.slot = int(slot)
            assert position == floor_to_grid(sequence.computed, self.spec.cell)


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)


def no_sampling() -> Sampling:
    floats, none = np.zeros(0, np.float32), ints([])
    fields = {name: none if "Ints" in str(kind) else floats for name, kind in Sampling.__annotations__.items()}
    return Sampling(**{**fields, "all_greedy": True, "wants_logprobs": False})


def random_tokens(count: int, seed: int, vocabulary: int = 256) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True, slots=True)
class Pair:
    """The same weights in both implementations."""

    oracle: Oracle
    model: CausalModel
    config: dict[str, Any]

    def difference(self, tokens: Sequence[int], ours: Tensor) -> float:
        """The largest difference of logits, relative to the largest logit."""
        reference = self.oracle.logits(tokens)[: len(ours)]
        assert torch.isfinite(ours).all(), "logits of our own are not finite"
        return float((ours - reference).abs().max() / reference.abs().max())

    def assert_greedy(self, sequence: Running, prompt_length: int) -> None:
        """Every generated token is the one that the public implementation would have chosen after the ones before.

        So the answers are identical, and one pass of the oracle over the answer shows it.
        """
        reference = self.oracle.logits(sequence.tokens)
        chosen = reference[prompt_length - 1 : -1].argmax(-1).tolist()
        assert sequence.tokens[prompt_length:] == chosen
        ours = sequence.all_logits
        assert torch.isfinite(ours).all()
        assert float((ours - reference[: len(ours)]).abs().max() / reference.abs().max()) < TOLERANCE


def make_pair(tiny: TinyModel, folder: Path, change: Callable[[Oracle], None] | None = None) -> Pair:
    oracle = Oracle(tiny)
    if change is not None:
        change(oracle)
    model, config = load_model(oracle.save(folder), torch.float32, progress=False)
    return Pair(oracle, model, config)


def assert_parity(pair: Pair, lengths: Sequence[int] = LENGTHS) -> None:
    """Logits at many lengths, one prompt at a time; then greedy answers, alone and in company."""
    runner = DirectRunner(pair.model)
    for length in lengths:
        prompt = random_tokens(length, seed=length)
        [logits] = runner.step([(runner.open(prompt), length)])
        assert pair.difference(prompt, logits) < TOLERANCE, f"prompt of {length} tokens"
    [alone] = runner.generate([random_tokens(120, seed=7)], GREEDY_TOKENS)
    pair.assert_greedy(alone, 120)
    assert_company_parity(pair, lengths)


def assert_company_parity(pair: Pair, lengths: Sequence[int] = LENGTHS, chunk: int = 50, stagger: int = 3) -> None:
    """Prompts in chunks that end anywhere, joining while others already decode."""
    prompts = [random_tokens(length, seed=1000 + length) for length in lengths]
    for prompt, sequence in zip(prompts, DirectRunner(pair.model).generate(prompts, GREEDY_TOKENS, chunk, stagger)):
        assert len(sequence.tokens) == len(prompt) + GREEDY_TOKENS
        pair.assert_greedy(sequence, len(prompt))
