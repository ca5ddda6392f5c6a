"""The program that shows the loop answers as the engine does, cold and after a hit."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from tests.support.fences import ROOT
from weft import LLM, SamplingParams

FILE = ROOT / "examples" / "loop.py"
COUNT = 6


@cache
def program() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def prompts() -> list[list[int]]:
    """Return prompts with a common beginning of three cells, and a short one."""
    random = np.random.default_rng(1)
    beginning = random.integers(3, 8000, 200).tolist()
    ends = [random.integers(3, 8000, count).tolist() for count in (3, 60, 0, 100)]
    return [*(beginning + end for end in ends), ends[0]]


def served(loop: Any, asked: Iterable[list[int]]) -> list[Any]:
    sequences = [loop.add(prompt, COUNT) for prompt in asked]
    while loop.waiting or loop.running:
        loop.step()
    return sequences


def answer_of(sequence: Any) -> list[int]:
    return sequence.tokens[sequence.prompt :].tolist()


def test_the_loop_answers_as_the_engine_does_and_reuses_what_it_computed() -> None:
    loop = program()["Loop"]()
    cold, warm = served(loop, prompts()), served(loop, prompts())
    with LLM(dtype="float32", draft="off", memory="64MiB", max_length=1024, device="cpu") as llm:
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        expected = [result.token_ids for result in llm.generate(prompts(), params)]
    assert [answer_of(sequence) for sequence in cold] == expected
    assert [answer_of(sequence) for sequence in warm] == expected
    # One token must be computed: of 200 tokens three cells, of 300 four.
    assert [sequence.lease.miss.cached for sequence in warm] == [192, 256, 192, 256, 0]
    # What has ended holds nothing: all that is left is cached.
    assert not loop.ledger.leases
    loop.ledger.cache.clear()
    assert len(loop.ledger.cache.trie) == 0


def test_it_is_short_and_tells_of_a_hit(capsys) -> None:
    assert len(FILE.read_text().splitlines()) <= 150
    program()["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[::2]] == ["0", "0", "192", "192"]
    assert lines[1] == lines[5], "a hit gives the answer of a cold run"
