"""Weft beside llama.cpp on the same GGUF files: both are loaded, and take turns with every piece of work.

    python -m benchmarks.gguf                                        # random models of 107 M, in Q8_0 and Q4_K
    python -m benchmarks.gguf model.gguf --threads 2 --rounds 5
    python -m benchmarks.gguf --families lfm2 --kinds q4_k --pieces "one stream"

Prints the median of Weft's rate over llama.cpp's, piece by piece, and what Weft holds in memory. Random models come
from `benchmarks.peers.checkpoints` and `weft convert`. Needs xllamacpp, and transformers for random models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.work import Engine, Job, Work, crowd_prompts, random_tokens

FAMILIES = ("lfm2", "granite", "qwen35")
KINDS = ("q8_0", "q4_k")
STREAMS, SHARED = 8, 16
ANSWER, PROMPT, TURNS = 64, 512, 10


@dataclass(frozen=True, slots=True)
class Piece:
    """Work that is timed as a whole: a rate in tokens per second. `number` makes its tokens new."""

    name: str
    number: int

    def run(self, engine: Engine) -> float:
        if self.name == "one stream":
            tokens, seconds = engine.single(random_tokens(f"one {self.number}", 32), ANSWER + 1)
            return (len(tokens) - 1) / seconds
        if self.name == "prompt":
            return self.timed(engine, [random_tokens(f"prompt {self.number}", PROMPT)], 1, PROMPT)
        if self.name == "eight streams":
            prompts = [random_tokens(f"eight {self.number} {n}", 16) for n in range(STREAMS)]
            return self.timed(engine, prompts, ANSWER, STREAMS * ANSWER)
        prompts = crowd_prompts(Work(requests=SHARED), f"{self.number}")
        return self.timed(engine, prompts, 32, SHARED * 32)

    def timed(self, engine: Engine, prompts: list[list[int]], answer: int, tokens: int) -> float:
        start = time.perf_counter()
        engine.crowd(prompts, answer)
        return tokens / (time.perf_counter() - start)


PIECES = ("one stream", "prompt", "eight streams", "shared prefix", "turns")


def work(engine_name: str, file: str, threads: int) -> None:
    """Load one engine, then do what lines of the standard input say."""
    job = Job(engine_name, file, file, "bfloat16", threads, Work(requests=SHARED))
    before = memory()
    if engine_name == "weft":
        from benchmarks.peers.with_weft import Weft as Opened
    else:
        from benchmarks.peers.with_llama_cpp import LlamaCpp as Opened
    engine: Any = Opened(job)
    print(json.dumps({"version": engine.version, "anonymous": memory() - before}), flush=True)
    talk = weft_turn if engine_name == "weft" else llama_turn
    for line in sys.stdin:
        piece = Piece(**json.loads(line))
        found = turns(partial(talk, engine)) if piece.name == "turns" else piece.run(engine)
        print(json.dumps({"found": found}), flush=True)


def turns(turn: Callable[[list[int]], tuple[list[int], int]]) -> list[int]:
    """Return how many tokens each turn of a conversation computes before it answers."""
    text, found = random_tokens("beginning", 300), []
    for number in range(TURNS):
        answer, computed = turn(text)
        found.append(computed)
        text = [*text, *answer, *random_tokens(f"turn {number}", 40)]
    return found


def weft_turn(engine: Any, prompt: list[int]) -> tuple[list[int], int]:
    import weft

    params = weft.SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    [result] = engine.llm.generate(prompt, params, use_tqdm=False)
    return list(result.token_ids), len(prompt) - result.cached_tokens


def llama_turn(engine: Any, prompt: list[int]) -> tuple[list[int], int]:
    reply = engine._ask(prompt, ANSWER)
    return reply["tokens"], reply["timings"]["prompt_n"]


def memory() -> int:
    """Return the bytes of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, file: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.gguf", "--worker", name, str(file), "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.facts = self.reply()

    def reply(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # llama.cpp prints lines of its own.
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"an engine ended with code {self.process.wait()}")

    def run(self, piece: Piece) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(piece)) + "\n")
        self.process.stdin.flush()
        return self.reply()["found"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(file: Path, threads: int, rounds: int, pieces: list[str]) -> None:
    workers = {name: Worker(name, file, threads) for name in ("weft", "llama.cpp")}
    held = workers["weft"].facts["anonymous"] / 1e6
    print(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB; Weft holds {held:.0f} MB before the first request")
    for name in (name for name in pieces if name != "turns"):
        # The first round is a warm-up.
        pairs = [[worker.run(Piece(name, number)) for worker in workers.values()] for number in range(rounds + 1)][1:]
        ours, theirs = (median(column) for column in zip(*pairs))
        ratio = median(own / other for own, other in pairs)
        print(f"  {name:14} {ours:8.1f} {theirs:8.1f} tokens/s   {ratio:.2f}", flush=True)
    for name, worker in workers.items():
        if "turns" in pieces:
            print(f"  {name}: tokens computed in each of {TURNS} turns: {worker.run(Piece('turns', 0))}", flush=True)
        worker.end()


def random_files(families: list[str], kinds: list[str], cache: Path) -> list[Path]:
    from benchmarks.peers.checkpoints import checkpoint
    from weft.cli.main import main as weft

    found = []
    for family in families:
        for kind in kinds:
            file = cache / "gguf" / f"{family}-107m-{kind}.gguf"
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                folder = checkpoint(family, cache, "bfloat16")
                assert weft(["convert", str(folder), str(file), "--quantize", kind]) == 0
            found.append(file)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gguf", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--pieces", nargs="*", default=list(PIECES), choices=PIECES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "weft-benchmarks")
    parser.add_argument("--worker", choices=("weft", "llama.cpp"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, str(arguments.files[0]), arguments.threads)
    for file in arguments.files or random_files(arguments.families, arguments.kinds, arguments.cache):
        compare(file, arguments.threads, arguments.rounds, arguments.pieces)
    return None


if __name__ == "__main__":
    main()
