"""Certificates for 127.0.0.1 that are their own CA, made by OpenSSL's command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@dataclass(frozen=True)
class TlsFiles:
    cert: Path
    key: Path

    def trusting(self) -> ssl.SSLContext:
        """Return the context of a client that trusts this certificate alone."""
        return ssl.create_default_context(cafile=self.cert)

    def serving(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.cert.read_text())


def make_tls_files(directory: Path, *, password: str = "") -> TlsFiles:
    """Write a certificate and its key into ``directory``, over earlier ones. ``password``: the key's."""
    directory.mkdir(exist_ok=True)
    files = TlsFiles(directory / "cert.pem", directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    command += ["-keyout", str(files.key), "-out", str(files.cert)]
    command += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(command, check=True, capture_output=True)
    return files
