"""Client libraries of OpenAI's API, each installed into a folder of its own, against one server with weft-small.

The model is small, so what is checked is what the server guarantees: streams equal whole answers, usage adds up, typed
answers hold their schema, and arguments of tools hold theirs. These tests skip without a package index. OpenAI's and
Anthropic's own Python clients are among the test dependencies: the other tests of this folder use them.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.support.servers.clients import in_node, in_python
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.slow
FIBRES = ("wool", "linen", "silk")

SHARED = """
import asyncio, json, os
from typing import Literal
from pydantic import BaseModel
URL = os.environ["SERVER"] + "/v1"
class Cloth(BaseModel):
    fibre: Literal["wool", "linen", "silk"]
    is_warm: bool
called = []
def threads(fibre: Literal["wool", "linen", "silk"]) -> int:
    "Return the number of threads of a cloth."
    called.append({"fibre": fibre})
    return 120
def said(**found):
    print(json.dumps(found))
"""

LITELLM = """
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
there = dict(model="openai/weft-small", api_base=URL, api_key="none")
asked = dict(messages=[{"role": "user", "content": "Hello"}], temperature=0, **there)
whole = litellm.completion(max_tokens=16, **asked)
stream = litellm.completion(max_tokens=16, stream=True, stream_options={"include_usage": True}, **asked)
pieces = list(stream)
formed = litellm.completion(response_format=Cloth, max_tokens=64, **asked)
text = litellm.text_completion(model="text-completion-openai/weft-small", prompt="Once upon", max_tokens=8,
    temperature=0, api_base=URL, api_key="none")
vectors = litellm.embedding(input=["Hello"], encoding_format="float", **there)
u = whole.usage
said(whole=whole.choices[0].message.content,
     pieces="".join(c.choices[0].delta.content or "" for c in pieces if c.choices),
     usage=[u.prompt_tokens, u.completion_tokens, u.total_tokens],
     formed=[json.loads(formed.choices[0].message.content)], text=text.choices[0].text,
     vector=vectors.data[0]["embedding"])
"""

INSTRUCTOR = """
import instructor, openai
plain = openai.OpenAI(base_url=URL, api_key="none")
there = dict(model="weft-small", temperature=0, max_retries=0)
hello = dict(messages=[{"role": "user", "content": "Hello"}], max_tokens=16, **there)
asked = dict(messages=[{"role": "user", "content": "Winter?"}], max_tokens=64, **there)
schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
whole = schema.chat.completions.create(response_model=None, **hello)
pieces = list(schema.chat.completions.create(response_model=None, stream=True, **hello))
formed = schema.chat.completions.create(response_model=Cloth, **asked)
streamed = list(schema.chat.completions.create_partial(response_model=Cloth, **asked))[-1]
assert streamed.model_dump() == formed.model_dump()
u = whole.usage
said(whole=whole.choices[0].message.content,
     pieces="".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
     usage=[u.prompt_tokens, u.completion_tokens, u.total_tokens],
     formed=[formed.model_dump(), tools.chat.completions.create(response_model=Cloth, **asked).model_dump()])
"""

PYDANTIC_AI = """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=URL, api_key="none")
model = OpenAIChatModel("weft-small", provider=provider)
few, more = {"temperature": 0, "max_tokens": 16}, {"temperature": 0, "max_tokens": 64}
async def main():
    agent = Agent(model, model_settings=few)
    whole = await agent.run("Hello")
    async with agent.run_stream("Hello") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    outputs = [(model, NativeOutput(Cloth)), (model, Cloth)]
    outputs.append((OpenAIResponsesModel("weft-small", provider=provider), NativeOutput(Cloth)))
    formed = [(await Agent(each, output_type=output, model_settings=more).run("Winter?")).output
              for each, output in outputs]
    u = whole.usage
    said(whole=whole.output, pieces="".join(pieces), usage=[u.input_tokens, u.output_tokens, u.total_tokens],
         formed=[each.model_dump() for each in formed])
asyncio.run(main())
"""

LANGCHAIN = """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
there = dict(base_url=URL, api_key="none", model="weft-small")
few = ChatOpenAI(temperature=0, max_tokens=16, stream_usage=True, **there)
more = ChatOpenAI(temperature=0, max_tokens=64, **there)
whole = few.invoke("Hello")
streamed = list(few.stream("Hello"))
question = HumanMessage("How many threads has linen?")
asked = more.bind_tools([threads], tool_choice="required").invoke([question])
results = [ToolMessage(str(threads(**call["args"])), tool_call_id=call["id"]) for call in asked.tool_calls]
answer = more.bind_tools([threads], tool_choice="none").invoke([question, asked, *results])
formed = more.with_structured_output(Cloth, method="json_schema").invoke("Winter?")
vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **there).embed_documents(["Hello"])
text = OpenAI(temperature=0, max_tokens=8, **there).invoke("Once upon")
u = whole.usage_metadata
said(whole=whole.content, pieces="".join(piece.content for piece in streamed),
     usage=[u["input_tokens"], u["output_tokens"], u["total_tokens"]], called=called, answers=[answer.content],
     formed=[formed.model_dump()], vector=vectors[0], text=text)
"""

LLAMA_INDEX = """
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
there = dict(model="weft-small", api_base=URL, api_key="none", temperature=0, context_window=2048)
chat = OpenAILike(max_tokens=16, is_chat_model=True, **there)
tools = OpenAILike(max_tokens=64, is_chat_model=True, is_function_calling_model=True, **there)
plain = OpenAILike(max_tokens=8, is_chat_model=False, **there)
hello = [ChatMessage(role="user", content="Hello")]
whole = chat.chat(hello)
pieces = [piece.delta or "" for piece in chat.stream_chat(hello)]
tool = FunctionTool.from_defaults(fn=threads)
asked = tools.chat_with_tools([tool], user_msg="How many threads has linen?", tool_required=True)
for call in tools.get_tool_calls_from_response(asked):
    tool(**call.tool_kwargs)
formed = tools.structured_predict(Cloth, PromptTemplate("Winter?"), llm_kwargs={"tool_choice": "required"})
u = whole.raw.usage
said(whole=whole.message.content, pieces="".join(pieces),
     usage=[u.prompt_tokens, u.completion_tokens, u.total_tokens], called=called, formed=[formed.model_dump()],
     text=plain.complete("Once upon").text)
"""

OPENAI_AGENTS = """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
few, more = ModelSettings(temperature=0, max_tokens=16), ModelSettings(temperature=0, max_tokens=64)
required = ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
async def main():
    client = AsyncOpenAI(base_url=URL, api_key="none")
    responses = OpenAIResponsesModel("weft-small", client)
    formed, answers = [], []
    for model in (OpenAIChatCompletionsModel("weft-small", client), responses):
        typed = Agent("weaver", model=model, output_type=Cloth, model_settings=more)
        formed.append((await Runner.run(typed, "Winter?")).final_output)
        armed = Agent("weaver", tools=[function_tool(threads)], model=model, model_settings=required)
        answers.append((await Runner.run(armed, "How many threads has linen?", max_turns=4)).final_output)
    plain = Agent("weaver", model=responses, model_settings=few)
    whole = await Runner.run(plain, "Hello")
    stream = Runner.run_streamed(plain, "Hello")
    events = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
    u = whole.context_wrapper.usage
    said(whole=whole.final_output, usage=[u.input_tokens, u.output_tokens, u.total_tokens],
         pieces="".join(each.delta for each in events if each.type == "response.output_text.delta"),
         formed=[each.model_dump() for each in formed], called=called, answers=answers)
asyncio.run(main())
"""

LLM = """
import tempfile
from pathlib import Path
holder = tempfile.TemporaryDirectory()
os.environ |= {"LLM_USER_PATH": holder.name, "LLM_LOAD_PLUGINS": ""}
known = {"model_id": "weft", "model_name": "weft-small", "api_base": URL, "supports_schema": True}
(Path(holder.name) / "extra-openai-models.yaml").write_text(json.dumps([known]))
import llm
model = llm.get_model("weft")
few = dict(temperature=0, max_tokens=16, key="none")
whole = model.prompt("Hello", stream=False, **few)
pieces = list(model.prompt("Hello", stream=True, **few))
formed = model.prompt("Winter?", schema=Cloth, stream=False, temperature=0, max_tokens=64, key="none")
talk = model.conversation()
talk.prompt("Hello", **few).text()
u = whole.usage()
said(whole=whole.text(), pieces="".join(pieces), usage=[u.input, u.output, u.input + u.output],
     formed=[json.loads(formed.text())], answers=[talk.prompt("And then?", **few).text()])
"""

OPENAI_NODE = """
import OpenAI from "openai"
const client = new OpenAI({ baseURL: process.env.SERVER + "/v1", apiKey: "none" })
const model = "weft-small", fibre = { enum: ["wool", "linen", "silk"] }, strict = { additionalProperties: false }
const asked = { model, messages: [{ role: "user", content: "Hello" }], temperature: 0, max_tokens: 16 }
const more = { ...asked, max_tokens: 64 }
const whole = await client.chat.completions.create(asked)
let pieces = ""
for await (const part of await client.chat.completions.create({ ...asked, stream: true }))
  pieces += part.choices[0]?.delta?.content ?? ""
const schema = { type: "object", properties: { fibre, is_warm: { type: "boolean" } }, required: ["fibre", "is_warm"] }
const response_format = { type: "json_schema", json_schema: { name: "cloth", schema: { ...schema, ...strict } } }
const formed = await client.chat.completions.parse({ ...more, response_format })
const parameters = { type: "object", properties: { fibre }, required: ["fibre"], ...strict }
const tools = [{ type: "function", function: { name: "threads", parameters } }]
const first = (await client.chat.completions.create({ ...more, tools, tool_choice: "required" })).choices[0].message
const results = first.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "120" }))
const messages = [...asked.messages, first, ...results]
const second = await client.chat.completions.create({ ...more, messages, tools, tool_choice: "none" })
const response = await client.responses.create({ model, input: "Hello", temperature: 0, max_output_tokens: 16 })
const text = await client.completions.create({ model, prompt: "Once upon", temperature: 0, max_tokens: 8 })
const u = whole.usage
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, pieces, usage: [u.prompt_tokens, u.completion_tokens, u.total_tokens],
  formed: [JSON.parse(formed.choices[0].message.content)], answers: [second.choices[0].message.content],
  called: first.tool_calls.map((call) => JSON.parse(call.function.arguments)), text: text.choices[0].text,
  response: response.output_text,
}))
"""

AI = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { embed, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai"
const baseURL = process.env.SERVER + "/v1"
const weft = createOpenAICompatible({ name: "weft", baseURL, apiKey: "none", supportsStructuredOutputs: true })
const asked = { model: weft("weft-small"), temperature: 0, maxRetries: 0, prompt: "Hello" }
const fibre = { type: "string", enum: ["wool", "linen", "silk"] }
const object = { type: "object", additionalProperties: false }
const whole = await generateText({ ...asked, maxOutputTokens: 16 })
let pieces = ""
for await (const part of streamText({ ...asked, maxOutputTokens: 16 }).textStream) pieces += part
const properties = { fibre, is_warm: { type: "boolean" } }
const schema = jsonSchema({ ...object, properties, required: ["fibre", "is_warm"] })
const formed = await generateText({ ...asked, maxOutputTokens: 64, output: Output.object({ schema }) })
const called = []
const inputSchema = jsonSchema({ ...object, properties: { fibre }, required: ["fibre"] })
const threads = tool({ description: "Threads", inputSchema, execute: async (given) => (called.push(given), 120) })
const answered = await generateText({
  ...asked, maxOutputTokens: 64, tools: { threads }, stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
})
const vector = (await embed({ model: weft.embeddingModel("weft-small"), value: "Hello" })).embedding
const u = whole.usage
console.log(JSON.stringify({
  whole: whole.text, pieces, usage: [u.inputTokens, u.outputTokens, u.totalTokens], formed: [formed.output],
  called, answers: [answered.text], vector,
}))
"""

ALWAYS = {"whole", "pieces", "usage", "formed"}
TOOLS = {"called", "answers"}
# What each client shows beside a chat, its stream, its usage and a typed answer.
PYTHON = {
    # With tools, this client needs its proxy's dependencies.
    "litellm": (LITELLM, {"text", "vector"}),
    "instructor": (INSTRUCTOR, set()),
    "pydantic-ai-slim[openai]": (PYDANTIC_AI, set()),
    "langchain-openai": (LANGCHAIN, TOOLS | {"text", "vector"}),
    "llama-index-llms-openai-like": (LLAMA_INDEX, {"called", "text"}),
    "openai-agents": (OPENAI_AGENTS, TOOLS),
    "llm": (LLM, {"answers"}),
}
NODE = {
    "openai": (OPENAI_NODE, TOOLS | {"text", "response"}),
    "ai @ai-sdk/openai-compatible": (AI, TOOLS | {"vector"}),
}


@pytest.fixture(scope="module")
def served():
    with serving(options=("--port", "0", "--threads", "1", "--memory", "128MiB")) as found:
        yield found


def posted(served: Served, path: str, **body: object) -> Any:
    status, answer = served.call(path, {"model": "weft-small", "temperature": 0, **body})
    assert status == 200, answer
    return answer


def check(served: Served, found: dict[str, Any], more: set[str]) -> None:
    assert found.keys() == ALWAYS | more
    chat = posted(served, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=16)
    text = chat["choices"][0]["message"]["content"]
    assert found["whole"] == found["pieces"] == found.get("response", text) == text
    assert found["usage"] == [chat["usage"][f"{each}_tokens"] for each in ("prompt", "completion", "total")]
    assert found["formed"]
    for cloth in found["formed"]:
        assert cloth.keys() == {"fibre", "is_warm"}
        assert cloth["fibre"] in FIBRES
        assert isinstance(cloth["is_warm"], bool)
    if "called" in more:
        assert found["called"]
        assert all(each.keys() == {"fibre"} and each["fibre"] in FIBRES for each in found["called"])
    if "answers" in more:
        assert found["answers"]
        assert all(isinstance(each, str) for each in found["answers"])
    if "text" in more:
        same = posted(served, "/v1/completions", prompt="Once upon", max_tokens=8)
        assert found["text"] == same["choices"][0]["text"]
    if "vector" in more:
        _, same = served.call("/v1/embeddings", {"model": "weft-small", "input": ["Hello"]})
        assert found["vector"] == pytest.approx(same["data"][0]["embedding"], abs=1e-3)


@pytest.mark.parametrize("package", PYTHON)
def test_a_python_client(served: Served, tmp_path, package):
    script, more = PYTHON[package]
    check(served, in_python(served, tmp_path, package, SHARED + script), more)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node")
@pytest.mark.parametrize("packages", NODE)
def test_a_node_client(served: Served, tmp_path, packages):
    script, more = NODE[packages]
    check(served, in_node(served, tmp_path, packages, script), more)
