"""Fixtures of the API's tests."""

from __future__ import annotations

import pytest

from tests.unit.api import support
from tests.unit.api.recording_codec import RecordingCodec


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> RecordingCodec:
    """The nodes' codec, which keeps prompts."""
    codec = RecordingCodec.make()
    monkeypatch.setattr(support, "CODEC", codec)
    return codec
