"""Encodes prompts with the checkpoint's tokenizer and chat template, long ones in a thread.

Each front of a decode node loads one ``TextCodec``. ``requests.py`` encodes the prompts of requests with it
and checks their grammars, ``tokens.py`` answers questions about tokens, and answers are detokenized by its
``token_bytes``. It knows how the checkpoint writes chats (``chat_format``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.engine.messages import pack_token_ids, unpack_token_ids
from hisparse_pd.protocol.messages import TOKEN_BYTES
from hisparse_pd.serving.api.chat_format import (
    THINK,
    THINK_MARKS,
    ChatFormat,
    ThinkMarks,
    think_marks,
    tool_markup,
)
from hisparse_pd.serving.api.client_text import ClientText, StandIns, TemplateInput
from hisparse_pd.serving.api.detokenizer import TokenBytes
from hisparse_pd.serving.api.grammar_checks import GrammarChecks
from hisparse_pd.serving.api.prompts import ChatPrompt, Prompt
from hisparse_pd.serving.api.template_fit import TemplateFit
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import off_loop

_INLINE_CHARS = 4096
"""Longest text that is encoded on the event loop, which takes well under a millisecond."""

_INLINE_TOKENS = 4096
"""Most tokens that are decoded on the event loop, or in a thread at once."""

_WITHOUT_TEMPLATE = "deepseek_v32"
"""Name of the family of models that is published without a chat template, and of the file with ours."""

_BATCH_CHARS = 1 << 18
_BATCH_PROMPTS = 64
"""Most characters and prompts of a batch; a longer prompt is a batch of its own."""


class TextCodec:
    """The checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        model_type: str = "",
        grammar_checks: GrammarChecks | None = None,
        first_token_id: int | None = None,
        *,
        clients_write_tokens: bool = False,
    ) -> None:
        """``tokenizer`` is a fast tokenizer of transformers, ``vocab_size`` the number of rows of the model's
        embedding, and ``model_type`` the family of models in config.json. ``first_token_id`` begins a text
        with special tokens, even if the tokenizer puts none before it. With ``clients_write_tokens`` any
        spelling of a control token in a chat is that token, whoever wrote it.
        """
        self.tokenizer = tokenizer
        self._first_token = b"" if first_token_id is None else pack_token_ids([first_token_id])
        self.grammar_checks = grammar_checks
        self._has_our_template = tokenizer.chat_template is None and model_type == _WITHOUT_TEMPLATE
        if self._has_our_template:
            tokenizer.chat_template = (
                Path(__file__).with_name(f"{_WITHOUT_TEMPLATE}.jinja").read_text("utf-8")
            )
        template = _template_text(tokenizer)
        # What the template takes and writes.
        markup, think = tool_markup(template, model_type), think_marks(template)
        self._takes_tools = template is None or "tools" in template
        self._fit = TemplateFit(template, markup)
        # The tokenizer, alone and with the clients' strings kept apart.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        # Marks that the template itself looks for in earlier answers get no stand-ins.
        read_marks = _marks_read_by_template(tokenizer, template or "")
        self._client_text = (
            None if clients_write_tokens else ClientText(self.backend, template or "", read_marks)
        )
        self.vocab_size = vocab_size
        self.token_bytes = TokenBytes(self.backend)
        added = self.backend.get_added_tokens_decoder()
        self.chat_format = ChatFormat(
            markup,
            think is not None,
            {token.content: token_id for token_id, token in added.items()},
            think or THINK,
        )

    @classmethod
    def load(cls, model_path: Path, *, clients_write_tokens: bool = False) -> TextCodec:
        """Read the tokenizer from a local checkpoint. Raises CheckpointError."""
        # Imported here because that takes a second. AutoTokenizer would import torch.
        from transformers import PreTrainedTokenizerFast

        config = _json_object(model_path / "config.json")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{model_path}: no usable tokenizer ({error!r})") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise CheckpointError(f"{model_path}: the tokenizer has no tokenizer.json")
        vocab_size = config.get("vocab_size")
        vocab_size = vocab_size if isinstance(vocab_size, int) else len(tokenizer)
        eos_token_id = tokenizer.eos_token_id
        first_token_id = _first_token_id(model_path, tokenizer)
        checks = GrammarChecks(
            model_path / "tokenizer.json", vocab_size, 0 if eos_token_id is None else eos_token_id
        )
        return cls(
            tokenizer,
            vocab_size,
            str(config.get("model_type", "")),
            checks,
            first_token_id,
            clients_write_tokens=clients_write_tokens,
        )

    async def encode(
        self,
        prompts: Sequence[Prompt],
        names: Sequence[str],
        max_tokens: int,
        *,
        add_special: bool | None = None,
    ) -> tuple[bytes, ...]:
        """Return the token ids of each prompt, packed (``pack_token_ids``). ``names`` are for errors.

        ``add_special`` puts the tokenizer's special tokens round a text; None does so unless a template wrote
        the text. Raises ApiError 400 where a text or a chat has no tokens, an id is outside the vocabulary,
        the template refuses the conversation, or a text must have more than ``max_tokens``.
        """
        if sum(map(_num_chars, prompts)) <= _INLINE_CHARS:
            return tuple(self._encode(prompts, names, max_tokens, add_special))
        packed: list[bytes] = []
        for batch in _batches(prompts):
            batch_names = names[len(packed) : len(packed) + len(batch)]
            packed += await off_loop(self._encode, batch, batch_names, max_tokens, add_special)
        return tuple(packed)

    async def check_grammar(self, text: str, field: str) -> None:
        """Check a grammar (``GrammarChecks.check``). Raises ApiError."""
        if self.grammar_checks is None:
            raise FieldRefused(field, "this model's tokenizer takes no grammars")
        await self.grammar_checks.check(text, field)

    @property
    def description(self) -> dict[str, object]:
        """Special tokens and chat template, by their names in tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        shown = {name: getattr(self.tokenizer, name) for name in names}
        return {"tokenizer_class": type(self.tokenizer).__name__, **shown}

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the tokens as the vocabulary spells them, with None for an id that only pads it."""
        return [self.backend.id_to_token(token_id) for token_id in token_ids]

    async def text_of(self, packed: bytes) -> str:
        """Return the text of packed token ids, special ones included."""
        token_ids = unpack_token_ids(packed)
        if len(token_ids) <= _INLINE_TOKENS:
            return self.bytes_of(token_ids.tolist()).decode(errors="replace")
        parts = [
            await off_loop(self.bytes_of, token_ids[start : start + _INLINE_TOKENS].tolist())
            for start in range(0, len(token_ids), _INLINE_TOKENS)
        ]
        return b"".join(parts).decode(errors="replace")

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of the tokens, special ones included."""
        return b"".join(map(self.token_bytes.of, token_ids))

    def check_ids(self, prompt: bytes, name: str) -> None:
        """Check packed token ids. Raises InvalidField for an id outside the vocabulary."""
        token_ids = unpack_token_ids(prompt)
        if not len(token_ids):
            return
        index = int(token_ids.argmax())
        if (largest := int(token_ids[index])) >= self.vocab_size:
            raise InvalidField(
                f"{name}[{index}]", largest, f"is no token id: the vocabulary has {self.vocab_size}"
            )

    def _encode(
        self, prompts: Sequence[Prompt], names: Sequence[str], max_tokens: int, add_special: bool | None
    ) -> list[bytes]:
        """Encode prompts, either all of them token ids, all texts or all chats, as ``encode`` says."""
        texts: list[str] = []
        is_chat = False
        for prompt, name in zip(prompts, names, strict=True):
            match prompt:
                case bytes():
                    self.check_ids(prompt, name)
                case str() as text:
                    self._check_length(text, name, max_tokens)
                    texts.append(text)
                case ChatPrompt():
                    texts.append(self._render(prompt, name, max_tokens))
                    is_chat = True
        if not texts:
            return [prompt for prompt in prompts if isinstance(prompt, bytes)]
        if add_special is None:
            add_special = not is_chat
        packed = list(map(pack_token_ids, self._encode_texts(texts, is_chat, add_special)))
        if add_special:
            first = self._first_token
            packed = [ids if ids.startswith(first) else first + ids for ids in packed]
        for prompt_ids, name in zip(packed, names, strict=True):
            if not prompt_ids:
                raise FieldRefused(name, "the prompt has no tokens")
        return packed

    def _encode_texts(self, texts: list[str], is_chat: bool, add_special: bool) -> list[list[int]]:
        # Unlike the tokenizer's ``encode``, batch calls release the interpreter: streams go on meanwhile.
        if is_chat and self._client_text is not None:
            return self._client_text.encode(texts, add_special=add_special)
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special)
        return [encoding.ids for encoding in encodings]

    def _check_length(self, text: str, name: str, max_tokens: int) -> None:
        """Raise FieldRefused for a text that cannot fit, before it takes seconds to encode. Nothing is known
        where a normalizer may shorten the text."""
        if len(text) <= max_tokens or self.backend.normalizer is not None:
            return
        at_least = len(text.encode()) // self.token_bytes.max_token_bytes
        if at_least > max_tokens:
            raise FieldRefused(
                name,
                f"the prompt has at least {at_least} tokens; this model's maximum context length is "
                f"{max_tokens} tokens here",
                code="context_length_exceeded",
            )

    def _render(self, prompt: ChatPrompt, name: str, max_tokens: int) -> str:
        """Return the chat as the template writes it, for ``_encode_texts``. Raises ApiError 400.

        Unless clients may write tokens, the template gets stand-ins where their strings spell control tokens
        (``ClientText``).
        """
        if prompt.tools and not self._takes_tools:
            raise FieldRefused("tools", "the model's chat template takes none")
        prompt = self._fit.fit(prompt)
        if self._has_our_template and not (prompt.add_generation_prompt or prompt.continue_final_message):
            raise FieldRefused(
                "add_generation_prompt",
                "the model's chat template always ends with the beginning of an answer",
            )
        stand_ins: StandIns | None = None  # those of the request, as soon as it has some
        try:
            if self._client_text is None:
                given = TemplateInput(list(prompt.messages), list(prompt.tools), prompt.template_arguments)
            else:
                given = self._client_text.template_input(prompt)
            stand_ins = given.stand_ins
            chat = str(
                self.tokenizer.apply_chat_template(
                    given.messages,
                    tools=given.tools or None,
                    tokenize=False,
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    **given.arguments,
                )
            )
        except RecursionError as error:
            raise ApiError(400, "messages, tools: nested too deeply to be written") from error
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            why = str(error) if stand_ins is None else stand_ins.restore(str(error))
            raise FieldRefused("messages", f"the model's chat template refuses them: {why}") from error
        # The length is that of the client's text. What is encoded has breaks round stand-ins' characters, so
        # that these form no control tokens.
        self._check_length(chat if stand_ins is None else stand_ins.restore(chat), name, max_tokens)
        return chat if self._client_text is None else self._client_text.with_breaks(chat, stand_ins)


def _json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of the checkpoint. Raises CheckpointError."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file; --model-path needs a Hugging Face checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _first_token_id(model_path: Path, tokenizer: Any) -> int | None:
    """Return the BOS token's id if tokenizer_config.json has ``add_bos_token``: transformers leaves it to the
    post-processor of tokenizer.json, and DeepSeek's tokenizers have none. Raises CheckpointError.
    """
    path = model_path / "tokenizer_config.json"
    if not path.exists() or _json_object(path).get("add_bos_token") is not True:
        return None
    bos_token_id: int | None = tokenizer.bos_token_id
    if bos_token_id is None:
        raise CheckpointError(f"{path}: add_bos_token is true, and there is no bos_token")
    return bos_token_id


def _template_text(tokenizer: Any) -> str | None:
    """Return the text of all the checkpoint's templates; some checkpoints have one for each use."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _marks_read_by_template(tokenizer: Any, template: str) -> ThinkMarks | None:
    """Return the marks of reasoning that the template looks for in earlier answers; None for none.

    They are found by a trial: a template that looks for the mark writes an answer with it otherwise than as
    it stands.
    """

    def chat(answer: str) -> str:
        turns = ("user", "a question"), ("assistant", answer), ("user", "a question")
        messages = [{"role": role, "content": text} for role, text in turns]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    plain_answer = "before behind"
    for marks in THINK_MARKS:
        if marks.closing not in template:
            continue
        answer = f"before{marks.closing}behind"
        with suppress(jinja2.TemplateError, ValueError, TypeError, LookupError):
            if chat(answer) != chat(plain_answer).replace(plain_answer, answer):
                return marks
    return None


def _batches(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    """Yield the prompts in order, in batches of bounded size."""
    start = num_chars = 0
    for index, prompt in enumerate(prompts):
        num_prompt_chars = _num_chars(prompt)
        is_full = index - start == _BATCH_PROMPTS or num_chars + num_prompt_chars > _BATCH_CHARS
        if index > start and is_full:
            yield prompts[start:index]
            start, num_chars = index, 0
        num_chars += num_prompt_chars
    yield prompts[start:]


def _num_chars(prompt: Prompt) -> int:
    """Return a prompt's length for the sizes of batches: characters, plus more for a conversation's template.

    Token ids are only checked, so 1,024 of them count as one character.
    """
    match prompt:
        case bytes():
            return len(prompt) // (1024 * TOKEN_BYTES) + 1
        case str():
            return len(prompt)
        case ChatPrompt():
            return prompt.num_chars
