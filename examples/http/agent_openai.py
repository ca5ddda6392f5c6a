"""An agent of the openai-agents library: `python examples/http/agent_openai.py [URL]`.

The library speaks to any server with OpenAI's API. Needs `pip install openai-agents`.
"""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

asked: list[str] = []


@function_tool
def count_threads(cloth: str) -> int:
    """Return the number of threads of a cloth."""
    asked.append(cloth)
    return 120


async def main(url: str = "http://127.0.0.1:8000") -> str:
    # Otherwise the library sends what it does to its own vendor.
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("weft-small", AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    # A call is required of the small model, and the library resets that once there is a result.
    settings = ModelSettings(tool_choice="required", max_tokens=64, temperature=0)
    agent = Agent("weaver", instructions="You know cloth.", tools=[count_threads], model=model, model_settings=settings)
    result = await Runner.run(agent, "How many threads has linen?", max_turns=3)
    return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])), asked)
