"""Values of the sampling parameters that a request leaves out: the checkpoint's, or OpenAI's.

A front reads them once when it starts (``app.py``); ``sampling_options.py`` applies each request's own
values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.protocol.decoding import decode_json
from hisparse_pd.serving.api.body_parts import MAX_TOKENS
from hisparse_pd.serving.api.declared import declared
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.http.http_errors import ApiError

FILE_NAME = "generation_config.json"


@declared
class _GenerationConfig:
    """The fields of generation_config.json that are used.

    Each may be missing or null (``declared``), and is then None.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] | None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters, by default OpenAI's; ``top_k`` 0 means all tokens.

    All decode nodes must have the same defaults, since a stream may go on at another node.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, settings: DecodeSettings) -> SamplingDefaults:
        """Return the defaults of a node with these settings. Raises CheckpointError."""
        return cls() if settings.sampling_defaults == "openai" else cls.of_checkpoint(settings.model_path)

    @classmethod
    def of_checkpoint(cls, model_path: Path) -> SamplingDefaults:
        """Return OpenAI's defaults changed by generation_config.json. Raises CheckpointError for a bad one.

        ``do_sample`` is ignored, as by SGLang and vLLM: a node draws greedily at temperature 0 only.
        """
        path = model_path / FILE_NAME
        try:
            content = path.read_bytes()
            # Decoded without types first, for errors that say that the file is no JSON, or no object.
            values = decode_json(content)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: holds {type(values).__name__}, expected a JSON object")
        try:
            given = decode(_GenerationConfig, content)
        except ApiError as error:
            raise CheckpointError(
                f"{path}: {error}; correct it, or start all decode nodes with --sampling-defaults openai"
            ) from error
        return cls().changed_by(given)

    def changed_by(self, given: Any) -> SamplingDefaults:
        """Return these parameters, replaced by those attributes of ``given`` that are not None.

        ``given`` has an attribute for each parameter: a ``_GenerationConfig``, or a request's fields
        (``sampling_options.py``). Its ``top_k`` may be -1, which means all tokens, as 0 does here.
        """
        changes = {name: value for name in asdict(self) if (value := getattr(given, name)) is not None}
        if "top_k" in changes:
            changes["top_k"] = max(changes["top_k"], 0)
        return replace(self, **changes)

    def __str__(self) -> str:
        """Return what differs from OpenAI's, for the log; empty if nothing does."""
        ours, openai = asdict(self), asdict(SamplingDefaults())
        return ", ".join(f"{name} {value!r}" for name, value in ours.items() if value != openai[name])
