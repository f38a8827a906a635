"""Typed decoding of msgpack and JSON that fails in one way, whatever the bytes."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import msgspec

T = TypeVar("T")


class MalformedMessage(msgspec.DecodeError):
    """The bytes are no message of the expected type."""


class TypedDecoder(Generic[T]):
    """A msgpack decoder that is made once for its type, which may be a union. Raises MsgspecError only.

    msgspec's own also lets through what Python raises for a string that is no UTF-8 and for deep nesting in a
    field that nobody knows.
    """

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]
        self._decoder = msgspec.msgpack.Decoder(message_type)

    @classmethod
    def json(cls, message_type: Any) -> Self:
        """The same for JSON."""
        decoder = cls(message_type)
        decoder._decoder = msgspec.json.Decoder(message_type)
        return decoder

    def decode(self, frame: bytes | bytearray) -> T:
        try:
            return self._decoder.decode(frame)
        except UnicodeDecodeError as error:
            raise MalformedMessage(
                f"a string is not UTF-8: {error.reason} at its byte {error.start}"
            ) from error
        except RecursionError as error:
            raise MalformedMessage("the message is nested too deeply") from error
