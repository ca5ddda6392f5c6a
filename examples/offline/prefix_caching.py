"""A long beginning that prompts share is computed once: the same answers with and without the cache.

`exact=True` makes that hold in every number format. Without it, bfloat16 may decide a near tie differently.
"""

from __future__ import annotations

import sys

from weft import LLM, RequestOutput, SamplingParams

PREFIX = (
    "You are an expert school principal, skilled in effectively managing faculty and staff. Draft 10-15 questions for "
    "a potential first grade Head Teacher for my K-12, all-girls', independent school that emphasizes community, "
    "joyful discovery, and life-long learning. The candidate is coming in for a first-round panel interview for an "
    "8th grade Math teaching role. They have 5 years of previous teaching experience as an assistant teacher at a "
    "co-ed, public school with experience in middle school math teaching. Based on these information, fulfill the "
    "following paragraph: "
)
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future is"]


def main(model: str | None = None) -> tuple[list[RequestOutput], list[RequestOutput]]:
    sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
    prompts = [PREFIX + prompt for prompt in PROMPTS]
    with LLM(model=model, max_model_len=1024, exact=True, enable_prefix_caching=False) as llm:
        without = llm.generate(prompts, sampling_params, use_tqdm=False)
    with LLM(model=model, max_model_len=1024, exact=True, enable_prefix_caching=True) as llm:
        # The first prompt fills the cache, and the others find it there.
        llm.generate(prompts[0], sampling_params, use_tqdm=False)
        cached = llm.generate(prompts, sampling_params, use_tqdm=False)
    for one, other in zip(without, cached, strict=True):
        print(f"{other.outputs[0].text!r}: {other.num_cached_tokens} of {len(other.prompt_token_ids)} tokens cached")
        print("the same" if one.outputs[0].text == other.outputs[0].text else "different")
    return without, cached


if __name__ == "__main__":
    main(*sys.argv[1:])
