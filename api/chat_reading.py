"""How the text of a chat's answer is read: which markup of calls it has, and how much of it is reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from api.app import Work
from api.chat_format import END_OF_THINK, THINK
from api.chat_message import MessageParser
from api.detokenizer import TokenBytes
from api.prompts import ChatPrompt
from api.tool_markup import Markup
from api.tool_schemas import ToolSchemas
from service.engine_messages import unpack_token_ids

_THINK_TOKENS = 16
"""Of the end of a prompt: enough for THINK a byte a token, and white space behind it."""


def parser_maker(work: Work, token_bytes: TokenBytes, markup: Markup | None) -> Callable[[], MessageParser]:
    """What makes a parser for each sample of a chat.

    ``markup``: how the model writes tool calls; None where that is not known, and they stay text.
    """
    (prompt,) = work.request.prompts
    assert isinstance(prompt, ChatPrompt)
    tools = prompt.all_tools
    schemas = ToolSchemas(tools)
    in_reasoning = begins_in_reasoning(work, token_bytes)

    def make() -> MessageParser:
        return MessageParser(
            in_reasoning=in_reasoning,
            separates_reasoning=prompt.separate_reasoning,
            markup=markup if tools else None,
            schemas=schemas,
        )

    return make


def begins_in_reasoning(work: Work, token_bytes: TokenBytes) -> bool:
    """Whether the prompt ends with what opens reasoning."""
    last_tokens = unpack_token_ids(work.samples[0].prompt)[-_THINK_TOKENS:].tolist()
    return b"".join(map(token_bytes.of, last_tokens)).rstrip().endswith(THINK.encode())


class ReasoningTokens:
    """Counts the tokens of an answer up to the one that ends its reasoning."""

    def __init__(self, token_bytes: TokenBytes, *, in_reasoning: bool) -> None:
        self._token_bytes = token_bytes
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
                self._is_open = END_OF_THINK.encode() not in self._seen
                self._seen = self._seen[-len(END_OF_THINK) :]

    @property
    def num_tokens(self) -> int:
        """0 while it is not known that the answer begins with reasoning."""
        return 0 if self._is_open is None else self._num_tokens
