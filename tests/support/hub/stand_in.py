"""A small stand-in for the Hugging Face hub over loopback: what its client asks of it, and nothing else."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Files of this size and more have SHA-256 checksums, as in Git LFS.
LARGE_BYTES = 1024


@dataclass
class Hub:
    """Repositories by id, and what clients asked for. `token`: needed by all; `cut`: a longer download ends there."""

    repositories: dict[str, dict[str, bytes]]
    url: str = ""
    token: str | None = None
    cut: int | None = None
    spoilt: bool = False  # send other bytes than the checksums say
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def downloads(self) -> list[tuple[str, str | None]]:
        """Return the name and range of every file that was sent."""
        return [
            (path.rpartition("/")[2], span)
            for method, path, span in self.asked
            if method == "GET" and "/resolve/" in path
        ]


def is_large(content: bytes) -> bool:
    return len(content) >= LARGE_BYTES


def checksum(content: bytes) -> str:
    if is_large(content):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def entry(name: str, content: bytes) -> dict[str, object]:
    found: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": checksum(content)}
    if is_large(content):
        found |= {"oid": "0" * 40, "lfs": {"oid": checksum(content), "size": len(content), "pointerSize": 100}}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers.get("Range")))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "RepoNotFound")
        elif path.startswith("/api/models/"):
            self.describe(path.removeprefix("/api/models/"))
        else:
            name, _, rest = path[1:].partition("/resolve/")
            content = hub.repositories.get(name, {}).get(rest.partition("/")[2])
            if content is None:
                self.refuse(404, "EntryNotFound" if name in hub.repositories else "RepoNotFound")
            else:
                self.send_content(content)

    def describe(self, path: str) -> None:
        name = "/".join(path.split("/")[:2])
        files = self.hub.repositories.get(name)
        if files is None:
            self.refuse(404, "RepoNotFound")
        elif "/tree/" in path:
            self.send_json([entry(name, content) for name, content in files.items()])
        else:
            self.send_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_content(self, content: bytes) -> None:
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{checksum(content)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut if self.hub.cut is not None and len(content) > self.hub.cut else None
        self.hub.cut = self.hub.cut if cut is None else None
        sent = bytes(255 - each for each in content) if self.hub.spoilt else content
        self.wfile.write(sent[first:] if cut is None else sent[first:cut])
        if cut is not None:
            self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None: ...


@contextmanager
def standing_in(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories on any free port."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
