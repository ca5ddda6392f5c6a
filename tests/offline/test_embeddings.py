"""Embeddings, scores and classes equal the public implementation, and what texts share is computed once."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from tests.support.models.plain_models import LLAMA, QWEN3
from tests.support.models.vector_models import LAST, OPTIONS, QUERY, VectorOracle, llama_mean, pooled, qwen3_embedding
from weft import LLM, AsyncLLM, ModelError, RequestError, SamplingParams

TEXTS = ["a", "What is a loom?", "Cells are 64 tokens long. " * 6, "A loom weaves cloth. " * 20]


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    folder = tmp_path_factory.mktemp("last")
    oracle = qwen3_embedding(folder)
    # As scripts for vLLM say it.
    with LLM(str(folder), task="embed", progress=False, **OPTIONS) as llm:
        yield llm, oracle


@pytest.fixture(scope="module")
def mean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mean")
    oracle = llama_mean(folder, include_prompt=False)
    with LLM(str(folder), progress=False, max_tokens_per_step=100, **OPTIONS) as llm:
        yield llm, oracle


def near(found: list[float], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


def test_last_tokens_equal_the_public_implementation(last):
    llm, oracle = last
    for text, found in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
        near(found.outputs.embedding, oracle.last(text))
        assert found.prompt_token_ids == list(text.encode())
    named = llm.embed(TEXTS[:2], use_tqdm=False, prompt_name="query")
    for text, found in zip(TEXTS, named, strict=False):
        near(found.outputs.embedding, oracle.last(QUERY + text))
    [tokens] = llm.embed(list(TEXTS[1].encode()), use_tqdm=False)
    near(tokens.outputs.embedding, oracle.last(TEXTS[1]))


def test_means_equal_the_public_implementation_in_chunks_and_without_their_prompt(mean):
    llm, oracle = mean
    for text, found in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
        near(found.outputs.embedding, oracle.mean(text))
    for text, found in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False, prompt_name="query"), strict=True):
        near(found.outputs.embedding, oracle.mean(QUERY + text, len(QUERY)))


def test_a_few_dimensions_are_the_first_ones_normalised(last):
    llm, oracle = last
    [found] = llm.embed(TEXTS[1], use_tqdm=False, dimensions=8)
    near(found.outputs.embedding, torch.nn.functional.normalize(oracle.last(TEXTS[1])[:8], dim=0))
    with pytest.raises(RequestError, match="dimensions must be from 1 to 64, the size of this model's vectors, got 65"):
        llm.embed("a", dimensions=65)


def test_a_shared_instruction_is_computed_once_and_the_bits_of_a_mean_do_not_come_from_a_cache(last, mean):
    llm, oracle = last
    instruction = "Find passages that answer the question of a weaver. " * 5
    texts = [f"{instruction}{text}" for text in ("one", "two", "three", "four")]
    found = llm.embed(texts, use_tqdm=False)
    assert [each.num_cached_tokens >= 256 for each in found] == [False, True, True, True]
    for text, each in zip(texts, found, strict=True):
        near(each.outputs.embedding, oracle.last(text))
    llm, oracle = mean
    [cold], [again] = (llm.embed(texts[0], use_tqdm=False) for _ in range(2))
    assert again.num_cached_tokens == 0
    near(again.outputs.embedding, oracle.mean(texts[0]))
    assert cold.outputs == again.outputs


def test_a_model_that_embeds_may_generate_too_unless_it_has_no_head(last, mean):
    params = SamplingParams(max_tokens=2)
    assert len(last[0].generate("a", params, use_tqdm=False)[0].token_ids) == 2
    with pytest.raises(RequestError, match="this model generates no text, because it has no head over a vocabulary"):
        mean[0].generate("a", params)
    near(mean[0].embed("ab", use_tqdm=False)[0].outputs.embedding, mean[1].mean("ab"))


def test_scores_of_an_embedding_model_are_cosines(last):
    llm, oracle = last
    found = llm.score("What is a loom?", TEXTS[2:], use_tqdm=False)
    query = oracle.last(QUERY + "What is a loom?")
    near([each.outputs.score for each in found], torch.stack([query @ oracle.last(text) for text in TEXTS[2:]]))
    with pytest.raises(RequestError, match=r"prompt_name must be one of the model's prompts \(document, query\)"):
        llm.embed("a", prompt_name="other")
    with pytest.raises(RequestError, match="this model has no class head"):
        llm.classify("a")


@pytest.mark.parametrize("labels", [["relevant"], ["bad", "fair", "good"]], ids=len)
def test_classes_and_scores_of_a_head_equal_the_public_implementation(labels, tmp_path):
    oracle = VectorOracle(QWEN3, labels)
    oracle.save(tmp_path)
    with LLM(str(tmp_path), progress=False, **OPTIONS) as llm:
        for text, found in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            logits = oracle.hidden(text.encode())[-1]
            wanted = logits.sigmoid() if len(labels) == 1 else logits.softmax(0)
            near(found.outputs.probs, wanted)
            assert found.outputs.label == labels[int(wanted.argmax())]
        with pytest.raises(RequestError, match="has a class head and no embeddings"):
            llm.embed("a")
        if len(labels) == 1:
            [found] = llm.score("a query", "a document", use_tqdm=False)
            logits = oracle.hidden(b"a querya document")[-1]
            near([found.outputs.score], logits.sigmoid())
        else:
            with pytest.raises(RequestError, match="has 3 classes and does not score; use /classify"):
                llm.score("a", "b")


def test_an_async_engine_returns_the_same(last, tmp_path):
    qwen3_embedding(tmp_path)

    async def run():
        async with AsyncLLM(str(tmp_path), max_open=2, progress=False, **OPTIONS) as engine:
            return await engine.embed(TEXTS), await engine.score("a", TEXTS[:2])

    embedded, scores = asyncio.run(run())
    wanted = last[0].embed(TEXTS, use_tqdm=False), last[0].score("a", TEXTS[:2], use_tqdm=False)
    for mine, theirs in zip(embedded, wanted[0], strict=True):
        near(mine.outputs.embedding, torch.tensor(theirs.outputs.embedding))
    near([each.outputs.score for each in scores], torch.tensor([each.outputs.score for each in wanted[1]]))


@pytest.mark.parametrize("exact", [False, True])
def test_an_embedding_does_not_depend_on_its_company(exact, tmp_path):
    llama_mean(tmp_path)
    options = OPTIONS | {"exact": exact, "max_tokens_per_step": 80}
    with LLM(str(tmp_path), progress=False, **options) as llm:
        together = llm.embed(TEXTS, use_tqdm=False)
        alone = [llm.embed(text, use_tqdm=False)[0] for text in TEXTS]
    for mine, theirs in zip(together, alone, strict=True):
        near(mine.outputs.embedding, torch.tensor(theirs.outputs.embedding))
        assert not exact or mine.outputs == theirs.outputs


def test_a_reranker_by_the_files_of_sentence_transformers_scores_with_two_tokens_only(tmp_path):
    VectorOracle(QWEN3, tie_word_embeddings=True).save(tmp_path, architectures=["Qwen3ForCausalLM"])
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    modules = [
        {"type": f"sentence_transformers.{kind}", "path": path} for kind, path in zip(kinds, ("", "1_LogitScore"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    for second, message in ((110, "answers must be words of one token"), (None, "scores nothing: its LogitScore")):
        stated = {"true_token_id": 121, "false_token_id": second}
        (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(stated))
        with LLM(str(tmp_path), progress=False, **OPTIONS) as llm, pytest.raises(RequestError, match=message):
            llm.score("a", "b")


# what is refused ------------------------------------------------------------------------------------------------------

POOLINGS = [
    ({"pooling_mode_cls_token": True}, "got cls; a causal model's first token knows no other"),
    ({"pooling_mode_max_tokens": True}, "must be of the last token or a mean, got max_tokens"),
    (LAST | {"pooling_mode_mean_tokens": True}, "got mean and lasttoken"),
    ({}, "got none"),
]


@pytest.mark.parametrize(("pooling", "message"), POOLINGS, ids=range(len(POOLINGS)))
def test_poolings_that_are_not_supported_are_refused_by_name(pooling, message, tmp_path):
    VectorOracle(LLAMA).save(tmp_path)
    pooled(tmp_path, pooling)
    with LLM(str(tmp_path), progress=False, **OPTIONS) as llm, pytest.raises(RequestError, match=message):
        llm.embed("a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported: it looks ahead"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "XLMRobertaForSequenceClassification is not"),
        ({"use_bidirectional_attention": True}, "models that look ahead are not supported"),
        ({"is_causal": False}, "models that look ahead are not supported"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "a"}}, "id2label must map 0, 1"),
    ],
)
def test_models_that_look_ahead_are_refused_in_one_line(fields, message, tmp_path):
    VectorOracle(LLAMA).save(tmp_path, **fields)
    with pytest.raises(ModelError, match=message) as found:
        LLM(str(tmp_path), progress=False, **OPTIONS)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {"type": "Pooling"}, "must be a list of up to 16 modules"),
        ("modules.json", [{"type": "Pooling", "path": "../secrets"}], "must list modules with a type and a folder"),
        ("config_sentence_transformers.json", {"prompts": {"a": 3}}, "prompts must map up to 64 names to texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "must be one of its prompts, got 'a'"),
    ],
)
def test_files_that_are_wrong_are_refused_when_the_model_is_loaded(name, content, message, tmp_path):
    llama_mean(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), progress=False, **OPTIONS)
