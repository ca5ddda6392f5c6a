"""What the default model is trained on: dialogues by rule are right, and are written as the template writes them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import nn
from weft import builtin
from weft.text.template import ChatTemplate, load_template

from weft_training.dialogues import is_good
from weft_training.made import MAKERS, conversation
from weft_training.made.basics import counting, sums, told_and_asked
from weft_training.made.facts import FUNCTIONS
from weft_training.muon import Muon
from weft_training.questions import question
from weft_training.sources import plain
from weft_training.template import JINJA, SPECIALS, written


def test_a_conversation_is_written_as_the_chat_template_writes_it():
    exchanges = [("Hi", "Hello!"), ("Count to 2.", "1, 2.")]
    messages = [
        message
        for said, answer in exchanges
        for message in ({"role": "user", "content": said}, {"role": "assistant", "content": answer})
    ]
    rendered = ChatTemplate(JINJA, {}).render(messages, add_generation_prompt=False)
    assert rendered == written(exchanges)
    assert all(special in written(exchanges) for special in SPECIALS[1:])


def test_the_shipped_model_has_the_template_of_its_training():
    assert load_template(builtin.FOLDER, {}).source == JINJA


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f[0])
def test_a_function_that_is_taught_compiles(function):
    name, parameters, body, _ = function
    names: dict = {}
    exec(compile(f"def {name}({parameters}):\n    {body}\n", name, "exec"), names)
    assert callable(names[name])


def test_sums_are_right():
    random = Random(3)
    for _ in range(300):
        said, answer = sums(random)
        a, sign, b = re.search(r"(\d+) (\+|-|\*|plus|minus|times) (\d+)", said).groups()
        word = {"plus": "+", "minus": "-", "times": "*"}.get(sign, sign)
        assert int(re.search(r"(-?\d+)\.$", answer)[1]) == eval(f"{a} {word} {b}"), (said, answer)


def test_counting_begins_and_ends_where_it_was_asked_to():
    random = Random(4)
    for _ in range(200):
        said, answer = counting(random)
        low, high = map(int, re.findall(r"\d+", said)[:2])
        numbers = [int(n) for n in answer.rstrip(".").split(", ")]
        assert (numbers[0], numbers[-1]) == (low, high), (said, answer)
        assert len({b - a for a, b in pairwise(numbers)}) <= 1


def test_everything_is_drawn_from_the_seed_alone():
    first, second = ([conversation(Random(7)), question(Random(8))] for _ in range(2))
    assert first == second
    assert len({json.dumps(conversation(Random(seed))) for seed in range(50)}) > 45


def test_every_maker_asks_and_answers():
    for maker in MAKERS:
        [*_, (said, answer)] = maker(Random(1))
        assert said
        assert answer
        assert not any(special in said + answer for special in SPECIALS)


def test_answers_that_repeat_themselves_are_dropped():
    assert is_good("A ladder helps you to reach high places. Lean it against a wall.")
    assert not is_good("It is good. It is good.")
    assert not is_good("word " * 200)


def test_what_was_said_at_first_is_asked_at_the_end():
    for seed in range(60):
        (said, _), (_, answer) = told_and_asked(Random(seed))
        known = set(re.findall(r"\w+", said))
        assert set(re.findall(r"[A-Z]\w+", answer)[1:]) <= known


def test_pages_become_plain_text():
    assert plain("<body><div role='main'><p>A &lt; B</p><p>C</p></div></body>") == "A < B\nC"


def test_windows_are_drawn_from_seed_and_step_alone(tmp_path):
    train = pytest.importorskip("weft_training.train")
    tokens = np.arange(5000, dtype=np.uint16)
    tokens[49::50] = 9999
    tokens.tofile(tmp_path / "made.train.bin")
    counts = {"made": {"train": {"tokens": 5000, "bytes": 5000}}}
    (tmp_path / "sources.json").write_text(json.dumps(counts))
    packed = train.Packed(tmp_path, "train", over=9999)
    a, b, other = (packed.draw(4, 16, seed=1, step=step) for step in (5, 5, 6))
    assert a.equal(b)
    assert not a.equal(other)
    assert a.shape == (4, 17)
    assert (a[:, 0] % 50 == 0).all(), "every window begins with a text"


@pytest.mark.parametrize("shared", [1, 2])
def test_the_faster_delta_rule_is_that_of_transformers(shared):
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    from weft_training.delta import gated_delta_rule

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 128, heads, 16, requires_grad=True) for heads in (3, 3, 3 * shared))
    decay = torch.tensor([0.01, 0.2, 3.0]).repeat(shared)
    g, beta = (-torch.rand(2, 128, len(decay)) * decay).requires_grad_(), torch.rand(2, 128, len(decay))
    expected, _ = modeling.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    found, _ = gated_delta_rule(q, k, v, g=g, beta=beta)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), [q, k, v, g]) for out in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_small_matrices_are_inverted_by_substitution():
    import torch

    from weft_training.substitution import launch

    keys = nn.functional.normalize(torch.randn(3, 64, 32), dim=-1)
    a, one = keys @ keys.mT * torch.rand(3, 64, 1), torch.eye(64)
    torch.testing.assert_close((one + a.tril(-1)) @ launch(a), one.expand(3, 64, 64), rtol=0, atol=5e-3)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    import torch
    from torch import nn

    from weft_training.train import Run, make_optimisers

    def start(folder: str) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        return Run(tmp_path / folder, model, make_optimisers(model, 0.01))

    def steps(run: Run, count: int) -> None:
        for _ in range(count):
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(run.step))
            run.model(inputs).square().mean().backward()
            for optimiser in run.optimisers:
                optimiser.step()
                optimiser.zero_grad()
            run.step += 1

    whole, first = start("whole"), start("parts")
    steps(whole, 6)
    steps(first, 3)
    first.save()
    second = start("parts")
    assert second.step == 3
    steps(second, 3)
    for a, b in zip(whole.model.parameters(), second.model.parameters()):
        torch.testing.assert_close(a, b)


def test_matrices_of_one_shape_are_moved_together_as_pytorch_moves_them_one_by_one():
    shapes = [(24, 40), (40, 24), (24, 40), (32, 32)]
    ours, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    for mine, other in zip(ours, theirs):
        mine.data.copy_(other)
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    moving = [Muon(ours, **settings), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)]
    for _ in range(3):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for each in moving:
            each.step()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, atol=2e-3, rtol=0)
