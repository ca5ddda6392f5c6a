"""TLS of listening sockets, whose certificate and key are reloaded on request, and of connections to replicas."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from weft.base.errors import OptionError

# For TLS 1.2: forward secrecy and authenticated encryption. TLS 1.3 has no other suites.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM format. `keyfile` is None if the key is in `certfile`; `password_file` has the key's password."""

    certfile: str
    keyfile: str | None = None
    password_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return a server context: TLS 1.2 or newer, HTTP/1.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def reload(self, context: ssl.SSLContext) -> None:
        """Reload the files for new handshakes. Raises, and changes nothing, if they do not match."""
        # Check first: a failure halfway would leave a context with the new certificate and the old key.
        self.context()
        self._load(context)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certfile, self.keyfile, self._password)
        except OSError as error:
            files = " and ".join(filter(None, (self.certfile, self.keyfile)))
            reason = getattr(error, "reason", None) or error.strerror or error
            raise OptionError(f"--ssl-certfile, --ssl-keyfile: cannot use {files}: {reason}") from None

    def _password(self) -> str:
        """Return the key's password; called only if the key is encrypted."""
        if self.password_file is None:
            raise OptionError("the key of --ssl-keyfile is encrypted; pass --ssl-keyfile-password-file")
        try:
            return Path(self.password_file).expanduser().read_text().removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read --ssl-keyfile-password-file {self.password_file}: {error}") from None


def certificate_name(files: TlsFiles) -> bytes:
    """Return the digest of a certificate, as the other side of a connection computes it."""
    try:
        text = Path(files.certfile).expanduser().read_text()
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        return sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the certificate {files.certfile}: {error}") from None


def client_context() -> ssl.SSLContext:
    """Return a context that encrypts. The handshake of the fleet proves whose certificate it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
