"""A codec that keeps prompts as text, to show what the model's template makes of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.api.prompts import Prompt
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.api.text_codec import TextCodec
from tests.unit.api.tiny_tokenizer import make_tokenizer

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}"
    "<{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if thinking and enable_thinking %}<think>\n{% endif %}{% if reasoning_effort %}"
    "({{ reasoning_effort }}){% endif %}{% endif %}"
)


class RecordingCodec(TextCodec):
    """Keeps the prompts of the last request: the engine of a decode node is not sent them."""

    encoded: tuple[bytes, ...] = ()

    @classmethod
    def make(cls) -> Self:
        """Make a codec with GLM's markup of calls."""
        tokenizer = make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        return cls(tokenizer, len(tokenizer), "glm_moe_dsa")

    async def encode(
        self, prompts: Sequence[Prompt], names: Sequence[str], max_tokens: int, **options: Any
    ) -> tuple[bytes, ...]:
        self.encoded = await super().encode(prompts, names, max_tokens, **options)
        return self.encoded

    @property
    def prompt(self) -> str:
        (packed,) = self.encoded
        return str(self.tokenizer.decode(unpack_token_ids(packed).tolist()))

    async def written(self, request: ApiRequest) -> str:
        """Return what the model is shown of the conversation."""
        await self.encode(request.prompts, ["prompt"], 10_000_000)
        return self.prompt
