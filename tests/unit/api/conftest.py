"""Fixtures of the API's tests."""

from __future__ import annotations

import pytest

from tests.unit.api import support
from tests.unit.api.recording_codec import RecordingCodec


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> RecordingCodec:
    """That of the nodes, which keeps prompts."""
    codec = RecordingCodec.make()
    monkeypatch.setattr(support, "CODEC", codec)
    return codec
