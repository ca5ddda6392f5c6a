"""What a text gives if experts whose scores are about equal are chosen the other way.

A mixture of experts is not continuous. Where two experts tie for the last place, rounding chooses one of them, and the
logits of the two choices differ by tenths. Runs that decide such a tie differently are both right, if each gives what
the model gives for its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.kernels.choosing import Table
from weft.kernels.experts import Routing
from weft.kernels.interface import DecodeSteps, Operations
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.runner import Runner

# A router's logit that moves by so much changes the choice at a near-tie. Rounding moves logits by up to 1e-4.
NEAR = 1e-4
# Ways to decide a text's near-ties that are tried. Few texts have one near-tie.
MOST = 32
ROUTES = ("route_softmax", "route_top", "route_sigmoid")


@dataclass(frozen=True, order=True)
class Tie:
    """An expert of a layer that a position would choose if its logit were greater by `NEAR`."""

    layer: int  # among those with experts
    position: int
    expert: int

    @property
    def place(self) -> tuple[int, int]:
        return self.layer, self.position


@dataclass(frozen=True)
class Computed:
    """The logits after a text, the log-probabilities of its tokens after the first, and the near-ties met."""

    logits: Float[Tensor, " vocab"]
    scores: list[float]
    ties: list[Tie]


class Routes:
    """Operations that move the logits of the given ties by `NEAR`, and find the others. One step, one row."""

    def __init__(self, operations: Operations, moved: frozenset[Tie]) -> None:
        self._moved = moved
        self._layers = 0
        self.found: list[Tie] = []
        routes = {name: self._following(getattr(operations, name)) for name in ROUTES}
        # What is recorded does not come by here.
        self.operations = Table({**vars(operations), **routes, "record_decodes": DecodeSteps})

    def _following(self, route: Callable[..., Routing]) -> Callable[..., Routing]:
        def operation(logits: Float[Tensor, "tokens experts"], *others: Any, **more: Any) -> Routing:
            layer, logits = self._layers, logits.clone()
            self._layers += 1
            for tie in self._moved:
                if tie.layer == layer:
                    logits[tie.position, tie.expert] += NEAR
            routing, decided = route(logits, *others, **more), {tie.place for tie in self._moved}
            for expert in range(logits.shape[1]):
                raised = logits.clone()
                raised[:, expert] += NEAR
                choices = routing[1], route(raised, *others, **more)[1]
                before, after = ((chosen == expert).any(-1) for chosen in choices)
                ties = [Tie(layer, position, expert) for position in (after & ~before).nonzero()[:, 0].tolist()]
                self.found += [tie for tie in ties if tie.place not in decided]
            return routing

        return operation


@dataclass(frozen=True)
class NearTies:
    """Computes texts with their near-ties decided one way and another, each text alone and in one step."""

    model: CausalModel
    spec: MemorySpec
    operations: Operations
    memory: int
    longest: int

    def explain(self, text: list[int], *runs: Callable[[Computed], bool]) -> bool:
        """Return whether each of the runs agrees with some decision of the text's near-ties."""
        missing = list(runs)
        for computed in self.decisions(text):
            missing = [agrees for agrees in missing if not agrees(computed)]
            if not missing:
                return True
        return False

    def decisions(self, text: list[int]) -> Iterator[Computed]:
        """Yield what a text gives as it is, then with one near-tie decided the other way, then with two, and so on."""
        waiting, known = [frozenset[Tie]()], {frozenset[Tie]()}
        for _ in range(MOST):
            if not waiting:
                return
            moved = waiting.pop(0)
            computed = self.compute(text, moved)
            yield computed
            further = [moved | {tie} for tie in computed.ties]
            waiting += [each for each in further if each not in known]
            known.update(further)

    def compute(self, text: list[int], moved: frozenset[Tie] = frozenset()) -> Computed:
        routes = Routes(self.operations, moved)
        runner = Runner(self.model, self.spec, self.memory, 1, "cpu", 1, routes.operations)
        logits: list[Tensor] = []
        choose = runner.decide
        runner.decide = lambda found, *others: logits.append(found[0].clone()) or choose(found, *others)
        config = EngineConfig(
            memory_bytes=self.memory, max_sequences=1, max_tokens_per_step=self.longest, max_length=self.longest
        )
        engine = Engine(self.spec, runner, config)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        number = engine.add(Request(np.array(text, np.int32), params))
        while not engine.idle:
            engine.step()
        (last,) = logits
        return Computed(last, [score.logprob for score in engine.report(number).prompt_scores], routes.found)


def repeated(text: list[int], params: SamplingParams, raw: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Return logits after the repetition penalty, the one change of logits that is not an addition."""
    seen, penalised = torch.tensor(sorted(set(text))), raw.clone()
    own, factor = raw[seen], params.repetition_penalty
    penalised[seen] = torch.where(own > 0, own / factor, own * factor)
    return penalised
