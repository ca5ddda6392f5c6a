"""An agent of the pydantic-ai library with a typed answer: `python examples/http/agent_pydantic.py [URL]`.

The answer's type becomes a schema, which the server's grammar enforces. Needs `pip install 'pydantic-ai-slim[openai]'`.
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Cloth(BaseModel):
    fibre: Literal["wool", "linen", "silk"]
    is_warm: bool


def main(url: str = "http://127.0.0.1:8000") -> Cloth:
    model = OpenAIChatModel("weft-small", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, output_type=NativeOutput(Cloth), model_settings={"max_tokens": 64, "temperature": 0})
    return agent.run_sync("Which cloth is for winter?").output


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
