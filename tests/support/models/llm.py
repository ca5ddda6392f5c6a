"""`weft.LLM` with the tiny model."""

from __future__ import annotations

from tests.support.clocks import Ticks
from tests.support.models import tiny_model
from weft import LLM, SamplingParams
from weft.offline.keywords import options_of

LIMITS = {"memory": "32MiB", "threads": 1, "max_sequences": 8, "max_tokens_per_step": 128, "max_length": 1024}
SETTINGS = tiny_model.OPTIONS | LIMITS


def make(**settings) -> LLM:
    return LLM.from_options(options_of({**SETTINGS, **settings}), progress=False, now=Ticks())


def greedy(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
