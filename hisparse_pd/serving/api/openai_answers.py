"""Writes the answers to OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, whole and streamed.

A whole answer is joined from the same chunks that a stream would have (``GrownObject``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import assert_never

import msgspec
from msgspec import Raw

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.chat_reading import ChatReading, chat_readings
from hisparse_pd.serving.api.dialect import Dialect, Json, usage
from hisparse_pd.serving.api.grown_json import GrownObject
from hisparse_pd.serving.api.output import Delta, Finish, SampleOutput
from hisparse_pd.serving.api.schemas import StreamedUsage
from hisparse_pd.serving.api.token_names import TextOffsets, TokenNames, by_id, finite


class _OpenAiDialect(Dialect):
    """What completions and chats have in common: the envelope, usage and the order of chunks."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._usage = work.request.usage
        self._id = work.identity.name(f"{self.id_prefix}-", 12)
        self._grown: defaultdict[int, GrownObject] = defaultdict(GrownObject)
        """Choices of a whole answer, by sample."""
        self._shows_ids = work.request.returns_token_ids
        self._names_by_id = work.request.names_tokens_by_id
        self._prompts = {sample.prompt_index: sample.prompt for sample in work.samples}
        self._encoded_prompts: dict[int, Raw] = {}

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        for event in self.events(output, delta):
            (choice,) = event["choices"]
            self._grown[output.index].add(choice)

    def choice(self, output: SampleOutput) -> Raw:
        return Raw(msgspec.json.encode(self._whole_choice(self._grown.pop(output.index).show())))

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> Json:
        return self._envelope(self.whole_object, choices) | {"usage": self._usage_object(outputs)}

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        if self._usage is not StreamedUsage.NONE:
            yield self._envelope(self.chunk_object, []) | {"usage": self._usage_object(outputs)}

    def _chunk(self, output: SampleOutput, choice: Json, **added: object) -> Json:
        envelope = self._envelope(self.chunk_object, [choice]) | added
        match self._usage:
            case StreamedUsage.NONE:
                return envelope
            case StreamedUsage.LAST:
                return envelope | {"usage": None}
            case StreamedUsage.EVERY:
                return envelope | {"usage": self._usage_object([output])}
            case _:
                assert_never(self._usage)

    def _usage_object(self, outputs: Sequence[SampleOutput]) -> Json:
        return usage(outputs)

    def _shows_tokens(self, output: SampleOutput, delta: Delta) -> bool:
        """Whether the client is shown the delta's tokens, even where they add no text."""
        shows = self._shows_ids or output.sample.options.sampling.num_logprobs is not None
        return shows and delta.last_token > delta.first_token

    def _prompt_ids(self, prompt_index: int) -> Json:
        """Return vLLM's field with the prompt's token ids, where they are asked for."""
        if not self._shows_ids:
            return {}
        if prompt_index not in self._encoded_prompts:
            token_ids = unpack_token_ids(self._prompts[prompt_index]).tolist()
            self._encoded_prompts[prompt_index] = Raw(msgspec.json.encode(token_ids))
        return {"prompt_token_ids": self._encoded_prompts[prompt_index]}

    def _ids(self, output: SampleOutput, first: int, last: int) -> Json:
        """Return vLLM's field with the answer's token ids in [first, last), where they are asked for."""
        return {"token_ids": output.token_ids[first:last]} if self._shows_ids else {}

    def _new_logprobs(self, output: SampleOutput, delta: Delta) -> Json | None:
        """Return the logprobs that the delta's chunk has; None if none are asked for."""
        if output.sample.options.sampling.num_logprobs is None:
            return None
        return self._logprobs(output, delta)

    def _envelope(self, kind: str, choices: Sequence[Json | Raw]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._identity.created,
            "model": self._model_name,
            "choices": choices,
        }

    @abstractmethod
    def _whole_choice(self, grown: Json) -> Json:
        """Return the choice of a whole answer. ``grown`` is joined from the choices of its chunks."""

    @abstractmethod
    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Return the logprobs of the delta's tokens; the lists of all deltas are concatenated."""


class CompletionsDialect(_OpenAiDialect):
    """``/v1/completions``."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._names = TokenNames(context.codec.token_bytes, are_ids=self._names_by_id)
        self._shown: dict[int, _ShownTokens] = {}
        """Tokens whose logprobs may be shown, by sample; samples without logprobs have no entry."""
        self._echoed: set[int] = set()
        """Samples whose first event, which has the echoed prompt, is written."""

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        text = delta.text if output.index in self._echoed else output.sample.echo + delta.text
        self._echoed.add(output.index)
        finish = delta.finish
        if text or finish or self._shows_tokens(output, delta):
            choice = {
                "index": output.index,
                "text": text,
                "logprobs": self._new_logprobs(output, delta),
                "finish_reason": finish and finish.reason,
                "matched_stop": finish and finish.matched,
                **self._ids(output, delta.first_token, delta.last_token),
                **(self._prompt_ids(output.sample.prompt_index) if delta.first_token == 0 else {}),
            }
            yield self._chunk(output, choice)

    def _whole_choice(self, grown: Json) -> Json:
        if self._shows_ids:
            grown["token_ids"] = grown.pop("token_ids")  # moves them behind those of the prompt
        return grown

    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Return the logprobs of the tokens whose text is shown. A token within what may be a stop string has
        to wait: its text may never be shown."""
        sample = output.sample
        shown = self._shown.get(output.index)
        if shown is None:
            skips = sample.options.skip_special_tokens
            offsets = TextOffsets(self._token_bytes, len(sample.echo), skip_special_tokens=skips)
            shown = self._shown[output.index] = _ShownTokens(offsets, len(sample.echo))
        certain = shown.feed(delta)
        entries = [entry for _, entry in certain]
        return {
            "tokens": [self._names.of(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                self._names.likeliest(entry.token_id, entry.logprob, entry.top) for entry in entries
            ],
            "text_offset": [offset for offset, _ in certain],
        }


class _ShownTokens:
    """The tokens of one sample whose logprobs may be shown: those whose text is shown, in order."""

    def __init__(self, offsets: TextOffsets, num_chars: int) -> None:
        self._offsets = offsets
        self._num_chars = num_chars
        """Length of the shown text."""
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        """Entries that are not shown yet, with the offsets of their texts."""

    def feed(self, delta: Delta) -> list[tuple[int, TokenLogprob]]:
        """Return the entries to show with the delta: they begin in the shown text, or at its end."""
        self._num_chars += len(delta.text)
        self._waiting += ((self._offsets.next(entry.token_id), entry) for entry in delta.logprobs)
        found = []
        while self._waiting and (delta.finish or self._waiting[0][0] <= self._num_chars):
            offset, entry = self._waiting.popleft()
            found.append((min(offset, self._num_chars), entry))
        return found


class ChatDialect(_OpenAiDialect):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._readings = chat_readings(context, work)

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        reading = self._readings[output.index]
        if delta.first_token == 0:
            role: Json = {"role": "assistant", "content": ""}
            choice: Json = {"index": output.index, "delta": role, "logprobs": None, "finish_reason": None}
            yield self._chunk(output, choice, **(self._prompt_ids(0) if output.index == 0 else {}))
        finish = delta.finish
        changes = reading.feed(output, delta)
        shown = [part for change in changes if (part := self._shown_change(output.index, *change))]
        if not shown and (finish or self._shows_tokens(output, delta)):
            shown.append({})
        for number, part_delta in enumerate(shown, 1):
            is_first, is_last = number == 1, number == len(shown)
            choice = {
                "index": output.index,
                "delta": part_delta,
                "logprobs": self._new_logprobs(output, delta) if is_first else None,
                "finish_reason": _finish_reason(finish, reading) if finish and is_last else None,
                "matched_stop": finish.matched if finish and is_last else None,
                **self._ids(output, delta.first_token, delta.last_token if is_first else delta.first_token),
            }
            yield self._chunk(output, choice)

    def _shown_change(self, sample: int, change: Change, block: Block, text: str) -> Json:
        """Return the delta that shows a block's change; empty if there is nothing to show."""
        match change, block.kind:
            case Change.GREW, BlockKind.REASONING:
                return {"reasoning_content": text}
            case Change.GREW, BlockKind.TEXT:
                return {"content": text}
            case Change.OPENED, BlockKind.CALL:
                return {"tool_calls": [self._shown_call(sample, block)]}
            case Change.GREW, BlockKind.CALL:
                return {"tool_calls": [{"index": block.number, "function": {"arguments": text}}]}
            case _:
                return {}

    def _usage_object(self, outputs: Sequence[SampleOutput]) -> Json:
        return usage(outputs, sum(self._readings[output.index].num_reasoning_tokens for output in outputs))

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> Json:
        return super().whole(outputs, choices) | self._prompt_ids(0)

    def _whole_choice(self, grown: Json) -> Json:
        message = grown.pop("delta")
        content, calls = message.pop("content"), message.pop("tool_calls", {})
        if calls:
            message["tool_calls"] = list(calls.values())
        message |= {"content": content or (None if calls else ""), "refusal": None}
        return {"index": grown.pop("index"), "message": message, **grown}

    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        content = [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in delta.logprobs
        ]
        return {"content": content, "refusal": None}

    def _shown_call(self, sample: int, call: Block) -> Json:
        return {
            "index": call.number,  # clients join deltas by it; a whole message keeps it
            "id": self._identity.name("call_", 12, sample, call.number),
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        token = self._token_bytes.of(token_id)
        return {
            "token": by_id(token_id) if self._names_by_id else token.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(token),
        }


def _finish_reason(finish: Finish, reading: ChatReading) -> str:
    return "tool_calls" if reading.calls_tools(finish) else finish.reason
