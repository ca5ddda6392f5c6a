"""Benchmark of the built-in model: `python -m benchmarks.builtin`. Takes a few minutes on two cores.

Measures the start-up time of `weft serve`, the time to the first token of a short question to a server that has just
started, and tokens per second of one and of sixteen streams, over HTTP and through `weft.LLM`. Runs transformers on the
same checkpoint for comparison. Answers are greedy, have their full length, and are not drafted. Prints a table of
medians and, with `--json FILE`, writes all values.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.table import machine
from weft import builtin
from weft.cli.client import Client

QUESTION = "Tell me a story about a cat."
STREAMS = 16
GOALS = {"first_token_seconds": 1.0, "http_one_stream": 60.0, "weft_one_stream": 60.0}
ROWS = {
    "start_seconds": "`weft serve`: start to first line of output, s",
    "first_token_seconds": "first token of the first short question over HTTP, s (goal: under 1)",
    "http_one_stream": "one stream over HTTP, tokens/s (goal: 60)",
    "http_many_streams": f"{STREAMS} streams over HTTP, total tokens/s",
    "weft_one_stream": "one stream through weft.LLM, tokens/s (goal: 60)",
    "weft_many_streams": f"{STREAMS} requests through weft.LLM, total tokens/s",
    "transformers_one_stream": "transformers, one stream, tokens/s",
    "transformers_many_streams": f"transformers, one batch of {STREAMS}, total tokens/s",
}
Found = dict[str, list[float]]


def body(number: int, tokens: int) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{QUESTION} This is story {number}."}]
    return {"messages": asked, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


@contextmanager
def server(threads: int) -> Iterator[tuple[str, float]]:
    """Start a server; yield its address and the seconds until its address is printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--threads", str(threads), "--draft", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        # The address stands alone in the last line.
        address = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
        seconds = time.perf_counter() - began
        try:
            if address is None:
                raise SystemExit("weft serve did not start; run it by hand to see why")
            yield address, seconds
        finally:
            process.terminate()


async def stream(client: Client, asked: dict[str, Any]) -> tuple[float, float, int]:
    """Return the seconds to the first and to the last token, and the number of tokens."""
    asked = asked | {"stream_options": {"include_usage": True}}
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with aclosing(client.stream("/v1/chat/completions", asked)) as events:
        async for event in events:
            if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return first, time.perf_counter() - began, tokens


async def ask_server(address: str, tokens: int) -> dict[str, float]:
    client = Client(address)
    first = (await stream(client, body(0, 8)))[0]
    begun, ended, count = await stream(client, body(1, tokens))
    clients = [Client(address) for _ in range(STREAMS)]
    started = time.perf_counter()
    many = await asyncio.gather(*[stream(each, body(2 + n, tokens)) for n, each in enumerate(clients)])
    seconds = time.perf_counter() - started
    for each in (client, *clients):
        await each.close()
    return {
        "first_token_seconds": first,
        "http_one_stream": (count - 1) / (ended - begun),
        "http_many_streams": sum(count for _, _, count in many) / seconds,
    }


def with_weft(threads: int, tokens: int, repeats: int) -> Found:
    from weft import LLM, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: Found = {"weft_one_stream": [], "weft_many_streams": []}
    with LLM(threads=threads, progress=False, draft="off") as llm:
        for number in range(repeats + 1):
            chunks = llm.chat_stream(body(number, tokens)["messages"], params)
            next(chunks)
            began = time.perf_counter()
            count = sum(len(chunk.token_ids) for chunk in chunks)
            found["weft_one_stream"].append(count / (time.perf_counter() - began))
            asked = [body(1000 * number + n, tokens)["messages"] for n in range(STREAMS)]
            began = time.perf_counter()
            answers = llm.chat(asked, params, use_tqdm=False)
            total = sum(len(each.token_ids) for each in answers)
            found["weft_many_streams"].append(total / (time.perf_counter() - began))
    return {name: values[1:] for name, values in found.items()}


def with_transformers(threads: int, tokens: int, repeats: int) -> Found:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin.FOLDER).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin.FOLDER, padding_side="left")
    found: Found = {"transformers_one_stream": [], "transformers_many_streams": []}

    def generate(count: int, number: int, length: int) -> float:
        talks = [body(1000 * number + n, tokens)["messages"] for n in range(count)]
        made = {"return_tensors": "pt", "return_dict": True, "padding": True, "add_generation_prompt": True}
        asked = tokenizer.apply_chat_template(talks, **made)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(**asked, do_sample=False, max_new_tokens=length, min_new_tokens=length)
        return time.perf_counter() - began

    for number in range(repeats + 1):
        # Subtract the time of the prompt, since Weft's clock starts at the first token.
        seconds = generate(1, number, tokens) - generate(1, number, 1)
        found["transformers_one_stream"].append((tokens - 1) / seconds)
        found["transformers_many_streams"].append(STREAMS * tokens / generate(STREAMS, number, tokens))
    return {name: values[1:] for name, values in found.items()}


PARTS = {"weft": with_weft, "transformers": with_transformers}


def run_part(name: str, asked: argparse.Namespace) -> Found:
    """Run a part in a separate process. Return an empty result if it fails, e.g. when a package is missing."""
    command = [sys.executable, "-m", "benchmarks.builtin", "--part", name, "--threads", str(asked.threads)]
    command += ["--tokens", str(asked.tokens), "--repeats", str(asked.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{name}: skipped, because it failed", flush=True)
        return {}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(asked: argparse.Namespace) -> Found:
    found: Found = {"start_seconds": []}
    for _ in range(asked.repeats):
        with server(asked.threads) as (address, seconds):
            found["start_seconds"].append(seconds)
            for name, value in asyncio.run(ask_server(address, asked.tokens)).items():
                found.setdefault(name, []).append(value)
    return found | run_part("weft", asked) | run_part("transformers", asked)


def table(found: Found) -> str:
    lines = ["| | median | all |", "|---|---:|---|"]
    for name, about in ROWS.items():
        if name in found:
            values = [f"{value:.3g}" for value in found[name]]
            lines.append(f"| {about} | {median(found[name]):.3g} | {', '.join(values)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--tokens", type=int, default=128, help="length of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked.threads, asked.tokens, asked.repeats)))
        return 0
    where = machine(asked.threads)
    print(where, flush=True)
    found = measure(asked)
    print(table(found))
    for name, goal in GOALS.items():
        value = median(found[name])
        met = value < goal if name.endswith("seconds") else value >= goal
        print(f"{ROWS[name]}: {'met' if met else 'MISSED'}")
    if asked.json:
        report = {"machine": where, "tokens": asked.tokens, "found": found}
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
