"""Answers as they grow, several at once, in asyncio."""

from __future__ import annotations

import asyncio
import sys

from weft import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["The future is", "In a galaxy far away", "The key to happiness is"]


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    # New text only, not the whole answer in each output.
    sampling_params = SamplingParams(max_tokens=16, seed=1, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, sampling_params, request_id=request_id):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            print(f"{prompt}{text}")
    return text


async def main(model: str | None = None) -> list[str]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
    try:
        return await asyncio.gather(*(stream(engine, each, f"stream-{i}") for i, each in enumerate(PROMPTS)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
