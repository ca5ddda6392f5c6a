"""GET /v1/prefixes/{id} and POST /v1/prefixes: prompts as signed files, from one server to another.

A file is spooled in a folder of this process, which only its user can enter: the engine writes or reads it there, and
signatures cover all of it before a byte is sent or given to the engine.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.backends.backend import PromptFiles
from weft.base.errors import InvalidField, RequestError
from weft.base.prefix_keys import PrefixKey, check_signature, sign
from weft.base.sampling import SamplingParams
from weft.server.access.auth import Keys, Tenant
from weft.server.apis.control import need_admin
from weft.server.apis.fork import Past, stored_past
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.http.errors import json_response
from weft.server.http.sse import while_connected
from weft.server.texts.prompt_builder import Prompt

# Files that are written or read at once: each may be as large as half of the engine's memory.
MOST_FILES = 2
PIECE_BYTES = 1 << 18
MEDIA_TYPE = "application/vnd.weft.prompt"
PARAMETERS = ("tenant", "cache_salt")
BUSY = "the server is busy with other prompts in files; try again later"


class PrefixRoutes:
    def __init__(self, front: Front, keys: Keys, files: PromptFiles | None) -> None:
        self._front, self._keys, self._files = front, keys, files
        self._settings = front.settings.prompt_files
        self._open = 0

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("/v1/prefixes/{name}", "GET", self.save),
            ("/v1/prefixes", "POST", self.load),
        ]
        return [Route(path, handler, methods=[method]) for path, method, handler in table]

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Count a file, from before it is written until it is read or sent: slow clients hold the space of theirs."""
        if self._open >= MOST_FILES:
            raise RequestError(BUSY, 429)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    # out ------------------------------------------------------------------------------------------------------------

    async def save(self, request: Request) -> Response:
        """Send a stored response or a retained prompt as a file; compute first what is not cached of it."""
        key, files = self._settings.key, self._files
        if key is None or files is None:
            raise RequestError("this server sends no prompts as files; start one engine with --prefix-key FILE", 404)
        tenant: Tenant = request.state.tenant
        past = stored_past(self._front, request.path_params["name"], choice_of(request), tenant)
        with ExitStack() as held:
            held.enter_context(self._place())
            with temporary_folder() as folder:
                path = folder / "prompt"
                await self._write(request, tenant, past, path)
                file = held.enter_context(await asyncio.to_thread(signed, path, key))
            size = file.seek(0, 2)
            headers = {"content-length": str(size), "cache-control": "no-store", "x-content-type-options": "nosniff"}
            return SentFile(pieces(file), held.pop_all(), headers=headers, media_type=MEDIA_TYPE)

    async def _write(self, request: Request, tenant: Tenant, past: Past, path: Path) -> None:
        """Let the engine write a prompt; as a request it counts against its key's limits."""
        params = SamplingParams(max_tokens=0)
        answered = np.ascontiguousarray(past.answer) if len(past.answer) else None
        asked = AskedPrompt(Prompt(past.prompt), params, field="id", answered=answered)
        generation = await self._front.generate(
            [asked], tenant, name=new_name("prefix_"), salt=past.salt, save_to=str(path)
        )
        request.state.record.generation = generation
        try:
            await while_connected(request, generation.collect())
        finally:
            generation.close()

    # in -------------------------------------------------------------------------------------------------------------

    async def load(self, request: Request) -> Response:
        """Take a file into the cache, if a trusted key has signed it."""
        need_admin(request)
        files, trusted = self._files, self._settings.trusted
        if not trusted or files is None:
            raise RequestError(
                "this server takes no prompts as files; start one engine with --trusted-prefix-keys FILE", 404
            )
        salt = self._salt(request)
        with self._place(), temporary_folder() as folder:
            path = folder / "prompt"
            await self._receive(request, path)
            signer = await asyncio.to_thread(checked, path, trusted)
            found = await files.load_prompt(str(path), salt, self._settings.share)
        return json_response({"object": "prefix", **found, "signed_by": signer.name.hex()})

    def _salt(self, request: Request) -> bytes:
        """Return the salt of the prompts that will hit the file: of the admin's key, or of the one that it names."""
        query = dict(request.query_params)
        unknown = [name for name in query if name not in PARAMETERS]
        if unknown:
            raise InvalidField("query", f"may have {' and '.join(PARAMETERS)}, got {unknown[0]!r:.40}")
        tenant: Tenant = request.state.tenant
        if "tenant" in query:
            named = [each for each in self._keys.tenants if each.name == query["tenant"]]
            if not named:
                raise InvalidField("tenant", f"must be the name of a key, got {query['tenant'][:64]!r}")
            tenant = named[0]
        return tenant.salted(query.get("cache_salt"))

    async def _receive(self, request: Request, path: Path) -> None:
        most = self._front.backend.info.memory_bytes
        with path.open("xb") as file:

            async def write(piece: bytes) -> None:
                await asyncio.to_thread(file.write, piece)

            await self._front.receiving.spool(request, write, most)


class SentFile(StreamingResponse):
    """A file that is closed, and no longer counted, when it is sent or its client has left."""

    def __init__(self, content: AsyncIterator[bytes], held: ExitStack, **more: Any) -> None:
        super().__init__(content, **more)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="weft-prompt-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choice_of(request: Request) -> int:
    given = request.query_params.get("choice", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= 4):
        raise InvalidField("choice", f"must be the number of one of its answers, got {given!r:.20}")
    return int(given)


def signed(path: Path, key: PrefixKey) -> BinaryIO:
    """Return a file, signed and open. Its name may go."""
    file = path.open("r+b")
    try:
        sign(file, key)
    except BaseException:
        file.close()
        raise
    return file


def checked(path: Path, keys: tuple[PrefixKey, ...]) -> PrefixKey:
    with path.open("rb") as file:
        return check_signature(file, keys)


async def pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    file.seek(0)
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece
