"""The MTP head: what its passes see, what it learns of a tiny model, and the files that it is shipped in."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft import LLM
from weft.models.weights import has_head

from weft_training import answers, export_head, head
from weft_training.answers import Text, answer, joined
from weft_training.head import GUESSES, Head, Texts, acceptance, loss_of, shifted, states_of, train
from weft_training.template import END, START, written

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    found = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).eval().requires_grad_(False)
    found.get_output_embeddings().weight.mul_(30)
    return found


@pytest.fixture
def drawn(model):
    """A head whose norms differ from one, and gates from each other."""
    torch.manual_seed(1)
    found = Head(model.config)
    for parameter in found.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return found.requires_grad_(False)


def text_of(tokens: list[int], prompt: int, held: bool = False, turn: int = 1000) -> Text:
    """A text with a prompt and an answer; from `turn` on with another prompt and answer."""
    said = [n % turn >= prompt for n in range(len(tokens))]
    return Text([], 0.0, held, list(tokens), said)


def counting(texts: int) -> answers.Answers:
    """Texts in which every token is one more than the token before."""
    found = []
    for number in range(texts):
        first, length = number * 7 % 50, 9 + number % 5
        text = [(first + n) % 60 for n in range(length)]
        found.append(text_of(text, 2 + number % 3, held=number % 4 == 0))
    return joined(found)


def one_by_one(found: Head, embedded, states, entry: int):
    """The states of guesses after a text whose last known hidden state is that of `entry`, as serving computes them."""
    known = states[:, : entry + 1]
    while True:
        out, _ = found(embedded[:, : known.shape[1]], known, [])
        yield out[:, -1]
        known = torch.cat([known, out[:, -1:]], 1)


def test_later_passes_see_what_later_guesses_see(drawn):
    embedded, states = torch.randn(2, 2, 14, 32).unbind(0)
    passes = list(drawn.passes(embedded, states))
    for entry in range(14 - GUESSES):
        for guess, expected in zip(range(GUESSES), one_by_one(drawn, embedded, states, entry)):
            torch.testing.assert_close(passes[guess][:, entry + guess], expected, rtol=1e-4, atol=1e-5)


def test_hidden_states_are_those_of_the_text_alone(model):
    some = counting(6)
    states = states_of(model, some, "cpu")
    for start, length in zip(some.starts.tolist(), some.lengths.tolist()):
        text = some.tokens[None, start : start + length].long()
        expected = model.model(input_ids=text, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(states[start : start + length], expected, rtol=1e-4, atol=1e-4)


def test_entries_guess_the_tokens_of_an_answer_after_its_first(model):
    some = counting(5)
    texts = Texts(some, states_of(model, some, "cpu"), torch.ones_like(some.held), "cpu")
    [(first, end)] = texts.batches(1000)
    batch = texts.batch(first, end)
    assert (batch.targets == (batch.following + 1) % 60)[batch.asked[0]].all()
    for row, (start, length) in enumerate(texts.parts.T.tolist()):
        text, states = some.tokens[start : start + length], texts.states[start : start + length]
        prompt = int((~some.said[start : start + length]).sum())
        for guess in range(GUESSES):
            asked = batch.asked[guess][row]
            assert batch.targets[row][asked].tolist() == text[prompt + 1 + guess :].tolist()
            assert batch.hidden[row][asked].equal(states[prompt - 1 + guess : -2])


def test_acceptance_counts_a_guess_only_after_right_ones(drawn):
    """With three tokens, a third of the guesses is right by luck."""
    random, states, embedding = Random(2), torch.randn(400, 32), torch.randn(3, 32)
    drawn_texts = [[random.randrange(3) for _ in range(5 + n % 9)] for n in range(30)]
    some = joined([text_of(tokens, 3, held=True, turn=9) for tokens in drawn_texts])
    texts = Texts(some, states, some.held, "cpu")
    right, possible = [0] * GUESSES, [0] * GUESSES
    for start, length in texts.parts.T.tolist():
        text, said = some.tokens[start : start + length].long(), some.said[start : start + length].tolist()
        for entry in range(length - 2):
            guesses = one_by_one(drawn, embedding[text[None, 1:]], states[None, start : start + length], entry)
            for guess, expected, out in zip(range(GUESSES), text[entry + 2 :].tolist(), guesses):
                if not all(said[entry + 1 : entry + 3 + guess]):
                    break
                possible[guess] += 1
                if int((out @ embedding.mT).argmax()) != expected:
                    break
                right[guess] += 1
    counted = acceptance(drawn, embedding, texts, most=40)
    assert right[-1] > 0
    assert counted["guesses"] == possible
    assert counted["acceptance"] == [round(a / b, 4) for a, b in zip(right, possible)]


def test_a_head_learns_what_its_model_says(model):
    """The model is a tiny one with random weights, whose own greedy tokens depend on the last few ones."""
    texts = torch.randint(64, (96, 4), generator=torch.Generator().manual_seed(3))
    for _ in range(12):
        texts = torch.cat([texts, model(input_ids=texts, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    some = joined([text_of(text, 4, held=n % 6 == 0) for n, text in enumerate(texts.tolist())])
    states, embedding = states_of(model, some, "cpu"), model.get_output_embeddings().weight
    torch.manual_seed(0)
    taught = Head(model.config)
    texts, held = (Texts(some, states, chosen, "cpu") for chosen in (~some.held, some.held))
    before = acceptance(taught, embedding, held, 1000)["acceptance"][0]
    assert train(taught, embedding, texts, seconds=1e9, steps=40, batch_tokens=1000, highest=1e-2, seed=0) == 40
    after = acceptance(taught, embedding, held, 1000)
    assert after["acceptance"][0] > max(0.6, before + 0.3), after
    assert after["tokens_per_step"] == sorted(after["tokens_per_step"])


def test_losses_are_computed_in_bfloat16_as_on_a_gpu(model, drawn):
    some = counting(5)
    states = states_of(model, some, "cpu")
    texts = Texts(some, states, ~some.held, "cpu")
    batch = texts.batch(*texts.batches(1000)[0])
    exact = loss_of(drawn, model.get_output_embeddings().weight, batch)
    half = Texts(some, states.bfloat16(), ~some.held, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_of(drawn, model.get_output_embeddings().weight.bfloat16(), half.batch(*half.batches(1000)[0]))
    for a, b in zip(exact, found):
        assert abs(a - b) < 0.05


def test_what_stands_before_an_answer_ends_where_the_model_answers():
    drawn = [answers.pieces(random) for random in [Random(1)] for _ in range(60)]
    assert drawn == [answers.pieces(random) for random in [Random(1)] for _ in range(60)]
    chats = [each for each in drawn if START in each[0]]
    assert all(piece.endswith(f"{START}assistant\n") for each in chats for piece in each)
    assert all(piece.startswith(f"\n{START}user\n") for each in chats for piece in each[1:])
    assert 40 < len(chats) < 60
    assert max(map(len, drawn)) > 1


def test_texts_are_conversations_with_the_models_own_answers():
    with LLM(dtype="float32", memory="64MiB", threads=1, progress=False) as llm:
        texts = [Text(answers.asked([("Hello", "?"), ("Count from 1 to 3.", "?")]), 0.0, False) for _ in range(2)]
        assert answer(llm, texts, Random(0)) == texts
        assert answer(llm, texts, Random(0)) == []
        whole = llm.tokenizer.decode(texts[0].tokens, skip_special=False)
        spoken = llm.tokenizer.decode(
            [t for t, said in zip(texts[0].tokens, texts[0].said) if said], skip_special=False
        )
    assert spoken.count(END) == 2
    first, second, _ = spoken.split(END)
    assert whole == written([("Hello", first), ("Count from 1 to 3.", second)]).removesuffix("\n")


def test_a_head_is_added_to_a_checkpoint_and_nothing_else_changes(model, drawn, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="40KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in config if "mtp" not in name}))
    weights = {f"mtp.{name}": tensor.bfloat16() for name, tensor in drawn.named_parameters()}
    save_file(weights, tmp_path / "head.safetensors")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert not has_head(folder, "checkpoint")
    for _ in range(2):  # the second replaces the first
        export_head.export(tmp_path / "head.safetensors", folder)
        changed = {file.name for file in folder.iterdir() if before.get(file.name) != file.read_bytes()}
        assert changed == {"config.json", "model.safetensors.index.json", export_head.FILE}
    assert has_head(folder, "checkpoint")
    assert load_file(folder / export_head.FILE).keys() == weights.keys()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in stored.values() for t in tensors.values())


def test_a_head_with_other_tensors_is_refused(model, drawn, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="40KB")
    weights = {f"mtp.{name}": tensor.bfloat16() for name, tensor in drawn.named_parameters()}
    save_file(weights | {"mtp.fc.weight": torch.zeros(3, 3, dtype=torch.bfloat16)}, tmp_path / "head.safetensors")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(SystemExit, match=r"mtp\.fc\.weight"):
        export_head.export(tmp_path / "head.safetensors", folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_nothing_moves_in_by_itself():
    assert shifted(torch.arange(6).view(2, 3), 2, dim=1).tolist() == [[0, 0, 0], [0, 0, 3]]
    assert head.rate(1.0) == 0.0
