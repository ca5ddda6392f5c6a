"""Weft serves hybrid language models. `LLM` and `AsyncLLM` run one in this process.

`SamplingParams` controls its answers.

Names are loaded on first use, so that `import weft` costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from weft.base.openmp import shorten_waits

if TYPE_CHECKING:
    from argparse import ArgumentParser as FlexibleArgumentParser

    from weft.base.errors import EngineStopped, ModelError, OptionError, RequestError, WeftError
    from weft.offline.asking import TextPrompt, TokensPrompt
    from weft.offline.async_llm import AsyncLLM
    from weft.offline.async_llm import AsyncLLM as AsyncLLMEngine
    from weft.offline.keywords import EngineArgs
    from weft.offline.keywords import EngineArgs as AsyncEngineArgs
    from weft.offline.llm import LLM
    from weft.offline.result import BeamSearchOutput, Chunk, CompletionOutput, Logprob, Result
    from weft.offline.result import Result as RequestOutput
    from weft.offline.sampling import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
    from weft.offline.sampling import GenerationParams as SamplingParams
    from weft.offline.sampling import StructuredOutputsParams as GuidedDecodingParams
    from weft.offline.sglang_engine import SglangEngine as Engine

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Chunk",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "EngineStopped",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "Logprob",
    "ModelError",
    "OptionError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "Result",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeftError",
]

# The module of each name, and its name there if that is another one: scripts for vLLM import it from here.
_HOMES = {
    "LLM": "weft.offline.llm",
    "AsyncEngineArgs": "weft.offline.keywords:EngineArgs",
    "AsyncLLM": "weft.offline.async_llm",
    "AsyncLLMEngine": "weft.offline.async_llm:AsyncLLM",
    "BeamSearchOutput": "weft.offline.result",
    "BeamSearchParams": "weft.offline.sampling",
    "Chunk": "weft.offline.result",
    "CompletionOutput": "weft.offline.result",
    "Engine": "weft.offline.sglang_engine:SglangEngine",
    "EngineArgs": "weft.offline.keywords",
    "FlexibleArgumentParser": "argparse:ArgumentParser",
    "GuidedDecodingParams": "weft.offline.sampling:StructuredOutputsParams",
    "Logprob": "weft.offline.result",
    "RequestOutput": "weft.offline.result:Result",
    "RequestOutputKind": "weft.offline.sampling",
    "Result": "weft.offline.result",
    "SamplingParams": "weft.offline.sampling:GenerationParams",
    "StructuredOutputsParams": "weft.offline.sampling",
    "TextPrompt": "weft.offline.asking",
    "TokensPrompt": "weft.offline.asking",
}

# Before PyTorch is loaded, which reads these then. On ARM, oneDNN would leave a list of its kernels in /tmp.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
if hasattr(os, "uname"):
    shorten_waits(os.environ, os.uname().machine)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module, _, own = _HOMES.get(name, "weft.base.errors").partition(":")
    value = getattr(import_module(module), own or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
