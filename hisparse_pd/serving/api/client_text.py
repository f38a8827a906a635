"""Keeps clients from writing control tokens into a chat: their spellings in clients' strings stay plain text.

``TextCodec`` passes the template what ``ClientText.template_input`` returns, then calls ``with_breaks`` on
the template's output and ``encode`` on that. Where a client's string spells a control token, the template
gets a stand-in for its first character: one character that the request has nowhere else, that trimming and
slicing leave alone, and that JSON writes as itself or as one escape (``_in_ascii``). In the chat that the
template has written, each stand-in becomes its character again, between two breaks. The tokenizer finds no
control token across a break. Then it drops the breaks, and only then normalizes and splits the text between
control tokens, so this text gets the tokens of plain text.
With ``|`` for a break, a client's ``<eos>`` reaches the template as ``㐀eos>``, the tokenizer as ``|<|eos>``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.serving.api.chat_format import ThinkMarks
from hisparse_pd.serving.api.control_tokens import ControlTokens, is_control_token
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.http.http_errors import ApiError

logger = logging.getLogger(__name__)

_BREAK, _ESCAPE = "\U0010ffff", "\U0010fffe"
"""Characters that no text should have; a chat that has them is escaped (``_ESCAPED``)."""
_ESCAPED = {_ESCAPE: _ESCAPE + "e", _BREAK: _ESCAPE + "b"}
"""Replacements for escapes and breaks that the chat itself contains, in the order of replacing."""
_FIRST_SINGLE = 0xF0000
"""Breaks around a control token of one character do not hide it. A client's character that is such a token is
therefore written as an escape and a code point from this one on (``_escaped_singles``)."""

_STAND_INS = range(0x3400, 0x4DC0)
"""Code points of stand-ins: rare ideographs, which count as letters and which Python prints unescaped."""
_STAND_IN_CHARS = re.compile(r"[\u3400-\u4dbf]")
_STAND_IN_ESCAPES = re.compile(r"\\u(?:3[4-9a-f]|4[0-9a-d])[0-9a-f]{2}")
"""Patterns for stand-ins, as characters and as escapes in ASCII JSON. One for both would take longer."""


class StandIns:
    """The stand-ins of one request, by the character that each stands for, and the changed strings."""

    def __init__(self, places: Mapping[str, Sequence[int]], strings: Iterable[str], template: str) -> None:
        """``places`` has, for each string to change, the indexes of the characters to replace. Raises
        ApiError 400 if ``strings`` and ``template`` contain so many of _STAND_INS that too few are free."""
        characters = sorted({text[place] for text, found in places.items() for place in found})
        taken = {found for text in (*strings, template) for found in _stand_ins_in(text)}
        free = (code for code in _STAND_INS if chr(code) not in taken and _in_ascii(code) not in taken)
        self._codes = dict(zip(characters, free, strict=False))
        if len(self._codes) < len(characters):
            raise ApiError(
                400,
                "messages, tools: spell control tokens and have nearly all characters from U+3400 to U+4DBF, "
                "of which some must be unused, to mark the spellings as text; leave some of them out",
                param="messages",
            )
        self._changed = {text: self.insert(text, found) for text, found in places.items()}
        """The changed strings, with stand-ins, by the client's string."""

    def insert(self, text: str, places: Iterable[int]) -> str:
        """Return ``text`` with stand-ins at ``places``."""
        parts: list[str] = []
        end = 0
        for place in sorted(set(places)):
            parts += (text[end:place], chr(self._codes[text[place]]))
            end = place + 1
        return "".join((*parts, text[end:]))

    def replace_in(self, value: Any) -> Any:
        """Return a JSON value with stand-ins in its strings and names, as the template gets it."""
        match value:
            case str():
                return self._changed.get(value, value)
            case dict():
                return {self._changed.get(name, name): self.replace_in(item) for name, item in value.items()}
            case list() | tuple():
                return list(map(self.replace_in, value))
            case _:
                return value

    def restore(self, text: str, write: Callable[[str], str] = str) -> str:
        """Return ``text`` with each stand-in replaced by its character, as ``write`` writes the character: by
        default as it is, for errors and lengths, which are about the client's text."""
        for character, code in self._codes.items():
            for stand_in in (chr(code), _in_ascii(code)):
                text = text.replace(stand_in, write(character))
        return text


def _stand_ins_in(text: str) -> list[str]:
    characters = [] if text.isascii() else _STAND_IN_CHARS.findall(text)
    return characters + _STAND_IN_ESCAPES.findall(text)


def _in_ascii(code: int) -> str:
    return f"\\u{code:04x}"


class TemplateInput(NamedTuple):
    """A conversation as the template gets it, with stand-ins in its strings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    arguments: dict[str, Any]
    stand_ins: StandIns | None = None
    """None if no string needs one."""


class ClientText:
    """Keeps clients' strings apart from what the template writes, and encodes chats with both."""

    def __init__(self, backend: Any, template: str, read_marks: ThinkMarks | None = None) -> None:
        """``backend`` is the checkpoint's tokenizer, whose vocabulary is shared. ``read_marks`` are the marks
        that the template looks for to find the reasoning in an answer's text. Raises CheckpointError if a new
        tokenizer would give added tokens other ids.
        """
        self._template, self._read_marks = template, read_marks
        added = backend.get_added_tokens_decoder()
        controls = [token for token in added.values() if is_control_token(token, template)]
        self._controls = ControlTokens((token.content for token in controls), template)
        singles = [text for text in self._controls.spellings if len(text) == 1]
        self._escaped_singles = {
            text: _ESCAPE + chr(_FIRST_SINGLE + index) for index, text in enumerate(singles)
        }
        """Escapes of control tokens of one character, by the token."""
        self._backend = self._tokenizer_like(backend)
        self._split_control_words()

    def _tokenizer_like(self, backend: Any) -> Any:
        """Return a tokenizer like ``backend`` that finds control tokens before the text is normalized."""
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.normalizers import Replace, Sequence

        ours = Tokenizer(backend.model)
        steps = [Replace(_BREAK, "")]
        steps += [Replace(escaped, text) for text, escaped in self._escaped_singles.items()]
        steps += [Replace(escaped, text) for text, escaped in reversed(_ESCAPED.items())]
        ours.normalizer = Sequence(
            [*steps, *([backend.normalizer] if backend.normalizer is not None else [])]
        )
        if backend.pre_tokenizer is not None:
            ours.pre_tokenizer = backend.pre_tokenizer
        if backend.post_processor is not None:
            ours.post_processor = backend.post_processor
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            is_control = token.content in self._controls.spellings
            ours.add_tokens(
                [
                    AddedToken(
                        token.content,
                        single_word=token.single_word,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized and not is_control,
                        special=token.special,
                    )
                ]
            )
            if (given := ours.token_to_id(token.content)) != token_id:
                raise CheckpointError(
                    f"tokenizer.json: the added token {token.content!r} has id {token_id}, and {given} is "
                    "the next one; number added tokens without gaps behind the vocabulary"
                )
        return ours

    def _split_control_words(self) -> None:
        """Make the tokenizer split control tokens' spellings that its vocabulary also has as ordinary words.

        Plain text with such a spelling would get the control token's id otherwise. The split is after the
        first character. Spellings that get their id even then are logged.
        """
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import Sequence, Split

        if words := self._controls_within_text():
            after_firsts = "|".join(f"(?<={_literal(word[0])})(?={_literal(word[1:])})" for word in words)
            split = Split(Regex(after_firsts), "isolated")
            others = [] if self._backend.pre_tokenizer is None else [self._backend.pre_tokenizer]
            self._backend.pre_tokenizer = Sequence([split, *others])
        if words := self._controls_within_text():
            logger.warning("control tokens that clients' text can still contain: %s", words)

    def _controls_within_text(self) -> list[str]:
        """Return the control tokens whose spelling is encoded to their id even when it is plain text."""
        found = []
        for text in self._controls.spellings:
            as_text = self._backend.encode(self._as_text(text[0]) + text[1:], add_special_tokens=False)
            if self._backend.token_to_id(text) in as_text.ids:
                found.append(text)
        return found

    def template_input(self, prompt: ChatPrompt) -> TemplateInput:
        """Return ``prompt`` as the template gets it. Raises ApiError 400."""
        messages, tools, arguments = prompt.messages, prompt.tools, prompt.template_arguments
        strings = set(_strings([*map(_client_values, messages), *tools, *arguments.values()]))
        places = {text: found for text in strings if (found := self._controls.places(text))}
        if not places:
            return TemplateInput(list(messages), list(tools), arguments)
        stand_ins = StandIns(places, strings, self._template)
        return TemplateInput(
            [self._with_stand_ins(message, places, stand_ins) for message in messages],
            stand_ins.replace_in(tools),
            {name: stand_ins.replace_in(value) for name, value in arguments.items()},
            stand_ins,
        )

    def _with_stand_ins(
        self, message: dict[str, Any], places: Mapping[str, Sequence[int]], stand_ins: StandIns
    ) -> dict[str, Any]:
        """Return ``message`` with stand-ins in all its strings but the role.

        In an earlier answer, the marks around the reasoning stay as they are if the template looks for them
        there.
        """
        changed = {name: stand_ins.replace_in(value) for name, value in message.items()} | {
            "role": message["role"]
        }
        content = message["content"]
        may_have_reasoning = message["role"] == "assistant" and "reasoning_content" not in message
        if may_have_reasoning and content in places:
            kept = self._read_places(content)
            changed["content"] = stand_ins.insert(content, (at for at in places[content] if at not in kept))
        return changed

    def _read_places(self, answer: str) -> set[int]:
        """Return the indexes of the marks between which the template finds the answer's reasoning."""
        if self._read_marks is None or (end := answer.find(self._read_marks.closing)) < 0:
            return set()
        start = len(answer) - len(answer.lstrip())
        return {start, end} if answer.startswith(self._read_marks.opening, start) else {end}

    def with_breaks(self, chat: str, stand_ins: StandIns | None) -> str:
        """Return ``chat``, which the template has written, with each stand-in's character between breaks."""
        for text, escaped in _ESCAPED.items():
            chat = chat.replace(text, escaped)
        return chat if stand_ins is None else stand_ins.restore(chat, self._as_text)

    def _as_text(self, character: str) -> str:
        """Return ``character`` written so that the tokenizer finds no control token in or across it."""
        return self._escaped_singles.get(character) or _BREAK + character + _BREAK

    def encode(self, chats: Sequence[str], *, add_special: bool) -> list[list[int]]:
        """Return the token ids of each of ``chats``, as ``with_breaks`` returns them."""
        encodings = self._backend.encode_batch_fast(list(chats), add_special_tokens=add_special)
        return [encoding.ids for encoding in encodings]


def _literal(text: str) -> str:
    """Return a pattern for ``text`` in the syntax of tokenizers' ``Regex``."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _client_values(message: Mapping[str, object]) -> list[object]:
    return [value for name, value in message.items() if name != "role"]


def _strings(values: list[object]) -> Iterator[str]:
    """Yield all strings of JSON values, names included."""
    while values:
        match values.pop():
            case str() as text:
                yield text
            case dict() as members:
                yield from members
                values += members.values()
            case list() | tuple() as items:
                values += items
