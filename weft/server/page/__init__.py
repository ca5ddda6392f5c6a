"""The page at `/`: a few static files, sent without a key. All data that they show comes from the routes of the API.

The files are read once and kept compressed. Nothing is built, fetched from another host, or inlined: the content
security policy allows the server's own files only, and scripts may not turn text into HTML.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# The complete list, by path. docs/security.md quotes it.
FILES = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/icon.svg": "icon.svg",
    "/page/app.js": "app.js",
    "/page/answers.js": "answers.js",
    "/page/cache.js": "cache.js",
    "/page/chat.js": "chat.js",
    "/page/client.js": "client.js",
    "/page/conversations.js": "conversations.js",
    "/page/copying.js": "copying.js",
    "/page/facts.js": "facts.js",
    "/page/markdown.js": "markdown.js",
    "/page/messages.js": "messages.js",
    "/page/model.js": "model.js",
    "/page/own.js": "own.js",
    "/page/programs.js": "programs.js",
    "/page/requests.js": "requests.js",
    "/page/settings.js": "settings.js",
    "/page/timeline.js": "timeline.js",
    "/page/tokens.js": "tokens.js",
    "/page/vendor/marked.js": "vendor/marked.js",
    "/page/vendor/preact.js": "vendor/preact.js",
}
PAGE_ROUTES = tuple(("GET", path) for path in FILES)
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Checked at every load, so that a page of an earlier version never talks to this server.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    compressed: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, name: str) -> File:
        body = files(__name__).joinpath("files", *name.split("/")).read_bytes()
        kind = TYPES[name.rpartition(".")[2]]
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(body, gzip.compress(body, 9, mtime=0), HEADERS | {"content-type": kind, "etag": tag})

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers=self.headers | {"content-encoding": "gzip"})
        return Response(self.body, headers=self.headers)


def routes() -> list[Route]:
    return [Route(path, _sending(File.read(name)), methods=["GET"]) for path, name in FILES.items()]


def _sending(file: File) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return file.response(request)

    return send
