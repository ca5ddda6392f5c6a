"""Answers prompts from a disk tier until it is killed, and prints a line for each answer.

python -m tests.support.models.disk_llm PATH SEED
"""

from __future__ import annotations

import json
import sys
from random import Random

from tests.support.models import tiny_model
from weft import LLM
from weft.base.sampling import SamplingParams

PROMPTS = [[3 + (seed * 31 + 7 * i) % 250 for i in range(200 + 20 * seed)] for seed in range(8)]


def main() -> None:
    path, random = sys.argv[1], Random(int(sys.argv[2]))
    options = {"threads": 1, "device": "cpu", "max_length": 600, "max_sequences": 2, "dtype": "float32"}
    options |= {"disk": path, "disk_size": "4MiB", "memory": "2MiB"}
    with LLM(**tiny_model.OPTIONS, **options, progress=False) as llm:
        while True:
            number = random.randrange(len(PROMPTS))
            result = llm.generate([PROMPTS[number]], SamplingParams(max_tokens=6, temperature=0.0))[0]
            print(json.dumps([number, result.token_ids, result.loaded_tokens]), flush=True)


if __name__ == "__main__":
    main()
