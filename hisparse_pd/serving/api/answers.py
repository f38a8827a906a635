"""Answers to OpenAI's completions and chats and to SGLang's native ``/generate``.

A dialect shows each engine message as events (``events``, then ``last_events``), or finished samples as one
body (``keep`` with each engine message, ``choice`` with each sample's last one, then ``whole``). The body has
what its events make together; texts of ``/generate``, and blocks, are joined where they are read. A call
encodes what one engine message brought: all logprobs of a long answer would hold the event loop up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import msgspec
from msgspec import Raw

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.chat_reading import ChatReading, chat_readings
from hisparse_pd.serving.api.detokenizer import TokenBytes
from hisparse_pd.serving.api.frame import SSE_DONE
from hisparse_pd.serving.api.output import Delta, Finish, SampleOutput
from hisparse_pd.serving.api.schemas import StreamedUsage
from hisparse_pd.serving.api.token_names import TextOffsets, TokenNames, by_id, finite
from hisparse_pd.serving.http.http_errors import ApiError

Json = dict[str, Any]


class Dialect(ABC):
    """How one endpoint shows the samples of one request."""

    end = SSE_DONE
    """What stands behind the last event of a stream."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        self._work = work
        self._identity = work.identity
        self._token_bytes = context.codec.token_bytes
        self._model_name = context.settings.model_name

    @abstractmethod
    def keep(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta of a sample that is to be shown whole."""

    @abstractmethod
    def choice(self, output: SampleOutput) -> Raw:
        """A finished sample in the body of a non-streaming answer."""

    @abstractmethod
    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        """That body."""

    @abstractmethod
    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        """The events for one delta; none when it shows nothing new."""

    def replay(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta whose events the client has."""
        for _ in self.events(output, delta):
            pass

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        """The events after the last delta of all samples."""
        return iter(())

    def failed(self, error: ApiError) -> Json | None:
        """The event that ends a stream which has begun; None: an error as of its endpoint."""
        return None


_TEXTS = ("text", "content", "reasoning_content", "arguments")
"""Fields of choices that grow; their other strings come once."""


class _Grown:
    """What the pieces of an object make together, as clients join them: texts and lists go on, objects by
    their fields, and anything else comes once. Lists are encoded at once, and take less memory so."""

    def __init__(self) -> None:
        self._fields: dict[Any, Any] = {}

    def add(self, piece: Mapping[Any, object]) -> None:
        fields = self._fields
        for name, value in piece.items():
            match value:
                case dict():
                    fields[name] = fields.get(name) or _Grown()
                    fields[name].add(value)
                case list() if name == "tool_calls":
                    fields.setdefault(name, _Grown()).add({call["index"]: call for call in value})
                case list():
                    fields.setdefault(name, []).extend(encoded(value))
                case str() if name in _TEXTS:
                    fields.setdefault(name, []).append(value)
                case _ if fields.get(name) is None:
                    fields[name] = value

    def show(self) -> Json:
        """All that was added; calls stand by their index."""
        shown: Json = {}
        for name, value in self._fields.items():
            match value:
                case _Grown():
                    shown[name] = value.show()
                case [str(), *_]:
                    value[:] = ["".join(value)]
                    (shown[name],) = value
                case list():
                    value[:] = [b",".join(value)] if value else []
                    shown[name] = Raw(b"[%b]" % b"".join(value))
                case _:
                    shown[name] = value
        return shown


def encoded(entries: Sequence[object]) -> list[bytes]:
    """A piece of the JSON of a list, without brackets; none of no entries."""
    return [msgspec.json.encode(entries)[1:-1]] if entries else []


def shown_lists(lists: Mapping[str, Sequence[bytes]]) -> dict[str, Raw]:
    """The lists whose pieces these are."""
    return {name: Raw(b"[%b]" % b",".join(pieces)) for name, pieces in lists.items()}


# --- OpenAI --------------------------------------------------------------------------------------------


class _OpenAiDialect(Dialect):
    """What completions and chat share: the envelope, usage and the order of chunks."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._usage = work.request.usage
        self._id = work.identity.name(f"{self.id_prefix}-", 12)
        self._grown: defaultdict[int, _Grown] = defaultdict(_Grown)
        """By sample, in an answer that is shown whole."""
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
        return self._envelope(self.whole_object, choices) | {"usage": self._used(outputs)}

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        if self._usage is not StreamedUsage.NONE:
            yield self._envelope(self.chunk_object, []) | {"usage": self._used(outputs)}

    def _chunk(self, output: SampleOutput, choice: Json, **added: object) -> Json:
        envelope = self._envelope(self.chunk_object, [choice]) | added
        match self._usage:
            case StreamedUsage.NONE:
                return envelope
            case StreamedUsage.LAST:
                return envelope | {"usage": None}
            case StreamedUsage.EVERY:
                return envelope | {"usage": self._used([output])}
            case _:
                assert_never(self._usage)

    def _used(self, outputs: Sequence[SampleOutput]) -> Json:
        return usage(outputs)

    def _shows_tokens(self, output: SampleOutput, delta: Delta) -> bool:
        """Whether the delta has tokens that the client is to see, be there text of them or not."""
        shows = self._shows_ids or output.sample.options.sampling.num_logprobs is not None
        return shows and delta.last_token > delta.first_token

    def _prompt_ids(self, prompt_index: int) -> Json:
        """As vLLM shows a prompt's token ids, where they are asked for."""
        if not self._shows_ids:
            return {}
        if prompt_index not in self._encoded_prompts:
            token_ids = unpack_token_ids(self._prompts[prompt_index]).tolist()
            self._encoded_prompts[prompt_index] = Raw(msgspec.json.encode(token_ids))
        return {"prompt_token_ids": self._encoded_prompts[prompt_index]}

    def _ids(self, output: SampleOutput, first: int, last: int) -> Json:
        """The same of an answer's tokens in [first, last)."""
        return {"token_ids": output.token_ids[first:last]} if self._shows_ids else {}

    def _new_logprobs(self, output: SampleOutput, delta: Delta) -> Json | None:
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
        """The choice of a whole answer, from all that those of its chunks make together."""

    @abstractmethod
    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Logprobs of the tokens of a delta; lists go on with those of the next one."""


class CompletionsDialect(_OpenAiDialect):
    """``/v1/completions``."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._names = TokenNames(context.codec.token_bytes, are_ids=self._names_by_id)
        self._shown: dict[int, _ShownTokens] = {}
        """By sample, where logprobs are asked for."""
        self._echoed: set[int] = set()
        """Samples whose stream has begun, with the prompt where it is echoed."""

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
            grown["token_ids"] = grown.pop("token_ids")  # behind those of the prompt
        return grown

    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Of the tokens of which it is certain where they begin: what may be a stop string may be no text."""
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
    """Which tokens of a sample are shown with their logprobs: each once, in order."""

    def __init__(self, offsets: TextOffsets, num_chars: int) -> None:
        self._offsets = offsets
        self._num_chars = num_chars
        """Of the text that is shown."""
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        """With the offsets of their texts."""

    def feed(self, delta: Delta) -> list[tuple[int, TokenLogprob]]:
        """Those that come with the delta: they begin in the text that is shown, or at its end."""
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
        """The delta of a change of a block; empty where it shows nothing."""
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

    def _used(self, outputs: Sequence[SampleOutput]) -> Json:
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
            "index": call.number,  # by which clients join deltas; in a whole message it is one field more
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


# --- SGLang --------------------------------------------------------------------------------------------


class GenerateDialect(Dialect):
    """``/generate``. Streamed text, ids and logprobs are cumulative, as SGLang's are.

    So an event that the next one repeats is left out: a stream's bytes grow with the square of its length.
    """

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._is_list = work.request.is_batch or len(work.samples) > 1
        self._logprobs: defaultdict[int, _Grown] = defaultdict(_Grown)
        """By sample."""

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        if (num_logprobs := output.sample.options.sampling.num_logprobs) is None:
            return
        lists: Json = {
            "output_token_logprobs": [
                self._token(output, entry.token_id, entry.logprob) for entry in delta.logprobs
            ]
        }
        if num_logprobs:
            lists["output_top_logprobs"] = [
                [self._token(output, token_id, logprob) for token_id, logprob in entry.top]
                for entry in delta.logprobs
            ]
        self._logprobs[output.index].add(lists)

    def choice(self, output: SampleOutput) -> Raw:
        return Raw(msgspec.json.encode(self._show(output)))

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        return choices if self._is_list else choices[0]

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        self.keep(output, delta)
        if delta.finish or (delta.last_token > delta.first_token and not output.is_behind):
            yield self._show(output) | ({"index": output.index} if self._is_list else {})

    def replay(self, output: SampleOutput, delta: Delta) -> None:
        self.keep(output, delta)  # an event has all that those before it have

    def _show(self, output: SampleOutput) -> Json:
        meta: Json = {
            "id": self._request_id(output),
            "finish_reason": output.finish and self._finish_reason(output, output.finish),
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "held_tokens": output.num_held_tokens,
            "e2e_latency": time.monotonic() - self._work.arrived_at,
            "hisparse": hisparse_usage([output]),
        }
        if output.num_drafted:
            meta["spec_draft_token_num"] = output.num_drafted
            meta["spec_accept_token_num"] = output.num_accepted
        if output.sample.options.sampling.num_logprobs is not None:
            meta["input_token_logprobs"] = []
            meta |= self._logprobs[output.index].show()
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _token(self, output: SampleOutput, token_id: int, logprob: float) -> list[object]:
        return sglang_token(self._token_bytes, token_id, logprob, output.sample.options.text_in_logprobs)

    def _request_id(self, output: SampleOutput) -> str:
        given = self._work.request.request_ids
        return given[output.sample.prompt_index] if given else self._identity.name("", 12, output.index)

    @staticmethod
    def _finish_reason(output: SampleOutput, finish: Finish) -> Json:
        shown: Json = {"type": finish.reason}
        if finish.reason == "length":
            shown["length"] = len(output.token_ids)
        if finish.matched is not None:
            shown["matched"] = finish.matched
        return shown


# --- usage ---------------------------------------------------------------------------------------------


def usage(outputs: Sequence[SampleOutput], num_reasoning_tokens: int | None = None) -> Json:
    """OpenAI's usage object. A prompt counts once, however many samples it has.

    ``num_reasoning_tokens``: of all samples together; None where answers have no reasoning.
    """
    firsts = list({output.sample.prompt_index: output for output in reversed(outputs)}.values())
    num_prompt_tokens = sum(output.num_prompt_tokens for output in firsts)
    num_new_tokens = sum(len(output.token_ids) for output in outputs)
    details = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
    if num_drafted := sum(output.num_drafted for output in outputs):
        num_accepted = sum(output.num_accepted for output in outputs)
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_drafted - num_accepted
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in firsts),
            "held_tokens": sum(output.num_held_tokens for output in firsts),
        },
        **({"completion_tokens_details": details} if details else {}),
        "hisparse": hisparse_usage(outputs),
    }


def hisparse_usage(outputs: Sequence[SampleOutput]) -> Json | None:
    """Mode, and hits and misses of all samples together; None before the engine has told, and where it took
    no part.

    Samples that were served in different modes have the mode "mixed", with ``modes`` for each of them. Of an
    answer that went on at another node, how often it did, with the hits and misses of the last one.
    """
    stats = [output.stats for output in outputs if output.stats is not None]
    if not stats:
        return None
    modes = [entry.mode for entry in stats]
    shown: Json = {
        "mode": modes[0] if len(set(modes)) == 1 else "mixed",
        "hits": sum(entry.hits for entry in stats),
        "misses": sum(entry.misses for entry in stats),
    }
    if num_resumes := outputs[0].sample.num_resumes:
        shown["resumes"] = num_resumes
    return shown if len(set(modes)) == 1 else shown | {"modes": modes}


def sglang_token(
    token_bytes: TokenBytes, token_id: int, logprob: float | None, with_text: bool
) -> list[object]:
    text = token_bytes.text(token_id) if with_text else None
    return [None if logprob is None else finite(logprob), token_id, text]
