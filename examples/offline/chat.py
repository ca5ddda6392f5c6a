"""Conversations, with options from the command line: `python examples/offline/chat.py --model MODEL --top-k 20`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weft import LLM, EngineArgs, FlexibleArgumentParser, RequestOutput

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help you?"},
    {"role": "user", "content": "Tell me about cats."},
]


def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-k", type=int)
    EngineArgs.add_cli_args(parser)
    return parser


def main(arguments: Sequence[str]) -> list[RequestOutput]:
    args = vars(parser().parse_args(arguments))
    chosen = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_k")}
    llm = LLM(**args)
    # The model's own parameters, except for those that were given.
    sampling_params = llm.get_default_sampling_params()
    for name, value in chosen.items():
        if value is not None:
            setattr(sampling_params, name, value)
    outputs = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    # Many conversations at once are a batch.
    outputs += llm.chat([CONVERSATION for _ in range(3)], sampling_params, use_tqdm=False)
    for output in outputs:
        print(f"Prompt:    {output.prompt!r}\nOutput:    {output.outputs[0].text!r}\n")
    llm.close()
    return outputs


if __name__ == "__main__":
    main(sys.argv[1:])
