"""The examples for a server run against weft-small as their pages say, and show what they claim."""

from __future__ import annotations

import asyncio
import re
import runpy
from typing import Any

import pytest
import yaml

from tests.support.fences import ROOT
from tests.support.servers.serving import Served, serving
from weft.ray.settings import parse

FOLDER = ROOT / "examples" / "http"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.fixture(scope="module")
def served():
    with serving(options=("--port", "0", "--threads", "1", "--memory", "128MiB")) as found:
        yield found


@pytest.mark.thorough
def test_a_tool_is_called_with_valid_arguments_and_its_result_is_answered(served: Served):
    arguments, answer = example("chat_with_tools")["main"](served.url)
    assert arguments.keys() == {"city"}
    assert arguments["city"] in ("Paris", "Oslo")
    assert isinstance(answer, str)


@pytest.mark.thorough
def test_an_answer_has_the_form_of_its_schema(served: Served):
    found = example("structured_output")["main"](served.url)
    assert found["animal"] in ("cat", "dog", "bird")
    assert 2 <= found["legs"] <= 4
    assert isinstance(found["is_tame"], bool)


@pytest.mark.thorough
def test_documents_are_computed_once(served: Served):
    first, *others = example("rag")["main"](served.url)
    assert first[2] < 64
    # Pages are in one order, however they were ranked.
    assert all(cached >= tokens - 128 for _, tokens, cached in others)


@pytest.mark.thorough
def test_metrics_are_read(served: Served):
    example("rag")["main"](served.url)
    found = example("watch_metrics")["main"](served.url)
    assert found["running"] == 0
    assert 0 < found["share of prompt tokens cached"] <= 1


@pytest.mark.slow
def test_a_fleet_sends_prompts_to_the_engine_that_has_their_beginning():
    cached, saved = example("fleet")["main"](["--threads", "1"])
    assert cached[:2] == [0, 0]
    assert all(tokens >= 64 for tokens in cached[2:])
    assert len(saved) == 2


@pytest.mark.thorough
def test_an_agent_of_openai_agents_uses_its_tool(served: Served):
    pytest.importorskip("agents", reason="pip install openai-agents")
    program = example("agent_openai")
    assert isinstance(asyncio.run(program["main"](served.url)), str)
    assert program["asked"]


def test_an_agent_of_pydantic_ai_answers_with_its_type(served: Served):
    pytest.importorskip("pydantic_ai", reason="pip install 'pydantic-ai-slim[openai]'")
    program = example("agent_pydantic")
    found = program["main"](served.url)
    assert found.fibre in ("wool", "linen", "silk")


def test_rays_settings_are_valid():
    settings = parse(yaml.safe_load((ROOT / "examples" / "ray" / "fleet.yaml").read_text()))
    assert settings.serve_options.model == "weft-small"


def test_the_page_lists_every_example():
    page = (ROOT / "examples" / "README.md").read_text()
    names = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py") if "offline" not in path.parts
    }
    assert set(re.findall(r"examples/[\w/]+\.py", page)) == names
