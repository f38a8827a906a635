"""TLS of an HTTP server: the files with its certificate and key, which may change while it serves."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass
class Certificate:
    """A certificate with its chain, and its key, both in PEM; the key may be in the same file.

    Connections that begin after the files have changed get the new certificate. Files that do not fit, as for
    a moment while they are exchanged, are reported once and leave the old one in use.
    """

    certfile: Path
    keyfile: Path | None = None
    _stamp: object = field(default=None, repr=False)

    def check(self) -> None:
        """Raises OSError, which names the files, for such that no server can use."""
        self._stamp = stamp_of(self.certfile, self.keyfile)
        try:
            self.context()
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            key = f" with key {self.keyfile}" if self.keyfile else ""
            raise OSError(f"certificate {self.certfile}{key}: {_reason(error)}") from error

    def context(self) -> ssl.SSLContext:
        """For a server. Raises OSError and ValueError where ``check`` would."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        return context

    def refresh(self, context: ssl.SSLContext) -> None:
        """Give ``context``, which is in use, what the files hold by now. A look at two files most times."""
        if stamp_of(self.certfile, self.keyfile) == self._stamp:
            return
        try:
            self.check()  # a key that does not fit would be gone from the context
            self._load(context)
            log.info("certificate %s has changed and is in use", self.certfile)
        except OSError as error:
            log.error("the certificate in use stays as it was: %s", error)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)


def stamp_of(*paths: Path | None) -> object:
    """What changes with the content of the files; a file need not be there."""
    stamps: list[object] = []
    for path in filter(None, paths):
        try:
            status = os.stat(path)
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append(None)
    return stamps


def _no_password() -> bytes:
    """Else OpenSSL would ask for that of an encrypted key at the terminal."""
    raise ValueError("the key is encrypted; store it without a password, readable by this user only")


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
