"""A text worker: reads client bodies, one at a time, for the front at the other end of its socket.

Started as `python -m weft.server.text_process FD`. It loads no torch and no weights, the kernel bounds its memory, and
it ends with the front. The front also ends it when a text takes too long or its client has left.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import tokenizers

from weft.base.errors import RequestError
from weft.base.garbage_collection import freeze_heap
from weft.base.logs import set_up_logging
from weft.server.apis import anthropic_route, native, openai_chat, openai_completions, openai_responses, tokens
from weft.server.apis.llama_cpp.completion import INFILL, LLAMA_COMPLETION
from weft.server.apis.ollama.routes import OLLAMA_CHAT, OLLAMA_GENERATE
from weft.server.apis.vectors import bodies as vectors
from weft.server.texts.grammars import prepared_grammar
from weft.server.texts.messages import (
    MAX_REPLY_BYTES,
    Done,
    Failed,
    FromWorker,
    Job,
    Refused,
    WorkerSetup,
    framed,
    read_command,
)
from weft.server.texts.prompt_builder import PromptBuilder, PromptFacts
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.wire.channel import received
from weft.wire.frames import read_frame

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("weft.text")

# A worker that holds more after a job is replaced by a fresh one: allocators do not return everything.
LEAVE_BYTES = 1 << 29
READERS = (
    openai_chat.CHAT,
    openai_completions.COMPLETION,
    openai_responses.RESPONSE,
    native.GENERATE,
    anthropic_route.MESSAGE,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    LLAMA_COMPLETION,
    INFILL,
    *vectors.READERS,
)
JOBS: dict[str, Callable[[PromptBuilder, bytes], bytes]] = {
    **{reader.name: reader.packed for reader in READERS},
    "tokenize": tokens.tokenized,
    "detokenize": tokens.detokenized,
    "count_tokens": anthropic_route.counted,
    "grammar": prepared_grammar,
}


def builder_of(setup: WorkerSetup) -> PromptBuilder:
    tokenizer = template = None
    if setup.tokenizer is not None:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(setup.tokenizer), setup.specials, setup.end_tokens)
    if setup.template is not None:
        template = ChatTemplate(setup.template, setup.specials, with_tools=setup.tool_template)
    return PromptBuilder(tokenizer, template, setup.limits, setup.strict_fields, PromptFacts("", 0, 0, 0))


def reply_to(builder: PromptBuilder, job: Job) -> FromWorker:
    builder.facts = job.facts
    try:
        body = JOBS[job.name](builder, job.body)
        if len(body) > MAX_REPLY_BYTES - 64:
            raise RequestError(f"the result for this body has {len(body)} bytes, more than the limit", 413)
        return Done(body, leaving())
    except RequestError as error:
        field = error.field and error.field[:4000]
        return Refused(str(error)[:4000], error.status, field, error.code, leaving())
    except MemoryError:
        most = builder.limits.text_memory_bytes
        return Refused(f"reading this body takes more than {most} bytes of memory", 413, None, None, True)
    except Exception:
        log.exception("cannot read a text")
        return Failed()


def leaving() -> bool:
    return resident_bytes() > LEAVE_BYTES


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        # Without Linux's files, the most that it ever was; macOS counts bytes. On Windows it is not known.
        return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def work(connection: socket.socket) -> None:
    """Process jobs until the front has ended, or until a reply announced that this worker leaves."""
    next_body = partial(read_frame, partial(received, connection))
    setup = read_command(next_body())
    assert isinstance(setup, WorkerSetup), "the first message must be a WorkerSetup"
    set_up_logging(setup.log_level, setup.log_format)
    builder = builder_of(setup)
    most = setup.limits.text_memory_bytes
    try:
        if resource is None:
            raise OSError("there is no setrlimit")
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError) as error:
        # macOS has no such bound.
        log.warning("the memory of text workers has no bound on this system: %s", error)
    freeze_heap()
    while True:
        job = read_command(next_body())
        assert isinstance(job, Job), "all later messages must be jobs"
        reply = reply_to(builder, job)
        del job
        connection.sendall(framed(reply))
        if getattr(reply, "leaving", False):
            return


def _end_with_front(connection: socket.socket) -> None:
    """End the process as soon as the front has ended, even in the middle of a text."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    os._exit(1)


def main() -> None:
    # A terminal or a service manager signals every process; only the front decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    threading.Thread(target=_end_with_front, args=(connection,), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        work(connection)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
