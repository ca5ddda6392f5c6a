"""A text worker in the hands of a test: what it does with a job stands in the job's body.

`hang`: it waits for ever. `die`: it ends. `memory`: it takes more than it may. Anything else comes back as it is.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from weft.server import text_process
from weft.server.texts.prompt_builder import PromptBuilder

PROGRAM = (sys.executable, str(Path(__file__).resolve()))


def act(builder: PromptBuilder, body: bytes) -> bytes:
    if body == b"hang":
        signal.pause()
    if body == b"die":
        raise SystemExit(3)
    if body == b"memory":
        bytearray(builder.limits.text_memory_bytes)
    return body


if __name__ == "__main__":
    text_process.JOBS["act"] = act
    text_process.main()
