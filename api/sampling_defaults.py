"""What sampling is of a request that does not say: the checkpoint's, or OpenAI's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from api.json_fields import JsonFields
from service.http_errors import InvalidField
from service.settings import NodeSettings
from vocabulary import CheckpointError

FILE_NAME = "generation_config.json"

_MAX_TEMPERATURE = 100.0
_MAX_TOP_K = 2**31 - 1
_MAX_REPETITION_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """As built, OpenAI's. ``top_k``: 0 for all tokens.

    Both nodes must have the same: the prefill node draws an answer's first token, the decode node the others.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, settings: NodeSettings) -> SamplingDefaults:
        """Those of a node with these settings. Raises CheckpointError."""
        return cls() if settings.sampling_defaults == "openai" else cls.of_checkpoint(settings.model_path)

    @classmethod
    def of_checkpoint(cls, model_path: Path) -> SamplingDefaults:
        """OpenAI's, but for what generation_config.json names. Raises CheckpointError for one that is no use.

        ``do_sample`` is not looked at: like SGLang and vLLM, which do not know it either, a node draws
        greedily at temperature 0 only.
        """
        path = model_path / FILE_NAME
        try:
            values = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: holds {type(values).__name__}, expected a JSON object")
        fields = JsonFields(values)
        try:
            temperature = fields.number("temperature", 0, _MAX_TEMPERATURE)
            top_p = fields.number("top_p", 0, 1, above_low=True)
            top_k = fields.integer("top_k", -1, _MAX_TOP_K)
            min_p = fields.number("min_p", 0, 1)
            repetition_penalty = fields.number(
                "repetition_penalty", 0, _MAX_REPETITION_PENALTY, above_low=True
            )
        except InvalidField as error:
            raise CheckpointError(
                f"{path}: {error}; correct it, or start all nodes with --sampling-defaults openai"
            ) from error
        return cls(
            1.0 if temperature is None else temperature,
            1.0 if top_p is None else top_p,
            max(top_k or 0, 0),
            min_p or 0.0,
            1.0 if repetition_penalty is None else repetition_penalty,
        )

    def __str__(self) -> str:
        """What differs from OpenAI's, as nodes compare it; empty for no difference."""
        ours, openai = asdict(self), asdict(SamplingDefaults())
        return ", ".join(f"{name} {value!r}" for name, value in ours.items() if value != openai[name])
