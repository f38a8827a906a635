"""Writes the answers to ``/v1/messages`` in Anthropic's published form, whole and streamed.

``answering.py`` makes a ``MessagesDialect`` for each request. For a whole answer it calls ``whole``. For a
stream the base class (``block_dialect.py``) calls ``_begin`` first and ``_show`` with each change of a block,
and ``answering.py`` calls ``last_events``. A block of the answer becomes a content block of the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import assert_never

import pydantic_core
from msgspec import Raw

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change
from hisparse_pd.serving.api.anthropic_messages import signature_of
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.block_dialect import BlockDialect
from hisparse_pd.serving.api.dialect import Json, hisparse_usage
from hisparse_pd.serving.api.output import Finish, SampleOutput
from hisparse_pd.serving.api.raw_json import is_object


class MessagesDialect(BlockDialect):
    """``/v1/messages``. Shown thinking has no signature; the signature of omitted thinking contains it."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._id = work.identity.name("msg_", 12)
        self._omits_thinking = work.request.omits_thinking

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        (output,) = outputs
        return self._message([self._whole_block(block) for block in self._reading.blocks], output)

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        (output,) = outputs
        yield _event("message_delta", delta=self._stop(output.finish), usage=self._usage(output))
        yield _event("message_stop")

    def _begin(self, output: SampleOutput) -> Iterator[Json]:
        # Even if the output has finished with its first delta, its message begins without a reason to stop.
        yield _event("message_start", message=self._message([], output) | self._stop(None))

    def _show(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        match change:
            case Change.OPENED:
                yield _event("content_block_start", index=block.index, content_block=self._empty_block(block))
            case Change.GREW:
                if not self._omits(block):
                    yield _event("content_block_delta", index=block.index, delta=_delta(block.kind, text))
            case Change.CLOSED:
                if block.kind is BlockKind.REASONING:
                    text = signature_of(block.text) if self._omits(block) else ""
                    signature = {"type": "signature_delta", "signature": text}
                    yield _event("content_block_delta", index=block.index, delta=signature)
                yield _event("content_block_stop", index=block.index)
            case _:
                assert_never(change)

    def _omits(self, block: Block) -> bool:
        return self._omits_thinking and block.kind is BlockKind.REASONING

    def _whole_block(self, block: Block) -> Json:
        if self._omits(block):
            return {"type": "thinking", "thinking": "", "signature": signature_of(block.text)}
        if block.kind is BlockKind.CALL:
            return self._empty_block(block) | {"input": _input(block)}
        return _shown_block(block.kind, block.text)

    def _empty_block(self, block: Block) -> Json:
        """Return the block as it is when a stream opens it."""
        if block.kind is BlockKind.CALL:
            tool_id = self._identity.name("toolu_", 12, block.index)
            return {"type": "tool_use", "id": tool_id, "name": block.name, "input": {}}
        return _shown_block(block.kind, "")

    def _message(self, content: list[Json], output: SampleOutput) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
            **self._stop(output.finish),
            "usage": self._usage(output),
        }

    def _stop(self, finish: Finish | None) -> Json:
        """Return the fields that say why the message ended; both are null while it has not."""
        reason: str | None = None
        if finish is not None:
            by_string = finish.reason is FinishReason.STOP and isinstance(finish.matched, str)
            if finish.reason is FinishReason.LENGTH:
                reason = "max_tokens"
            elif self._reading.calls_tools(finish):
                reason = "tool_use"
            else:
                reason = "stop_sequence" if by_string else "end_turn"
        sequence = finish.matched if finish is not None and reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: SampleOutput) -> Json:
        """Return Anthropic's usage object, whose ``input_tokens`` do not include cached ones."""
        num_cached_tokens = output.num_cached_tokens
        return {
            "input_tokens": output.num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": len(output.token_ids),
            "output_tokens_details": {"thinking_tokens": self._reading.num_reasoning_tokens},
            "cached_tokens_details": output.cached_by_tier,
            "held_tokens": output.num_held_tokens,
            "hisparse": hisparse_usage([output]),
        }


def _event(name: str, **fields: object) -> Json:
    return {"type": name, **fields}


def _delta(kind: BlockKind, text: str) -> Json:
    match kind:
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
        case _:
            assert_never(kind)


def _shown_block(kind: BlockKind, text: str) -> Json:
    if kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _input(block: Block) -> object:
    """Return a call's arguments, or those that are complete where the call was cut off.

    A text that is no JSON object becomes the object that Anthropic documents for it.
    """
    text = block.text
    if block.is_cut:
        with suppress(ValueError):
            found = pydantic_core.from_json(text or "{}", allow_partial=True)
            if isinstance(found, dict):
                return found
    elif is_object(text):
        return Raw(text.encode())
    return {"INVALID_JSON": text}
