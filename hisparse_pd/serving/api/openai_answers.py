"""Writes the answers to OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, whole and streamed.

``answering.py`` makes one dialect for each request and calls it as ``dialect.py`` says. A delta has tokens of
the answer or, as ``scored``, tokens of the prompt with their logprobs. A whole answer is joined from the same
chunks that a stream would have (``GrownObject``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import assert_never

import msgspec
from msgspec import Raw

from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.chat_reading import ChatReading, chat_readings
from hisparse_pd.serving.api.completion_logprobs import Echo, OutputLogprobs
from hisparse_pd.serving.api.dialect import Dialect, Json, usage
from hisparse_pd.serving.api.grown_json import GrownObject
from hisparse_pd.serving.api.output import Delta, Finish, SampleOutput
from hisparse_pd.serving.api.prompt_scores import vllm_entry
from hisparse_pd.serving.api.schemas import StreamedUsage
from hisparse_pd.serving.api.token_lists import json_list
from hisparse_pd.serving.api.token_names import TokenNames, by_id, finite

_ABOUT_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""Fields that chats have beside their choices; completions have them in their choices."""


class _OpenAiDialect(Dialect):
    """The common part of completions and chats: the envelope, usage and the order of chunks."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    """Values of ``object`` in whole answers and in chunks."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._usage = work.request.usage
        self._id = work.identity.name(f"{self.id_prefix}-", 12)
        self._grown: defaultdict[int, GrownObject] = defaultdict(GrownObject)
        """Choices of a whole answer, by sample."""
        self._beside_choices = GrownObject()
        """Fields about the prompt that a whole answer has beside its choices."""
        self._begun: set[int] = set()
        """Samples whose first chunk is written."""
        self._shows_ids = self.repeats_prompts = work.request.returns_token_ids
        self._names_by_id = work.request.names_tokens_by_id
        self._written_prompts: dict[int, Raw] = {}
        """Lists of token ids, by the prompt's index; none if they are not asked for."""

    async def write_prompts(self) -> None:
        prompts = {sample.prompt_index: sample.prompt for sample in self._work.samples}
        for prompt_index, prompt in prompts.items():
            self._written_prompts[prompt_index] = await json_list(prompt)

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        for event in self.events(output, delta):
            (choice,) = event["choices"]
            self._grown[output.index].add(choice)
            self._beside_choices.add({name: event[name] for name in _ABOUT_PROMPT if name in event})

    def choice(self, output: SampleOutput) -> Raw:
        return Raw(msgspec.json.encode(self._whole_choice(self._grown.pop(output.index).show())))

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> Json:
        answer = self._envelope(self.whole_object, choices) | {"usage": self._usage_object(outputs)}
        return answer | self._beside_choices.show()

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
        written = self._written_prompts.get(prompt_index)
        return {} if written is None else {"prompt_token_ids": written}

    def _prompt_logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Return vLLM's field with the prompt's logprobs that the delta has, where they are asked for."""
        num_top = output.sample.options.num_prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": [vllm_entry(self._token_bytes, token, num_top) for token in delta.scored]}

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

    def _whole_choice(self, grown: Json) -> Json:
        """Return the choice of a whole answer. ``grown`` is joined from the choices of its chunks."""
        return grown

    @abstractmethod
    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        """Return the logprobs of the delta's tokens; the lists of all deltas are concatenated."""


class CompletionsDialect(_OpenAiDialect):
    """``/v1/completions``."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        names = TokenNames(context.codec.token_bytes, are_ids=self._names_by_id)
        self._echoes = [Echo(sample, names) for sample in work.samples]
        self._output_logprobs = [OutputLogprobs(sample, names) for sample in work.samples]

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        echo, finish = self._echoes[output.index], delta.finish
        is_first = output.index not in self._begun
        # An echo comes whole with the first chunk or, with logprobs, in pieces with the scored prompt tokens.
        logprobs = echo.logprobs(delta.scored) if delta.scored else self._new_logprobs(output, delta)
        echoed = echo.next_text() if is_first or delta.scored else ""
        text = echoed + delta.text
        if text or finish or delta.scored or self._shows_tokens(output, delta):
            self._begun.add(output.index)
            choice = {
                "index": output.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish and finish.reason,
                "matched_stop": finish and finish.matched,
                **(self._prompt_ids(output.sample.prompt_index) if is_first else {}),
                **self._ids(output, delta.first_token, delta.last_token),
                **(self._prompt_logprobs(output, delta) if delta.scored else {}),
            }
            yield self._chunk(output, choice)

    def _logprobs(self, output: SampleOutput, delta: Delta) -> Json:
        return self._output_logprobs[output.index].feed(delta)


class ChatDialect(_OpenAiDialect):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._readings = chat_readings(context, work)

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        begins_answer = output.index not in self._begun
        self._begun.add(output.index)
        # A chunk with the role, or with the prompt's logprobs.
        if begins_answer or delta.scored:
            role: Json = {"role": "assistant", "content": ""} if begins_answer else {}
            choice: Json = {"index": output.index, "delta": role, "logprobs": None, "finish_reason": None}
            # The only prompt of a chat.
            about_prompt = self._prompt_ids(0) if begins_answer and output.index == 0 else {}
            if delta.scored:
                about_prompt |= self._prompt_logprobs(output, delta)
            yield self._chunk(output, choice, **about_prompt)
        if delta.scored:
            return
        # A chunk for each change of a block. The first one has the tokens, the last one the end.
        reading, finish = self._readings[output.index], delta.finish
        changes = reading.feed(output, delta)
        shown = [part for change in changes if (part := self._shown_change(output.index, *change))]
        if not shown and (finish or self._shows_tokens(output, delta)):
            shown.append({})
        for number, part in enumerate(shown, 1):
            is_first, is_last = number == 1, number == len(shown)
            choice = {
                "index": output.index,
                "delta": part,
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

    def _whole_choice(self, grown: Json) -> Json:
        message = grown.pop("delta")
        content, calls = message.pop("content"), message.pop("tool_calls", {})
        if calls:
            message["tool_calls"] = list(calls.values())  # ``GrownObject`` has them by their index
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
