"""Thinking that a client does not want to see: it is the signature of an empty block, in base64.

No secret: whoever may read the answer may read it. Clients send blocks back as they are, and the model sees
what it thought.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "hisparse-pd:"


def signature_of(thinking: str) -> str:
    return _MARK + base64.b64encode(thinking.encode()).decode()


def thinking_of(signature: str | None) -> str:
    """The text behind a signature; "" for one of another service."""
    if signature is None or not signature.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
