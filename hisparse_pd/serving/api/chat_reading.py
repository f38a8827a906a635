"""Reads a chat's answers: splits their text into blocks, and counts the tokens of their reasoning.

The dialects of chats, messages and responses make a ``ChatReading`` for each sample and feed it with deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api.answer_blocks import Block, BlockChange, BlockKind
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.chat_format import MARKUPS, ThinkMarks
from hisparse_pd.serving.api.chat_message import MessageParser
from hisparse_pd.serving.api.detokenizer import TokenBytes
from hisparse_pd.serving.api.output import Delta, Finish, SampleOutput
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.api.tool_schemas import ToolSchemas


def chat_readings(context: DecodeContext, work: Work) -> list[ChatReading]:
    """Return a reading for each sample of a chat. Where the model's markup of calls is not known, calls stay
    text."""
    token_bytes, chat_format = context.codec.token_bytes, context.codec.chat_format
    (prompt,) = work.request.prompts
    assert isinstance(prompt, ChatPrompt)
    tools = prompt.all_tools
    markup = MARKUPS[chat_format.markup] if tools and chat_format.markup is not None else None
    openings = markup.openings if markup is not None and markup.ends_reasoning else ()
    schemas = ToolSchemas(tools)
    in_reasoning = chat_format.opens_reasoning(work.samples[0].prompt, token_bytes.of)
    return [
        ChatReading(
            MessageParser(
                in_reasoning=in_reasoning,
                separates_reasoning=prompt.separate_reasoning,
                think=chat_format.think,
                markup=markup,
                schemas=schemas,
            ),
            ReasoningTokens(token_bytes, chat_format.think, openings, in_reasoning=in_reasoning),
        )
        for _ in work.samples
    ]


class ChatReading:
    """Reads one sample of a chat."""

    def __init__(self, parser: MessageParser, reasoning: ReasoningTokens) -> None:
        self._parser = parser
        self._reasoning = reasoning

    @property
    def blocks(self) -> list[Block]:
        return self._parser.blocks

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens

    def of_kind(self, kind: BlockKind) -> list[Block]:
        return [block for block in self.blocks if block.kind is kind]

    def calls_tools(self, finish: Finish) -> bool:
        """Whether a complete answer ends with calls to be made, none of them cut off."""
        parser = self._parser
        return parser.has_calls and not parser.is_in_call and finish.reason is FinishReason.STOP

    def feed(self, output: SampleOutput, delta: Delta) -> list[BlockChange]:
        """Take in ``delta``, and return the changes of blocks in order."""
        self._reasoning.count(output.token_ids[delta.first_token : delta.last_token])
        if (finish := delta.finish) is None:
            return self._parser.feed(delta.text)
        at_stop_string = isinstance(finish.matched, str)
        return self._parser.feed(delta.text, finish.reason, at_stop_string=at_stop_string)


class ReasoningTokens:
    """Counts the tokens of an answer's reasoning, from the answer's first one to the one that ends the
    reasoning, both included.

    Reasoning ends with the closing mark or with one of ``interruptions``: the openings of calls, if the model
    may call without closing its reasoning.
    """

    def __init__(
        self, token_bytes: TokenBytes, think: ThinkMarks, interruptions: Sequence[str], *, in_reasoning: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._opening = think.opening.encode()
        self._ends = tuple(end.encode() for end in (think.closing, *interruptions))
        self._num_kept_bytes = max(map(len, self._ends))
        self._seen = self._opening if in_reasoning else b""
        """Last bytes of the answer, in which marks are looked for. At first the opening mark, if the prompt
        ends with it, as if the answer had written it."""
        self._num_tokens = 0
        self._is_open: bool | None = True if in_reasoning else None
        """None until it is known whether the answer begins with reasoning."""

    def count(self, token_ids: Sequence[int]) -> None:
        """Take in further tokens of the answer."""
        for token_id in token_ids:
            if self._is_open is False:
                return
            self._num_tokens += 1
            self._seen += self._token_bytes.of(token_id)
            if self._is_open is None:
                self._seen = self._seen.lstrip()
                if self._seen.startswith(self._opening):
                    self._is_open = True
                elif not self._opening.startswith(self._seen):  # not even a beginning of the mark
                    self._is_open, self._num_tokens = False, 0
            if self._is_open:
                self._is_open = not any(end in self._seen for end in self._ends)
                self._seen = self._seen[-self._num_kept_bytes :]

    @property
    def num_tokens(self) -> int:
        """Number of reasoning tokens so far; 0 until it is known that the answer begins with reasoning."""
        return 0 if self._is_open is None else self._num_tokens
