"""The official clients of Ollama's API, and litellm's, against a server with the tiny model.

Each is installed into a folder of its own, so these tests are slow, and skip without a package index.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.servers.clients import in_node, in_python
from tests.support.servers.http_server import Served, serving
from weft.server.settings import ServerSettings

pytestmark = pytest.mark.slow

OLLAMA = """
import json, os
from ollama import Client, ResponseError
client = Client(host=os.environ["SERVER"])
asked = dict(model="tiny", messages=[{"role": "user", "content": "Hello"}])
asked["options"] = {"temperature": 0, "num_predict": 8}
whole = client.chat(**asked)
pieces = list(client.chat(stream=True, **asked))
formed = client.chat(format={"const": "yes"}, model="tiny", messages=asked["messages"], options={"num_predict": 60})
text = client.generate(model="tiny", prompt="Once upon", raw=True, options=asked["options"])
embedded = client.embed(model="tiny", input=["Hello", "It rains."], dimensions=8)
def weather(city: str) -> str:
    return city
tools = client.chat(tools=[weather], **asked)
try:
    client.chat(model="other", messages=asked["messages"])
except ResponseError as error:
    missing = [error.status_code, error.error]
print(json.dumps({
    "whole": whole.message.content, "done": pieces[-1].done_reason,
    "pieces": "".join(p.message.content for p in pieces),
    "formed": formed.message.content, "text": text.response, "tools": tools.done, "missing": missing,
    "tags": [m.model for m in client.list().models], "ps": [m.model for m in client.ps().models],
    "show": client.show("tiny").capabilities, "embedded": [list(each) for each in embedded.embeddings],
}))
"""

LITELLM = """
import json, os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
asked = dict(model="ollama_chat/tiny", api_base=os.environ["SERVER"], temperature=0, max_tokens=8,
             messages=[{"role": "user", "content": "Hello"}])
whole = litellm.completion(**asked)
pieces = "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **asked))
print(json.dumps({"whole": whole.choices[0].message.content, "pieces": pieces}))
"""

NODE = """
import { Ollama } from "ollama"
const client = new Ollama({ host: process.env.SERVER })
const messages = [{ role: "user", content: "Hello" }]
const asked = { model: "tiny", messages, options: { temperature: 0, num_predict: 8 } }
const whole = await client.chat(asked)
let pieces = ""
for await (const part of await client.chat({ ...asked, stream: true })) pieces += part.message.content
const list = await client.list()
console.log(JSON.stringify({ whole: whole.message.content, pieces, tags: list.models.map((m) => m.name) }))
"""


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny"), max_sequences=8) as server:
        yield server


def test_the_python_client(served: Served, tmp_path):
    found = in_python(served, tmp_path, "ollama", OLLAMA)
    assert found["whole"] == found["pieces"] == served.say(max_tokens=8)
    assert found["done"] == "length"
    assert json.loads(str(found["formed"])) == "yes"
    assert found["text"] == served.complete(max_tokens=8)["choices"][0]["text"]
    assert found["tools"] is True
    assert found["missing"] == [404, "model 'other' does not exist; this server has 'tiny'"]
    assert found["tags"] == found["ps"] == ["tiny"]
    assert "completion" in found["show"]
    same = served.post("/v1/embeddings", {"input": ["Hello", "It rains."], "dimensions": 8})["data"]
    assert found["embedded"] == [pytest.approx(each["embedding"], abs=1e-3) for each in same]


def test_litellm(served: Served, tmp_path):
    found = in_python(served, tmp_path, "litellm", LITELLM)
    assert found["whole"] == found["pieces"] == served.say(max_tokens=8)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node")
def test_the_node_client(served: Served, tmp_path):
    found = in_node(served, tmp_path, "ollama", NODE)
    assert found["whole"] == found["pieces"] == served.say(max_tokens=8)
    assert found["tags"] == ["tiny"]
