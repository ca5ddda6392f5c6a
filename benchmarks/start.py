"""Time from `weft serve` to ready: a first start, with empty kernel caches, and a second one with those that it filled.

    python -m benchmarks.start [MODEL ...] [--checkpoint] [--prompts 60 4000] [-- OPTIONS OF WEFT SERVE]

The model is a folder, a config.json or the name of a packaged configuration; its weights are random unless
`--checkpoint` is given. Every line that the server logs is a phase: it is printed with the seconds since the start and
since the line before. Then two requests are timed, with a short and a long random prompt, because what is not compiled
at start is compiled by them. The caches of Triton, FlashInfer and the C++ kernels lie in a temporary folder, which the
program removes; those of the user are neither read nor changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MODEL = "lfm2-1.2b"
READY = re.compile(r"^(http://\S+)$")
# A logged line: its time, level and logger are replaced by the seconds since the start.
PREFIX = re.compile(r"^\d{4}-\d\d-\d\dT\S+ \w+ [\w.]+: ")
# Counts and speeds of a progress bar: only its last state is a phase.
BAR = re.compile(r"^(?P<name>[\w ]+):\s+\d+%\|")
PROMPTS = (60, 4000)
LIMIT_SECONDS = 280
# Token ids that every vocabulary has, and most use for text.
TOKENS = range(300, 900)


@dataclass(slots=True)
class Phase:
    """A line that the server wrote."""

    seconds: float  # since the start
    text: str


def caches(folder: Path) -> dict[str, str]:
    """Return the environment that moves every cache of compiled kernels into a folder."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_HOME": str(folder),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def phases_of(stream: IO[bytes], started: float) -> Iterator[Phase]:
    """Yield the lines of a server until it ends; of a progress bar, the last state."""
    bar: Phase | None = None
    for text in pieces(stream):
        phase = Phase(time.monotonic() - started, PREFIX.sub("", text))
        found = BAR.match(text)
        if bar is not None and (found is None or not bar.text.startswith(f"{found['name']}:")):
            yield bar
        bar = phase if found else None
        if not found:
            yield phase
    if bar is not None:
        yield bar


def pieces(stream: IO[bytes]) -> Iterator[str]:
    """Yield what lies between line ends; a progress bar ends its states with a carriage return."""
    rest = b""
    while data := os.read(stream.fileno(), 1 << 16):
        *whole, rest = re.split(rb"[\r\n]", rest + data)
        yield from (piece.decode(errors="replace").rstrip() for piece in whole if piece.strip())
    if rest.strip():
        yield rest.decode(errors="replace").rstrip()


def start(model: str, environment: dict[str, str], options: list[str], prompts: list[int]) -> float | None:
    """Serve the model until it has answered; print its phases and return the seconds until it was ready."""
    command = [sys.executable, "-u", "-m", "weft", "serve", model, "--port", "0", "--no-log-requests", *options]
    started, last, ready = time.monotonic(), 0.0, None
    server = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )
    assert server.stdout is not None
    try:
        for phase in phases_of(server.stdout, started):
            print(f"  {phase.seconds:7.1f} s  (+{phase.seconds - last:5.1f})  {phase.text[:150]}", flush=True)
            last = phase.seconds
            found = READY.match(phase.text)
            if found is not None and ready is None:
                ready = phase.seconds
                for tokens in prompts:
                    seconds = ask(found[1], tokens)
                    print(f"  a first answer to {tokens} tokens took {seconds:.2f} s, a second one", end=" ")
                    print(f"{ask(found[1], tokens):.2f} s", flush=True)
                server.send_signal(signal.SIGTERM)
            if phase.seconds > LIMIT_SECONDS:
                print(f"  not ready after {LIMIT_SECONDS} s: given up")
                break
    finally:
        server.kill()
        server.wait()
    return ready


def ask(url: str, tokens: int) -> float:
    """Return the seconds that an answer of four tokens takes, drawn at random with top-p as most clients ask."""
    prompt = random.choices(TOKENS, k=tokens)
    sampling = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        answer.read()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[MODEL], metavar="MODEL")
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), help="tokens of the timed requests")
    parser.add_argument("--checkpoint", action="store_true", help="load the model's weights instead of random ones")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    arguments, options = parser.parse_args(given[:split]), given[split + 1 :]
    if not arguments.checkpoint:
        options += ["--weights", "dummy"]
    for model in arguments.models:
        folder = Path(tempfile.mkdtemp(prefix="weft-start-"))
        try:
            for name in ("first", "second"):
                print(f"{model}: {name} start")
                seconds = start(model, caches(folder), options, arguments.prompts)
                print(f"{model}: {name} start: " + ("failed" if seconds is None else f"ready after {seconds:.1f} s"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
