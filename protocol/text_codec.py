"""The checkpoint's tokenizer and chat template: prompts to token ids, in a thread when they are long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jinja2

from protocol.chat_format import ToolMarkup, tool_markup, writes_own_chat
from protocol.deepseek_chat import encode_chat
from protocol.detokenizer import TokenBytes
from protocol.http_errors import ApiError, InvalidField
from protocol.http_prompts import ChatPrompt, Prompt

_INLINE_CHARS = 4096
"""Up to this length, encoding takes well under a millisecond and is done at once."""


class CheckpointError(ValueError):
    """The checkpoint directory lacks what the front needs."""


class TextCodec:
    """Encodes prompts. ``token_bytes`` decodes."""

    def __init__(self, tokenizer: Any, vocab_size: int, model_type: str = "") -> None:
        """``tokenizer``: a fast tokenizer of transformers; ``vocab_size``: rows of the model's embedding;
        ``model_type``: of config.json, the family of models that it belongs to.
        """
        self._tokenizer = tokenizer
        template = _template_text(tokenizer)
        self.tool_markup = tool_markup(template, model_type)
        """How answers call tools; None: in a way that is not known, and calls stay text."""
        self._writes_own_chat = writes_own_chat(template, model_type)
        self._takes_tools = template is None or "tools" in template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = vocab_size
        self.token_bytes = TokenBytes(self._backend)

    @classmethod
    def load(cls, model_path: Path) -> TextCodec:
        """Read the tokenizer from a local checkpoint. Raises CheckpointError or TokenizerUnsupported."""
        # Late, because it takes a second; and this class, because AutoTokenizer imports torch.
        from transformers import PreTrainedTokenizerFast

        config_path = model_path / "config.json"
        try:
            config = json.loads(config_path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{config_path}: cannot be read ({error})") from error
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model_path}: no usable tokenizer ({error})") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise CheckpointError(f"{model_path}: the tokenizer has no tokenizer.json")
        vocab_size = config.get("vocab_size")
        vocab_size = vocab_size if isinstance(vocab_size, int) else len(tokenizer)
        return cls(tokenizer, vocab_size, str(config.get("model_type", "")))

    async def encode(self, prompt: Prompt, name: str, max_tokens: int) -> tuple[int, ...]:
        """Token ids of ``prompt``, which errors call ``name``.

        Raises ApiError 400: nothing to encode, an id outside the vocabulary, a template that refuses the
        conversation, or a text that is longer than ``max_tokens`` whatever its tokens are. A prompt of which
        only its tokens show that it is too long is returned.
        """
        match prompt:
            case tuple():
                self._check_ids(prompt, name)
                return prompt
            case str() as text:
                add_special = True
            case ChatPrompt():
                text, add_special = self._render(prompt), False
        self._check_length(text, name, max_tokens)
        if len(text) <= _INLINE_CHARS:
            token_ids = self._encode(text, add_special)
        else:
            token_ids = await asyncio.to_thread(self._encode, text, add_special)
        if not token_ids:
            raise ApiError(400, f"{name}: the prompt has no tokens", param=name)
        return token_ids

    def _encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        # Unlike ``encode``, the batch call lets other threads run: streams go on meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return tuple(encoding.ids)

    def _check_ids(self, token_ids: tuple[int, ...], name: str) -> None:
        largest = max(token_ids)
        if largest >= self.vocab_size:
            index = token_ids.index(largest)
            raise InvalidField(
                f"{name}[{index}]", largest, f"is no token id: the vocabulary has {self.vocab_size}"
            )

    def _check_length(self, text: str, name: str, max_tokens: int) -> None:
        """Refuse a hopeless text before it costs seconds to encode."""
        if len(text) <= max_tokens or self._backend.normalizer is not None:
            return
        at_least = len(text.encode()) // self.token_bytes.max_token_bytes
        if at_least > max_tokens:
            raise ApiError(
                400,
                f"{name}: the prompt has at least {at_least} tokens, {max_tokens} are the most",
                param=name,
                code="context_length_exceeded",
            )

    def _render(self, prompt: ChatPrompt) -> str:
        tokenizer = self._tokenizer
        if prompt.tools and not self._takes_tools:
            raise ApiError(400, "tools: the model's chat template takes none", param="tools")
        messages = prompt.messages
        if self.tool_markup is ToolMarkup.DEEPSEEK_V31:
            messages = tuple(map(_with_written_arguments, messages))
        try:
            if self._writes_own_chat:
                return encode_chat(prompt, tokenizer.bos_token or "", tokenizer.eos_token or "")
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(prompt.tools) or None,
                    tokenize=False,
                    add_generation_prompt=not prompt.continue_final_message,
                    continue_final_message=prompt.continue_final_message,
                    **prompt.template_arguments,
                )
            )
        except RecursionError as error:
            raise ApiError(400, "messages, tools: nested too deeply to be written") from error
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error


def _template_text(tokenizer: Any) -> str | None:
    """All that a checkpoint's templates say; some have one for each use."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _with_written_arguments(message: dict[str, object]) -> dict[str, object]:
    """The arguments of its calls as JSON text, which DeepSeek-V3.1's template puts between marks as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = [
        call | {"function": call["function"] | {"arguments": _json(call["function"]["arguments"])}}
        for call in calls
    ]
    return message | {"tool_calls": written}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
