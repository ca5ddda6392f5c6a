"""Several answers to each prompt, their log-probabilities, the best of several, and beam search."""

from __future__ import annotations

import sys
from typing import Any

from weft import LLM, BeamSearchParams, SamplingParams, TokensPrompt

PROMPTS = ["Once upon a time, there was a little girl named", "One day, a dog and a cat"]


def main(model: str | None = None) -> dict[str, Any]:
    llm = LLM(model=model, max_model_len=512)
    several = llm.generate(PROMPTS, SamplingParams(n=3, seed=7, max_tokens=12, logprobs=2), use_tqdm=False)
    for output in several:
        print(output.prompt)
        for completion in output.outputs:
            print(f"  {completion.index}: {completion.text!r}, log-probability {completion.cumulative_logprob:.2f}")
    for position in several[0].outputs[0].logprobs or ():
        # The sampled token comes first, then the likeliest ones.
        print({score.decoded_token: round(score.logprob, 2) for score in position.values()})
    best = llm.generate(PROMPTS, SamplingParams(n=1, best_of=4, seed=7, max_tokens=12), use_tqdm=False)
    tokens = [TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode(prompt)) for prompt in PROMPTS]
    beams = llm.beam_search(tokens, BeamSearchParams(beam_width=3, max_tokens=8))
    for found in beams:
        print([(sequence.text, round(sequence.cum_logprob, 2)) for sequence in found.sequences])
    llm.close()
    return {"several": several, "best": best, "beams": beams}


if __name__ == "__main__":
    main(*sys.argv[1:])
