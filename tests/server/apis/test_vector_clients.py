"""Cohere's client ranks, and OpenAI's for Node embeds. They are installed here, so these tests are slow."""

from __future__ import annotations

import shutil

import pytest

from tests.support.models.plain_models import QWEN3
from tests.support.models.vector_models import VectorOracle
from tests.support.servers.clients import in_node, in_python
from tests.support.servers.http_server import serving
from weft.server.settings import ServerSettings

pytestmark = pytest.mark.slow
DOCUMENTS = ["A loom weaves cloth.", "It rains.", "Threads cross."]

COHERE = (
    f"DOCUMENTS = {DOCUMENTS!r}"
    + """
import json, os, cohere
asked = dict(model="tiny", query="loom?", documents=DOCUMENTS, top_n=2)
newer = cohere.ClientV2(api_key="none", base_url=os.environ["SERVER"]).rerank(**asked)
older = cohere.Client(api_key="none", base_url=os.environ["SERVER"]).rerank(return_documents=True, **asked)
print(json.dumps({
    "newer": [[each.index, each.relevance_score] for each in newer.results],
    "older": [[each.index, each.document.text] for each in older.results],
}))
"""
)

NODE = """
import OpenAI from "openai"
const client = new OpenAI({ baseURL: process.env.SERVER + "/v1", apiKey: "none" })
const found = await client.embeddings.create({ model: "tiny", input: ["Hello", "It rains."] })
console.log(JSON.stringify({ vectors: found.data.map((each) => each.embedding) }))
"""


def test_coheres_client(tmp_path):
    folder = tmp_path / "model"
    VectorOracle(QWEN3, ["relevant"]).save(folder)
    with serving(ServerSettings(model_name="tiny"), model=str(folder), weights="checkpoint") as server:
        found = in_python(server, tmp_path, "cohere", COHERE)
        same = server.post("/v1/rerank", {"query": "loom?", "documents": DOCUMENTS, "top_n": 2})["results"]
    assert [index for index, _ in found["newer"]] == [each["index"] for each in same]
    assert [score for _, score in found["newer"]] == pytest.approx([each["relevance_score"] for each in same])
    assert found["older"] == [[each["index"], each["document"]["text"]] for each in same]


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node")
def test_openais_client_for_node(tmp_path):
    with serving(ServerSettings(model_name="tiny")) as server:
        found = in_node(server, tmp_path, "openai", NODE)
        same = server.post("/v1/embeddings", {"input": ["Hello", "It rains."]})["data"]
    assert found["vectors"] == [pytest.approx(each["embedding"], abs=1e-3) for each in same]
