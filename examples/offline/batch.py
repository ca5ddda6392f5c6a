"""A thousand prompts in one call, more than run at once."""

from __future__ import annotations

import sys

from weft import LLM, RequestOutput, SamplingParams


def main(model: str | None = None, count: int = 1000) -> list[RequestOutput]:
    llm = LLM(model=model, max_model_len=256, max_num_seqs=64)
    prompts = [f"Story {number}:" for number in range(count)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=True)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    print(f"{len(outputs)} answers, {tokens} tokens, {cached} prompt tokens cached")
    llm.close()
    return outputs


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
