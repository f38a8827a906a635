"""Writes the answers to ``/v1/responses`` in OpenAI's published form, whole and streamed.

``answering.py`` makes a ``ResponsesDialect`` for each request and calls it as ``dialect.py`` says. Its base
(``block_dialect.py``) feeds the output to ``_reading``, which takes it apart into blocks. For a stream the
base sets ``_has_begun``, calls ``_begin`` once, and then ``_show`` for each change of a block. A block
becomes an item of the response's ``output``. Nothing is stored, so an answer cannot be retrieved by its id.
The model writes a call of a custom tool as a JSON object with the input in it; clients get the input alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import assert_never

from msgspec import Raw

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.block_dialect import BlockDialect
from hisparse_pd.serving.api.dialect import Json, hisparse_usage
from hisparse_pd.serving.api.openai_responses import called_tool, custom_input
from hisparse_pd.serving.api.output import Finish, SampleOutput
from hisparse_pd.serving.http.http_errors import ApiError

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg"}
"""Beginnings of items' ids, by kind of block; that of a call depends on its tool (``_id_of``)."""
_GROWING = {
    BlockKind.REASONING: ("reasoning_text", "text"),
    BlockKind.TEXT: ("output_text", "text"),
    BlockKind.CALL: ("function_call_arguments", "arguments"),
}
"""By kind of block: the name of its text in events, and the field with the whole text in the event at its end
(``response.output_text.done`` has it in ``text``)."""
_COMPLETED, _INCOMPLETE, _IN_PROGRESS, _FAILED = "completed", "incomplete", "in_progress", "failed"


class ResponsesDialect(BlockDialect):
    """``/v1/responses``."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._echo = work.request.echo or {}
        self._sampling = work.request.options[0].sampling
        chat = work.request.chat
        self._called_tools = {} if chat is None else chat.called_tools
        self._id = work.identity.name("resp_", num_bytes=24)
        self._num_events = 0

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        (last,) = self.last_events(outputs)  # it has the whole response
        return last["response"]

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        (output,) = outputs
        status = _status(output.finish)
        yield self._event(f"response.{status}", response=self._response(status, output))

    def failed(self, error: ApiError) -> Json | None:
        if not self._has_begun:
            return None  # before response.created, clients get the API's plain error event
        told = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response(_FAILED, None) | {"error": told})

    def _begin(self, output: SampleOutput) -> Iterator[Json]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(_IN_PROGRESS, None))

    def _show(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        place: Json = {"item_id": self._id_of(block), "output_index": block.index}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        is_custom = self._is_custom(block)
        name, field = ("custom_tool_call_input", "input") if is_custom else _GROWING[block.kind]
        name = f"response.{name}"
        logprobs: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        match change:
            case Change.OPENED:
                item = self._item(block, is_open=True)
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind is not BlockKind.CALL:
                    yield self._event("response.content_part.added", **place, part=_part(block.kind, ""))
            case Change.GREW:
                if not is_custom:  # a custom tool's input is taken out of its object when that is complete
                    yield self._event(f"{name}.delta", **place, delta=text, **logprobs)
            case Change.CLOSED:
                given = custom_input(block.text) if is_custom else block.text
                if is_custom:
                    yield self._event(f"{name}.delta", **place, delta=given)
                yield self._event(f"{name}.done", **place, **{field: given}, **logprobs)
                if block.kind is not BlockKind.CALL:
                    part = _part(block.kind, block.text)
                    yield self._event("response.content_part.done", **place, part=part)
                item = self._item(block)
                yield self._event("response.output_item.done", output_index=block.index, item=item)
            case _:
                assert_never(change)

    def _event(self, name: str, **fields: object) -> Json:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str, output: SampleOutput | None) -> Json:
        """Return the response object. ``output`` is None if no usage is shown."""
        is_over = status in (_COMPLETED, _INCOMPLETE)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._identity.created,
            "completed_at": int(time.time()) if status == _COMPLETED else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
            "model": self._model_name,
            "output": [self._item(block) for block in self._reading.blocks] if is_over else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_logprobs": 0,
            "truncation": "disabled",
            **self._echo,
            "usage": None if output is None else self._usage(output),
        }

    def _item(self, block: Block, *, is_open: bool = False) -> Json:
        """Return an item of the output; where it ``is_open``, without its content."""
        status = _IN_PROGRESS if is_open else _INCOMPLETE if block.is_cut else _COMPLETED
        shown: Json = {"id": self._id_of(block), "status": status}
        text = "" if is_open else block.text
        content = [] if is_open else [_part(block.kind, text)]
        match block.kind:
            case BlockKind.REASONING:
                return shown | {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.TEXT:
                return shown | {"type": "message", "role": "assistant", "content": content}
            case BlockKind.CALL:
                return shown | self._call(block, text)
            case _:
                assert_never(block.kind)

    def _call(self, block: Block, arguments: str) -> Json:
        called = called_tool(self._called_tools, block.name)
        call: Json = {"call_id": "call_" + self._id_of(block).partition("_")[2], "name": called.name}
        if called.namespace is not None:
            call["namespace"] = called.namespace
        if called.is_custom:
            return {"type": "custom_tool_call", **call, "input": custom_input(arguments)}
        return {"type": "function_call", **call, "arguments": arguments}

    def _is_custom(self, block: Block) -> bool:
        return block.kind is BlockKind.CALL and called_tool(self._called_tools, block.name).is_custom

    def _id_of(self, block: Block) -> str:
        prefix = _PREFIXES.get(block.kind) or ("ctc" if self._is_custom(block) else "fc")
        return self._identity.name(f"{prefix}_", 24, block.index)  # from 24 bytes, as the response's own id

    def _usage(self, output: SampleOutput) -> Json:
        num_new_tokens = len(output.token_ids)
        return {
            "input_tokens": output.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "cached_tokens_details": output.cached_by_tier,
                "cache_write_tokens": 0,
                "held_tokens": output.num_held_tokens,
            },
            "output_tokens": num_new_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reading.num_reasoning_tokens},
            "total_tokens": output.num_prompt_tokens + num_new_tokens,
            "hisparse": hisparse_usage([output]),
        }


def _status(finish: Finish | None) -> str:
    return _INCOMPLETE if finish is not None and finish.reason is FinishReason.LENGTH else _COMPLETED


def _part(kind: BlockKind, text: str) -> Json:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
