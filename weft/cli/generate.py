"""`weft generate`: answers prompts with a model in this process. Imports torch only when it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.base.errors import OptionError
from weft.base.options import Options, option
from weft.base.sampling import SamplingParams
from weft.cli.chat.terminal import Colours
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.offline.llm import LLM
    from weft.offline.result import Chunk, Result

ABOUT = "answer prompts with a model in this process"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Options of `weft generate`: its own, then the engine's."""

    prompt: tuple[str, ...] = argument("questions or other texts to answer; default: standard input", many=True)
    raw: bool = option(
        False, "continue the text as it is; default: a model with a chat template answers it as a user's message"
    )
    max_tokens: int = option(256, "maximum tokens of an answer")
    temperature: float | None = option(
        None, "0 is greedy, higher is more varied; default: the model's generation_config.json"
    )
    from_: str | None = option(
        None,
        "go on from the prompt in this signed file, as LLM.save and GET /v1/prefixes write it; PROMPT follows as it "
        "is; needs --trusted-prefix-keys",
        metavar="FILE",
    )
    stream: bool = option(True, "print the answer to a single prompt as it is generated")
    stats: bool = option(True, "print tokens per second and cached tokens to standard error at the end")


def run(options: GenerateOptions) -> None:
    prompts = read_prompts(options)
    # Reject bad values before a model is loaded.
    params_of(SamplingParams(), options.max_tokens, options.temperature)
    llm = start(options)
    with llm:
        params = params_of(llm.suggested, options.max_tokens, options.temperature)
        started = time.monotonic()
        if options.from_ is not None:
            prompts, as_chat = following(llm, options.from_, prompts), False
        else:
            as_chat = llm.template is not None and not options.raw
        if options.stream and len(prompts) == 1:
            first = prompts[0]
            chunks = llm.chat_stream(asked(str(first)), params) if as_chat else llm.stream(first, params)
            results = [show_stream(chunks)]
        else:
            chats = [asked(str(prompt)) for prompt in prompts]
            results = llm.chat(chats, params) if as_chat else llm.generate(prompts, params)
            show_all(results)
        if options.stats:
            print(stats(results, time.monotonic() - started), file=sys.stderr)


def following(llm: LLM, path: str, texts: Sequence[str | list[int]]) -> list[str | list[int]]:
    """Return prompts that begin with the one in a file."""
    loaded = llm.load(path)
    found: list[str | list[int]] = []
    for text in texts:
        more = llm.get_tokenizer().encode(str(text), add_special_tokens=False) if text else []
        found.append([*loaded.prompt_token_ids, *more])
    return found


def start(options: Options) -> LLM:
    from weft.cli.early import prepare

    prepare(options)
    from weft.offline.llm import LLM

    return LLM.from_options(options)


def params_of(suggested: SamplingParams, max_tokens: int, temperature: float | None) -> SamplingParams:
    """Return the model's suggested parameters, with the given ones in their place."""
    found = replace(suggested, max_tokens=max_tokens)
    return found if temperature is None else replace(found, temperature=temperature)


def read_prompts(options: GenerateOptions) -> list[str | list[int]]:
    if options.prompt:
        return list(options.prompt)
    if options.from_ is not None:
        return [""]
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError("no prompt given; pass one as an argument or on standard input")
    text = sys.stdin.read()
    if not text:
        raise OptionError("standard input is empty; pass a prompt as an argument or on standard input")
    return [text]


def asked(prompt: str) -> list[dict[str, str]]:
    """Return a conversation that asks this."""
    return [{"role": "user", "content": prompt}]


def show_stream(chunks: Iterable[Chunk]) -> Result:
    result, terminal = None, Colours(sys.stdout)
    for chunk in chunks:
        print(terminal.harmless(chunk.text), end="", flush=True)
        result = chunk.result
    print()
    assert result is not None, "the last chunk carries the result"
    return result


def show_all(results: list[Result]) -> None:
    terminal = Colours(sys.stdout)
    for number, result in enumerate(results, start=1):
        if len(results) > 1:
            print(f"--- {number}")
        print(terminal.harmless(result.text) if result.error is None else f"(no answer: {result.error})")


def stats(results: list[Result], seconds: float) -> str:
    tokens = sum(len(result.token_ids) for result in results)
    prompt = sum(len(result.prompt_token_ids) for result in results)
    return pace(tokens, seconds, sum(result.cached_tokens for result in results), prompt)


def pace(tokens: int, seconds: float, cached: int, prompt: int) -> str:
    """Return the speed of an answer, and the cached share of its prompt.

    >>> pace(20, 2.0, 64, 100)
    '20 tokens in 2.00 s, 10.0 tokens/s; 64 of 100 prompt tokens cached (64%)'
    """
    speed = tokens / seconds if seconds else 0.0
    share = cached / prompt if prompt else 0.0
    cached_part = f"{cached} of {prompt} prompt tokens cached ({share:.0%})"
    return f"{tokens} tokens in {seconds:.2f} s, {speed:.1f} tokens/s; {cached_part}"
