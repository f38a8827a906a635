"""Fixtures of the API's tests."""

from __future__ import annotations

import copy
import functools

import pytest

from tests.unit.api import support
from tests.unit.api.recording_codec import RecordingCodec


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> RecordingCodec:
    """The nodes' codec, which keeps prompts."""
    codec = copy.copy(_made_codec())
    monkeypatch.setattr(support, "CODEC", codec)
    return codec


@functools.cache
def _made_codec() -> RecordingCodec:
    return RecordingCodec.make()
