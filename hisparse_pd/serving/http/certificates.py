"""The certificate and key of an HTTP server with TLS, whose files may change while it serves.

A ``Listener`` (``listening.py``) checks its ``Certificate`` when it is made, and its server calls ``refresh``
once a second. API keys use ``stamp_of`` as well.
"""

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

    Connections that begin after the files have changed get the new certificate. If certificate and key do not
    fit, as for a moment while they are replaced, this is logged once and the old certificate stays in use.
    """

    certfile: Path
    keyfile: Path | None = None
    _stamp: object = field(default=None, repr=False)

    def check(self) -> None:
        """Check that a server can use the files. Raises OSError, which names them."""
        self._stamp = stamp_of(self.certfile, self.keyfile)  # first, so that a change while reading is seen
        try:
            self.context()
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            key = f" with key {self.keyfile}" if self.keyfile else ""
            raise OSError(f"certificate {self.certfile}{key}: {_reason(error)}") from error

    def context(self) -> ssl.SSLContext:
        """Make the context of a server. Raises OSError and ValueError where ``check`` would."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        return context

    def refresh(self, context: ssl.SSLContext) -> None:
        """Load the files into ``context``, which is in use, if they have changed."""
        if stamp_of(self.certfile, self.keyfile) == self._stamp:
            return
        try:
            self.check()  # in a context of its own: a key that does not fit would break the one in use
            self._load(context)
            log.info("certificate %s has changed and is in use", self.certfile)
        except OSError as error:
            log.error("the certificate in use stays as it was: %s", error)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)


def stamp_of(*paths: Path | None) -> object:
    """Return a value that changes with the content of the files, which need not exist."""
    stamps: list[object] = []
    for path in filter(None, paths):
        try:
            status = os.stat(path)
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append(None)
    return stamps


def _no_password() -> bytes:
    """Refuse an encrypted key, for whose password OpenSSL would otherwise ask at the terminal."""
    raise ValueError("the key is encrypted; store it without a password, readable by this user only")


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
