"""Behind nginx as deploy/nginx.conf sets it up: by nginx itself where it is installed, by its headers everywhere."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests.support.fences import ROOT
from tests.support.servers.held_steps import wait_until
from tests.support.servers.http_server import raw, serving
from tests.support.servers.wire_server import WireServer, get, json_of, receive_until, rest_of, wire_server
from weft.cli.main import parse
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions, settings_of
from weft.server.settings import ServerSettings

CONF = (ROOT / "deploy" / "nginx.conf").read_text()
NAME = re.findall(r"server_name (\S+);", CONF)[0]
CLIENT = "9.9.9.9"
# What nginx puts in for its variables, for a client of that address.
VARIABLES = {"$host": NAME, "$proxy_add_x_forwarded_for": f"6.6.6.6, {CLIENT}", "$scheme": "https"}


def settings(*without: str) -> ServerSettings:
    """What the command line in nginx.conf makes of the server, without some of its options."""
    line = re.findall(r"^#\s+weft (serve .*)$", CONF, re.MULTILINE)[0]
    for option in without:
        line = re.sub(f" {option} \\S+", "", line)
    found = vars(parse(shlex.split(line)))
    found.pop("command")
    return settings_of(read_options(ServeOptions, found))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("WEFT_API_KEY", raising=False)


def forwarded(path: str, *headers: str) -> bytes:
    """A request as nginx sends it on."""
    version = re.findall(r"proxy_http_version (\S+);", CONF)[0]
    lines = [f"GET {path} HTTP/{version}"]
    for name, value in re.findall(r"proxy_set_header (\S+) (\S+);", CONF):
        if value != '""':
            lines.append(f"{name}: {VARIABLES.get(value, value)}")
    return ("\r\n".join([*lines, *headers]) + "\r\n\r\n").encode()


# without nginx --------------------------------------------------------------------------------------------------------


def test_the_headers_that_nginx_sets_are_understood():
    with wire_server(settings=settings()) as server, server.connect() as proxy:
        for path in ("/first", "/second"):
            # On one connection, for nginx keeps it.
            proxy.sendall(forwarded(path))
            seen = json_of(receive_until(proxy, b"}}"))
            assert seen["path"] == path
            assert seen["client"] == [CLIENT, 0]
            assert seen["scheme"] == "https"
            assert seen["headers"]["host"] == NAME


def test_parts_of_a_stream_leave_the_server_one_by_one():
    with wire_server(settings=settings()) as server, server.connect() as proxy:
        proxy.sendall(forwarded("/gated"))
        assert receive_until(proxy, b"two \r\n").endswith(b"two \r\n")
        server.call(server.app.go.set)
        assert receive_until(proxy, b"0\r\n\r\n").endswith(b"three\r\n0\r\n\r\n")
    assert "proxy_buffering off;" in CONF


def test_names_that_are_not_allowed_are_refused_and_the_allowed_one_is_needed():
    with serving(settings()) as server:
        for name, status in (("evil.example", 403), (NAME.upper(), 200), (f"{NAME}.", 200), ("localhost:80", 200)):
            answer = raw(server, f"GET /health HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 %d " % status), name
        assert raw(server, forwarded("/health", "Connection: close")).startswith(b"HTTP/1.1 200 ")
    with serving(settings("--allowed-host")) as server:
        assert raw(server, forwarded("/health", "Connection: close")).startswith(b"HTTP/1.1 403 ")


def test_without_a_trusted_proxy_its_headers_count_for_nothing():
    with wire_server(settings=settings("--trusted-proxy")) as server, server.connect() as proxy:
        proxy.sendall(forwarded("/"))
        seen = json_of(receive_until(proxy, b"}}"))
        assert seen["client"][0] == "127.0.0.1"
        assert seen["scheme"] == "http"


def test_a_proxy_on_a_unix_socket_names_its_clients(tmp_path):
    chosen = ServerSettings(trusted_proxies=("unix",), trusted_hosts=(NAME,))
    with wire_server(settings=chosen, uds=tmp_path / "weft.sock") as server, server.connect() as proxy:
        proxy.sendall(forwarded("/"))
        assert json_of(receive_until(proxy, b"}}"))["client"] == [CLIENT, 0]


# with nginx -----------------------------------------------------------------------------------------------------------


@contextmanager
def nginx(server: WireServer, folder: Path, authority: trustme.CA) -> Iterator[int]:
    """nginx with deploy/nginx.conf, but for ports and certificate; the port it listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    issued = authority.issue_cert(NAME)
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    site = CONF.replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
    site = site.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{server.name[1]};")
    site = re.sub(r"/etc/ssl/llm\.(pem|key)", str(folder / "both.pem"), site)
    temporary = "".join(
        f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = (
        f"daemon off; pid {folder / 'pid'}; error_log stderr; events {{}} http {{ access_log off; {temporary} {site} }}"
    )
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)])
    try:
        wait_until(lambda: process.poll() is not None or reachable(port))
        assert process.poll() is None, "nginx does not take the file"
        yield port
    finally:
        process.terminate()
        process.wait()


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed; its headers are tested above")
def test_nginx_itself_with_the_file_as_it_stands(tmp_path):
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with wire_server(settings=settings()) as server, nginx(server, tmp_path, authority) as port:

        def connect() -> ssl.SSLSocket:
            return trusting.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=NAME)

        def ask(path: str, *headers: str) -> bytes:
            with connect() as wire:
                sent = get(path, "1.1", "Connection: close", "X-Forwarded-For: 6.6.6.6", *headers)
                wire.sendall(sent.replace(b"localhost", NAME.encode()))
                return rest_of(wire)

        seen = json_of(ask("/"))
        assert seen["headers"]["host"] == NAME
        assert seen["headers"]["x-forwarded-for"] == "6.6.6.6, 127.0.0.1"
        assert seen["scheme"] == "https"
        # nginx is its client's neighbour here and trusted itself, so the next hop to the left is the client.
        assert seen["client"] == ["6.6.6.6", 0]
        assert ask("/metrics").startswith(b"HTTP/1.1 403 ")
        with connect() as wire:
            wire.sendall(get("/gated").replace(b"localhost", NAME.encode()))
            assert receive_until(wire, b"two \r\n").endswith(b"two \r\n")
            server.call(server.app.go.set)
            assert receive_until(wire, b"0\r\n\r\n").endswith(b"three\r\n0\r\n\r\n")
        with connect() as wire:
            wire.sendall(get("/endless").replace(b"localhost", NAME.encode()))
            receive_until(wire, b"three")
        wait_until(lambda: "/endless" in server.app.ended)
