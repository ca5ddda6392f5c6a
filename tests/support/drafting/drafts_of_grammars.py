"""Answers of grammars, with drafts and without."""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from tests.support.models import tiny_model
from tests.support.models.engines import make_engine, model_of, tokens
from tests.support.models.tiny_model import no_time
from weft.base.grammar import Grammar
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.text.grammar import Grammars

FAMILY = "qwen3_5"
SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"enum": ["a small thing", "a small animal"]},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 99},
        "available": {"type": "boolean"},
    },
    "required": ["description", "quantity", "available"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "(abcabcabc|abcabd)+x[0-9]{3}"),
    Grammar("choice", json.dumps(["yes, of course", "yes, but later", "no"])),
]


@cache
def grammars() -> Grammars:
    return Grammars(tiny_model.tokenizer(), model_of(FAMILY).vocab_size, no_time)


def answer(
    engine: Engine, grammar: Grammar, seed: int | None, made: Grammars | None = None
) -> tuple[list[int], FinishReason | None]:
    params = SamplingParams(max_tokens=90, temperature=0.0 if seed is None else 1.0, seed=seed)
    # A prompt with the words of the answers, so that there are suffixes too.
    prompt = [*tokens(8, 1), *tiny_model.tokenizer().encode('abcabcabcabd "quantity": 12, "available": true')]
    request = Request(np.array(prompt, np.int32) % 256, params, grammar=grammar)
    engine.add(request, (made or grammars())(grammar, request.stop_tokens))
    found: list[int] = []
    finish = None
    while not engine.idle:
        for output in engine.step():
            found += [] if output.token is None else [output.token]
            finish = output.finish or finish
    return found, finish


def check_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps(grammar: Grammar, depth: int) -> None:
    plain = make_engine(FAMILY, depth=depth)
    drafting = Drafting(7, costs=FreeDrafts())
    drafted = make_engine(FAMILY, drafting=drafting, depth=depth)
    # What was answered before is a guess at what is answered again.
    for seed in (None, 1, 1):
        wanted = answer(plain, grammar, seed)
        assert answer(drafted, grammar, seed) == wanted
        text = bytes(wanted[0]).decode()
        if grammar.kind == "json_schema" and wanted[1] is FinishReason.STOP:
            assert set(json.loads(text)) == set(SCHEMA["required"])
    assert drafting.counts.accepted["grammar", 1] > 0
    habits = sum(count for (drafter, _), count in drafting.counts.accepted.items() if drafter == "habit")
    assert habits > 0 or grammar.kind == "choice", "choices are made once in an answer"
    assert drafted.planner.number < plain.planner.number
