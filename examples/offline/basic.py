"""Answers to several texts: `python examples/offline/basic.py [MODEL]`."""

from __future__ import annotations

import sys

from weft import LLM, RequestOutput, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "Two and two are", "My favourite animal is"]


def main(model: str | None = None) -> list[RequestOutput]:
    # Create the parameters and the model. Any keyword of vLLM's LLM works here.
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    llm = LLM(model=model, max_model_len=512, gpu_memory_utilization=0.9, enforce_eager=True, seed=0)
    # Outputs are in the order of the prompts.
    outputs = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    for output in outputs:
        print(f"Prompt:    {output.prompt!r}\nOutput:    {output.outputs[0].text!r}\n")
    llm.close()
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
