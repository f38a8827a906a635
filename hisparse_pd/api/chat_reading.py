"""How a chat's answer is read: its markup of calls, how much of it is reasoning, and what it ended for."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse_pd.api.app import Work
from hisparse_pd.api.chat_format import END_OF_THINK, THINK, Markup, opens_reasoning
from hisparse_pd.api.chat_message import MessageParser
from hisparse_pd.api.detokenizer import TokenBytes
from hisparse_pd.api.output import Finish
from hisparse_pd.api.prompts import ChatPrompt
from hisparse_pd.api.tool_schemas import ToolSchemas
from hisparse_pd.vocabulary import FinishReason


class ChatReading:
    """Makes what reads the samples of one chat.

    ``markup``: how the model writes tool calls; None where that is not known, and they stay text.
    """

    def __init__(self, work: Work, token_bytes: TokenBytes, markup: Markup | None) -> None:
        (prompt,) = work.request.prompts
        assert isinstance(prompt, ChatPrompt)
        tools = prompt.all_tools
        self._separates_reasoning = prompt.separate_reasoning
        self._markup = markup if tools else None
        self._schemas = ToolSchemas(tools)
        self._token_bytes = token_bytes
        self._in_reasoning = opens_reasoning(work.samples[0].prompt, token_bytes.of)

    def parser(self) -> MessageParser:
        return MessageParser(
            in_reasoning=self._in_reasoning,
            separates_reasoning=self._separates_reasoning,
            markup=self._markup,
            schemas=self._schemas,
        )

    def reasoning_tokens(self) -> ReasoningTokens:
        markup = self._markup
        openings = markup.openings if markup is not None and markup.ends_reasoning else ()
        return ReasoningTokens(self._token_bytes, (END_OF_THINK, *openings), in_reasoning=self._in_reasoning)


def ends_for_calls(parser: MessageParser, finish: Finish) -> bool:
    """Whether an answer, all of which was parsed, ended to have its calls made, none of them cut off."""
    return parser.has_calls and not parser.is_in_call and finish.reason is FinishReason.STOP


class ReasoningTokens:
    """Counts the tokens of an answer up to the one that ends its reasoning: with the first of ``ends``."""

    def __init__(self, token_bytes: TokenBytes, ends: Sequence[str], *, in_reasoning: bool) -> None:
        self._token_bytes = token_bytes
        self._ends = tuple(end.encode() for end in ends)
        self._num_kept_bytes = max(map(len, self._ends))
        self._seen = THINK.encode() if in_reasoning else b""
        """Of the answer, as if it began with what opens reasoning: its last bytes."""
        self._num_tokens = 0
        self._is_open: bool | None = True if in_reasoning else None
        """None until it is known whether the answer begins with reasoning."""

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_open is False:
                return
            self._num_tokens += 1
            self._seen += self._token_bytes.of(token_id)
            if self._is_open is None:
                self._seen = self._seen.lstrip()
                if self._seen.startswith(THINK.encode()):
                    self._is_open = True
                elif not THINK.encode().startswith(self._seen):
                    self._is_open, self._num_tokens = False, 0
            if self._is_open:
                self._is_open = not any(end in self._seen for end in self._ends)
                self._seen = self._seen[-self._num_kept_bytes :]

    @property
    def num_tokens(self) -> int:
        """0 while it is not known that the answer begins with reasoning."""
        return 0 if self._is_open is None else self._num_tokens
