"""`weft serve` over TLS and on a Unix socket: files, modes, signals, and the clients that come along."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
import trustme

from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import Served, serving
from tests.support.servers.wire_server import get, json_of, rest_of, wire_server
from weft.base.errors import OptionError
from weft.cli.client import Client, ServerError
from weft.cli.main import main
from weft.server.http.listener import unix_listener
from weft.wire.tls import TlsFiles, client_context


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write_certificate(authority: trustme.CA, folder: Path) -> TlsFiles:
    """A certificate for this machine and its key, in two files."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"))


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


# TLS ------------------------------------------------------------------------------------------------------------------


def presented(served: Served, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that the server shows."""
    host, port = served.url.removeprefix("https://").split(":")
    with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as wire:
        return str(wire.getpeercert()["serialNumber"])


@pytest.mark.thorough
def test_https_with_a_certificate_that_is_read_again_on_a_hangup(authority, tmp_path, monkeypatch, capsys):
    files = write_certificate(authority, tmp_path)
    context = trusting(authority)
    with serving("--ssl-certfile", files.certfile, "--ssl-keyfile", files.keyfile, "--log-level", "debug") as served:
        assert served.url.startswith("https://127.0.0.1:")
        first = presented(served, context)

        write_certificate(authority, tmp_path)
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: presented(served, context) != first)
        second = presented(served, context)

        # A certificate that is not that of the key must not leave the server with neither.
        key = Path(files.keyfile).read_bytes()
        write_certificate(authority, tmp_path)
        Path(files.keyfile).write_bytes(key)
        served.process.send_signal(signal.SIGHUP)
        served.wait_for("certificate not reloaded, keeping the old one")
        assert presented(served, context) == second

        # Clients trust what OpenSSL's own variable names.
        authority.cert_pem.write_to_path(tmp_path / "authority.pem")
        with pytest.raises(ServerError, match="certificate"):
            asyncio.run(Client(served.url).get("/v1/models"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        said = tmp_path / "said"
        said.write_text("Hello\n/exit\n")
        with said.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["chat", "--url", served.url, "--max-tokens", "4", "--stats"]) == 0
        assert " of " in capsys.readouterr().err
        command = served.curl
        environment = os.environ | {"CURL_CA_BUNDLE": str(tmp_path / "authority.pem")}
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
        assert '"role":"assistant"' in found.stdout


def test_a_key_may_have_a_password_in_a_file(authority, tmp_path):
    files = write_certificate(authority, tmp_path)
    protected, password = tmp_path / "protected.pem", tmp_path / "password"
    write_protected(Path(files.keyfile), protected, b"open sesame")
    password.write_text("open sesame\n")
    context = TlsFiles(files.certfile, str(protected), str(password)).context()
    with wire_server(tls=context) as server:
        client = trusting(authority)
        with client.wrap_socket(server.connect(), server_hostname="localhost") as wire:
            assert wire.version() in ("TLSv1.2", "TLSv1.3")
            wire.sendall(get("/", "1.1", "Connection: close"))
            assert json_of(rest_of(wire))["scheme"] == "https"
    with pytest.raises(OptionError, match="pass --ssl-keyfile-password-file"):
        TlsFiles(files.certfile, str(protected)).context()
    password.write_text("wrong\n")
    with pytest.raises(OptionError, match="cannot use"):
        TlsFiles(files.certfile, str(protected), str(password)).context()


def write_protected(key: Path, protected: Path, password: bytes) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    found = load_pem_private_key(key.read_bytes(), None)
    form = BestAvailableEncryption(password)
    protected.write_bytes(found.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, form))


def test_only_suites_of_authenticated_encryption_are_spoken(authority, tmp_path):
    context = write_certificate(authority, tmp_path).context()
    for each in (context, client_context()):
        assert [suite["name"] for suite in each.get_ciphers() if not suite["aead"]] == []
    with wire_server(tls=context) as server:
        for suite, spoken in {"ECDHE-ECDSA-AES128-GCM-SHA256": True, "ECDHE-ECDSA-AES256-SHA384": False}.items():
            client = trusting(authority)
            client.maximum_version = ssl.TLSVersion.TLSv1_2
            client.set_ciphers(f"{suite}:{suite.replace('ECDSA', 'RSA')}")
            with server.connect() as plain:
                if spoken:
                    with client.wrap_socket(plain, server_hostname="localhost") as wire:
                        assert wire.cipher()[0].endswith("GCM-SHA256")
                else:
                    with pytest.raises(OSError):
                        client.wrap_socket(plain, server_hostname="localhost")


def test_what_is_no_tls_gets_no_answer_and_old_versions_are_not_spoken(authority, tmp_path):
    context = write_certificate(authority, tmp_path).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    with wire_server(tls=context) as server:
        assert not server.ask(get()).startswith(b"HTTP")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-certfile", "/no/such/file"], "cannot use /no/such/file: No such file"),
        (["--ssl-keyfile", "key.pem"], "pass --ssl-certfile too"),
        (["--ssl-keyfile-password", "secret"], "use --ssl-keyfile-password-file"),
        (["--uds-mode", "999"], "--uds-mode must be three octal digits"),
        (["--uds", "/no/such/folder/weft.sock"], "No such file"),
        (["--trusted-proxy", "10.0.0.1/8"], "trusted_proxy must be an address, a network"),
        (["--allowed-host", "example.com:80"], "allowed_host must be a lower-case name without a port"),
    ],
)
def test_options_that_cannot_work_are_one_line(capsys, caplog, arguments, message):
    assert main(["serve", *arguments]) == 2
    # Once logging is set up, the line is one of the log.
    [line] = [*capsys.readouterr().err.splitlines(), *(record.getMessage() for record in caplog.records)]
    assert message in line


# Unix sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_unix_socket_of_its_mode_that_clients_of_ours_and_curl_can_use(tmp_path, monkeypatch, capsys):
    path = tmp_path / "weft.sock"
    with serving("--uds", str(path), "--uds-mode", "660", "--log-level", "debug") as served:
        assert served.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert asyncio.run(Client(served.url).get("/v1/models"))["data"][0]["id"] == "tiny"
        said = tmp_path / "said"
        said.write_text("Hello\n/exit\n")
        with said.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["chat", "--url", served.url, "--max-tokens", "4", "--stats"]) == 0
        assert main(["bench", "--url", served.url, "--prompts", "2", "--output-length", "4"]) == 0
        command = served.curl
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert '"role":"assistant"' in found.stdout
        assert served.stop() == 0
    assert not path.exists()


def test_what_a_dead_server_left_is_replaced_and_nothing_else_is(tmp_path):
    path = tmp_path / "weft.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with unix_listener(str(path), 0o600) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        # In use from the first moment, though nothing is accepted yet.
        with pytest.raises(OptionError, match="in use by another server"), unix_listener(str(path), 0o600):
            pass
        assert listener.getsockname() == str(path)
    assert not path.exists()

    path.write_text("precious")
    with pytest.raises(OptionError, match="but is a file"), unix_listener(str(path), 0o600):
        pass
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="but is a file"), unix_listener(str(path), 0o600):
        pass


def test_a_socket_that_was_put_in_the_place_of_ours_stays(tmp_path):
    path = tmp_path / "weft.sock"
    with unix_listener(str(path), 0o600), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_clients_of_a_unix_socket_have_no_address(tmp_path):
    for loop in ("asyncio", "uvloop"):
        with wire_server(loop=loop, uds=tmp_path / "weft.sock") as server:
            assert json_of(server.ask(get("/", "1.1", "Connection: close")))["client"] is None
