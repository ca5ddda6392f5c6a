"""Driver of llama.cpp: runs its own server in this process and sends requests over HTTP.

    python -m benchmarks.peers.with_llama_cpp JOB RESULT

Single answers are timed by the server itself, without HTTP.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import xllamacpp

from benchmarks.peers.work import Job, drive

CACHE_TYPES = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_F16", "float16": "GGML_TYPE_F16"}


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        assert job.gguf is not None
        work = job.work
        self.version = version("xllamacpp")
        self.settings = f"server, {work.requests} slots, continuous batching, prompt cache, unified KV"
        self.server = xllamacpp.Server(_settings(job))
        self.address = self.server.listening_address + "/completion"
        self.callers = ThreadPoolExecutor(work.requests)

    def single(self, prompt: list[int], answer: int) -> tuple[list[int], float]:
        reply = self._ask(prompt, answer)
        timings = reply["timings"]
        # The server's time includes sampling the first token, but covers the same n - 1 forward passes.
        return reply["tokens"], timings["predicted_ms"] / 1000

    def crowd(self, prompts: list[list[int]], answer: int) -> list[list[int]]:
        return [reply["tokens"] for reply in self.callers.map(lambda prompt: self._ask(prompt, answer), prompts)]

    def _ask(self, prompt: list[int], answer: int) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": answer,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": False,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            return json.loads(reply.read())


def _settings(job: Job) -> xllamacpp.CommonParams:
    work = job.work
    settings = xllamacpp.CommonParams()
    settings.model.path = job.gguf
    settings.verbosity = 0
    settings.n_parallel = work.requests
    settings.n_ctx = work.requests * (work.longest + 16)
    settings.n_batch = 2048
    settings.n_ubatch = 512
    settings.kv_unified = True
    settings.cont_batching = True
    settings.cache_prompt = True
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = job.threads
    settings.cpuparams_batch.n_threads = job.threads
    kind = getattr(xllamacpp.ggml_type, CACHE_TYPES[job.precision])
    settings.cache_type_k = settings.cache_type_v = kind
    return settings


if __name__ == "__main__":
    drive(LlamaCpp)
