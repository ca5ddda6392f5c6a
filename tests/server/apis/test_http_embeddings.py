"""Embeddings, scores, rankings and classes over HTTP: forms of several clients, bounds, usage. Tiny models."""

from __future__ import annotations

import base64
import math

import numpy as np
import openai
import pytest
import torch

from tests.support.models.plain_models import QWEN3
from tests.support.models.vector_models import QUERY, VectorOracle, llama_mean, qwen3_embedding
from tests.support.servers.http_server import serving
from weft.server.settings import Limits, ServerSettings

FLOAT32 = {"dtype": "float32", "weights": "checkpoint"}
DOCUMENTS = ["A loom weaves cloth.", "It rains.", "Cells are 64 tokens long. " * 8]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """A server of a model like Qwen3-Embedding, and the public implementation."""
    folder = tmp_path_factory.mktemp("embedding")
    oracle = qwen3_embedding(folder)
    settings = ServerSettings(model_name="tiny", limits=Limits(sequences=4, inputs=40))
    with serving(settings, model=str(folder), **FLOAT32) as server:
        yield server, oracle


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A server of a model with a head of one class, and the public implementation."""
    folder = tmp_path_factory.mktemp("reranker")
    oracle = VectorOracle(QWEN3, ["relevant"])
    oracle.save(folder)
    with serving(ServerSettings(model_name="tiny"), model=str(folder), **FLOAT32) as server:
        yield server, oracle


def near(found, wanted) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


# embeddings -----------------------------------------------------------------------------------------------------------


def test_floats_and_base64_are_the_same_vector_as_the_public_implementations(embedding):
    server, oracle = embedding
    body = {"model": "tiny", "input": DOCUMENTS, "user": "me"}
    found = server.post("/v1/embeddings", body | {"encoding_format": "float"})
    assert [each["index"] for each in found["data"]] == [0, 1, 2]
    for text, each in zip(DOCUMENTS, found["data"], strict=True):
        near(each["embedding"], oracle.last(text))
    tokens = sum(map(len, DOCUMENTS))
    assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (tokens, tokens)
    packed = server.post("/v1/embeddings", body | {"encoding_format": "base64"})
    for each, other in zip(packed["data"], found["data"], strict=True):
        assert np.frombuffer(base64.b64decode(each["embedding"]), "<f4") == pytest.approx(other["embedding"], abs=1e-6)


def test_openais_client_embeds_texts_and_token_arrays(embedding):
    server, oracle = embedding
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    near(client.embeddings.create(model="tiny", input="A loom").data[0].embedding, oracle.last("A loom"))
    found = client.embeddings.create(model="tiny", input=[list(b"A loom"), list(b"It")], dimensions=8)
    for text, each in zip(("A loom", "It"), found.data, strict=True):
        near(each.embedding, torch.nn.functional.normalize(oracle.last(text)[:8], dim=0))


def test_more_texts_than_answers_are_computed_part_by_part_in_order(embedding):
    server, oracle = embedding
    texts = [f"text {n}" for n in range(40)]
    found = server.post("/v1/embeddings", {"input": texts})["data"]
    for text, each in zip(texts, found, strict=True):
        near(each["embedding"], oracle.last(text))
    assert server.stats()["open"] == 0


def test_a_shared_instruction_is_computed_once(embedding):
    server, _ = embedding
    instruction = "Represent what a weaver would ask about looms and threads. " * 5
    found = server.post("/v1/embeddings", {"input": [instruction + word for word in ("a", "b", "c")]})
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 256


def test_a_named_prompt_goes_before_each_text(embedding):
    server, oracle = embedding
    found = server.post("/v1/embeddings", {"input": "What is a loom?", "prompt_name": "query"})
    near(found["data"][0]["embedding"], oracle.last(f"{QUERY}What is a loom?"))
    error = server.post("/v1/embeddings", {"input": "a", "prompt_name": "none"}, 400)["error"]
    assert error["param"] == "prompt_name"
    assert server.post("/v1/embeddings", {"input": [[1, 2]], "prompt_name": "query"}, 400)["error"]["message"] == (
        "prompt_name goes before texts; put its tokens before token ids yourself"
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a"] * 41}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[1, 9999]]}, "input[1]"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a" * 3000}, "input"),
        ({"input": "a", "model": "other"}, "model"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_any_work(embedding, body, field):
    server, _ = embedding
    before = server.stats()["steps"]
    status = 404 if field == "model" else 400
    assert server.post("/v1/embeddings", body, status)["error"]["param"] == field
    assert server.stats()["steps"] == before


def test_a_long_text_is_cut_if_the_client_says_so(embedding):
    server, oracle = embedding
    text = "weaving " * 400
    found = server.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 100})
    near(found["data"][0]["embedding"], oracle.last(text[-100:]))


@pytest.mark.thorough
def test_a_large_body_is_read_by_a_worker(embedding):
    server, oracle = embedding
    texts = [f"{n} {'thread ' * 100}" for n in range(30)]
    found = server.post("/v1/embeddings", {"input": texts})
    near(found["data"][29]["embedding"], oracle.last(texts[29]))


def test_ollamas_routes(embedding):
    server, oracle = embedding
    found = server.post("/api/embed", {"model": "tiny", "input": DOCUMENTS, "truncate": True, "keep_alive": "5m"})
    for text, each in zip(DOCUMENTS, found["embeddings"], strict=True):
        near(each, oracle.last(text))
    assert found["prompt_eval_count"] == sum(map(len, DOCUMENTS))
    assert server.post("/api/embed", {"model": "tiny", "input": []})["embeddings"] == []
    older = server.post("/api/embeddings", {"model": "tiny:latest", "prompt": "It rains."})
    near(older["embedding"], oracle.last("It rains."))
    assert "embedding" in server.post("/api/show", {"model": "tiny"})["capabilities"]
    assert "dimensions" in server.post("/api/embed", {"model": "tiny", "input": "a", "dimensions": 99}, 400)["error"]


# scores ---------------------------------------------------------------------------------------------------------------


def head_score(oracle: VectorOracle, query: str, document: str) -> float:
    return float(oracle.hidden((query + document).encode())[-1].sigmoid())


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_in_the_form_of_coheres_and_jinas_clients(reranker, path):
    server, oracle = reranker
    body = {"model": "tiny", "query": "loom?", "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    found = server.post(path, body)
    wanted = [head_score(oracle, "loom?", text) for text in DOCUMENTS]
    order = sorted(range(3), key=lambda place: -wanted[place])
    assert [each["index"] for each in found["results"]] == order
    near([each["relevance_score"] for each in found["results"]], torch.tensor([wanted[place] for place in order]))
    shown = [each.get("document") for each in found["results"]]
    assert shown == [None if path == "/v2/rerank" else {"text": DOCUMENTS[place]} for place in order]
    assert found["meta"]["tokens"]["input_tokens"] == found["usage"]["total_tokens"]
    [best] = server.post(path, body | {"top_n": 1, "return_documents": False})["results"]
    assert (best["index"], "document" in best) == (order[0], False)
    cut = server.post(path, body | {"max_tokens_per_doc": 3, "top_n": 3})["results"]
    assert {each["index"]: pytest.approx(each["relevance_score"], abs=1e-4) for each in cut} == {
        place: head_score(oracle, "loom?", text[:3]) for place, text in enumerate(DOCUMENTS)
    }


def test_pairs_are_scored_in_the_form_of_vllms_clients(reranker):
    server, oracle = reranker
    found = server.post("/v1/score", {"text_1": "loom?", "text_2": DOCUMENTS})
    near([each["score"] for each in found["data"]], torch.tensor([head_score(oracle, "loom?", t) for t in DOCUMENTS]))
    [pair] = server.post("/score", {"queries": ["loom?"], "documents": ["rain"]})["data"]
    near([pair["score"]], torch.tensor([head_score(oracle, "loom?", "rain")]))
    assert server.post("/v1/score", {"text_1": ["a", "b"], "text_2": DOCUMENTS}, 400)["error"]["param"] == "text_1"
    assert server.post("/v1/score", {"text_1": "a"}, 400)["error"]["param"] == "text_1"
    assert server.post("/v1/rerank", {"query": "a", "documents": []}, 400)["error"]["param"] == "documents"


def test_embeddings_rank_by_their_cosine(embedding):
    server, oracle = embedding
    found = server.post("/v1/score", {"text_1": "loom?", "text_2": DOCUMENTS})
    query = oracle.last(f"{QUERY}loom?")
    near([each["score"] for each in found["data"]], torch.stack([query @ oracle.last(text) for text in DOCUMENTS]))
    two = server.post("/v1/score", {"text_1": ["a", "b"], "text_2": DOCUMENTS[:2]})["data"]
    wanted = [oracle.last(QUERY + a) @ oracle.last(text) for a, text in zip("ab", DOCUMENTS)]
    near([each["score"] for each in two], torch.stack(wanted))


def test_texts_are_classified(reranker):
    server, oracle = reranker
    [found] = server.post("/classify", {"input": "It rains.", "truncate_prompt_tokens": 50})["data"]
    assert (found["label"], found["num_classes"]) == ("relevant", 1)
    near(found["probs"], oracle.hidden(b"It rains.")[-1].sigmoid())


def test_a_model_that_answers_with_a_word_ranks_too():
    with serving(ServerSettings(model_name="tiny")) as server:
        # In the tiny tokenizer, a token is a byte.
        error = server.post("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, 400)["error"]
        assert error["message"] == "answers must be words of one token each; 'yes' has 3"
        assert server.client.get("/v1/models").json()["data"][0]["capabilities"] == [
            "generation",
            "embeddings",
            "scores",
        ]
        vector = server.post("/v1/embeddings", {"input": "a"})["data"][0]["embedding"]
        assert math.isclose(sum(each * each for each in vector), 1, abs_tol=1e-4)


# models without a head over a vocabulary ------------------------------------------------------------------------------


def test_a_model_without_a_vocabulary_says_so_and_is_healthy(tmp_path, reranker):
    oracle = llama_mean(tmp_path, include_prompt=False)
    with serving(ServerSettings(model_name="tiny"), model=str(tmp_path), **FLOAT32) as server:
        refused = (
            "this model generates no text, because it has no head over a vocabulary; /v1/models says what it can do"
        )
        assert server.chat(status=400)["error"]["message"] == refused
        assert server.complete(status=400)["error"]["message"] == refused
        assert server.post("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, 400)[
            "error"
        ].endswith(refused)
        [card] = server.client.get("/v1/models").json()["data"]
        assert (card["capabilities"], card["embedding_size"]) == (["embeddings", "scores"], 64)
        assert server.client.get("/health_generate").status_code == 200
        assert server.client.get("/api/v0/models").json()["data"][0]["type"] == "embeddings"
        named = {"input": "loom", "prompt_name": "query"}
        near(server.post("/v1/embeddings", named)["data"][0]["embedding"], oracle.mean(f"{QUERY}loom", len(QUERY)))
        error = server.post("/v1/embeddings", named | {"truncate_prompt_tokens": 20}, 400)["error"]
        assert error["message"] == "input with the model's prompt must have fewer than 20 tokens, or it would be cut"
    error = reranker[0].post("/v1/embeddings", {"input": "a"}, 400)["error"]
    assert error["message"] == ("this model has a class head and no embeddings; use /v1/score, /v1/rerank or /classify")
