"""Checks exact answers on the given model: digests of a hit, of chunks and in company against those of a cold run.

If some differ, both runs are repeated with a digest of the residual stream after every layer, to name the first layer
that differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.base.sampling import SamplingParams

if TYPE_CHECKING:
    from weft.offline.llm import LLM
    from weft.offline.result import Result

ANSWER = 24
COMPANY = 7
# (layer, position) -> digest of the residual stream.
Streams = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class ExactCheck:
    """One way to compute an answer. `differs` is the index of the first token whose logits differ from a cold run's.

    `layer` is the first layer that differs; None: none does, or steps are recorded and cannot be watched.
    """

    cached_tokens: int
    differs: int | None = None
    layer: int | None = None


class ExactTest:
    """Needs an exact engine with its cache on. Uses its own salts."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self._llm = llm
        self._chance = random.Random(f"exact-test {seed}")
        self._cell = llm.engine.ledger.spec.cell
        self._salts = 0

    def fits(self) -> bool:
        return 6 * self._cell + 3 * ANSWER <= self._llm.config.max_length

    def run(self) -> dict[str, ExactCheck]:
        """Compare a hit, a second turn, and answers in company and in chunks with those of lone, cold runs."""
        cell, prompt = self._cell, self._draw(2 * self._cell + 17)
        salt = self._new_salt()
        turn = self._answer([prompt], salt)[0]
        follow_up = [*prompt, *turn.token_ids, *self._draw(cell)]
        # No token of these is that of the prompt at its position, so that watched layers tell them apart.
        others = [[(token + 1 + k) % self._llm.vocab_size for token in prompt] for k in range(COMPANY)]
        others = [[*other, *self._draw(k * cell // 3)] for k, other in enumerate(others)]
        return {
            "prefill-hit": self._compare([prompt], salt),
            "second turn": self._compare([follow_up], salt),
            "in company": self._compare([prompt, *others], self._new_salt()),
            "in chunks": self._compare([prompt, *self._fillers()], self._new_salt(), last=True),
        }

    def _fillers(self) -> list[list[int]]:
        """Return prompts that leave one cell of a step's tokens to a prompt behind them, if as many may run at once."""
        length, config = 4 * self._cell, self._llm.config
        count = min((config.max_tokens_per_step - self._cell) // length, config.max_sequences - 1)
        rest = config.max_tokens_per_step - self._cell - count * length
        sizes = [length] * count + ([rest] if 0 < rest < length and count + 1 < config.max_sequences else [])
        return [self._draw(size) for size in sizes]

    def _compare(self, prompts: list[list[int]], salt: str, last: bool = False) -> ExactCheck:
        """Compare the first answer with a cold run of its prompt alone. `last`: its prompt comes after the others."""
        prompts = [*prompts[1:], prompts[0]] if last else prompts
        ours = -1 if last else 0
        found, cold = self._answer(prompts, salt)[ours], self._answer([prompts[ours]], self._new_salt())[0]
        pairs = enumerate(zip(found.digests or (), cold.digests or (), strict=True))
        differs = next((index for index, (one, other) in pairs if one != other), None)
        layer = None
        if differs is not None:
            # What the first run left in the cache may have been the cause: under its own salt, nothing has changed.
            layer = self._first_layer(prompts, prompts[ours], salt, cold.token_ids[:differs])
        return ExactCheck(found.cached_tokens, differs, layer)

    def _first_layer(
        self, prompts: list[list[int]], prompt: list[int], salt: str, answered: Sequence[int]
    ) -> int | None:
        known = [*prompt, *answered]
        with watched(self._llm, known) as one:
            self._answer(prompts, salt)
        with watched(self._llm, known) as other:
            self._answer([prompt], self._new_salt())
        differ = sorted(place for place in one.keys() & other.keys() if one[place] != other[place])
        return differ[0][0] if differ else None

    def _draw(self, length: int) -> list[int]:
        return [self._chance.randrange(self._llm.vocab_size) for _ in range(length)]

    def _new_salt(self) -> str:
        self._salts += 1
        return f"exact-test {self._salts}"

    def _answer(self, prompts: list[list[int]], salt: str) -> list[Result]:
        params = SamplingParams(max_tokens=ANSWER, seed=1, ignore_eos=True, logits_digest=True)
        return self._llm.generate(prompts, params, use_tqdm=False, cache_salt=salt)


@contextmanager
def watched(llm: LLM, known: list[int]) -> Iterator[Streams]:
    """Collect digests of the residual stream after every layer, of the tokens that are `known` at their positions."""
    found: Streams = {}

    def watch(number: int, stream: Any, batch: Any) -> None:
        digests = llm.chosen.operations.digest(stream.total()).tolist()
        for token, position, value in zip(batch.token_ids.tolist(), batch.positions.tolist(), digests, strict=True):
            if position < len(known) and known[position] == token:
                found[number, position] = value

    def watching(number: int, forward: Any) -> Any:
        def observed(stream: Any, rotation: Any, batch: Any, views: Any) -> None:
            forward(stream, rotation, batch, views)
            watch(number, stream, batch)

        return observed

    layers: list[Any] = list(llm.model.model.layers)  # type: ignore[arg-type, union-attr]
    for number, layer in enumerate(layers):
        layer.forward = watching(number, layer.forward)
    try:
        yield found
    finally:
        for layer in layers:
            del layer.forward


def exact_complaints(found: dict[str, ExactCheck]) -> list[str]:
    """Return the problems in words; empty if there are none."""
    wrong = []
    for name, each in found.items():
        if each.differs is not None:
            where = "" if each.layer is None else f", first after layer {each.layer}"
            wrong.append(f"{name}: the logits of token {each.differs} differ from those of a cold run{where}")
        if name in ("prefill-hit", "second turn") and not each.cached_tokens:
            wrong.append(f"{name}: nothing was reused, so nothing was tested")
    return wrong
