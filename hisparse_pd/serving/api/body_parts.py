"""Types with bounds for the fields of bodies, and objects that the bodies of several APIs share.

``bodies.py`` and the ``*_parts.py`` beside it declare fields with them. The annotations are those of
``declared.py``: ``rule`` sets the text of errors, ``AS_SPELLED`` keeps numbers as they are written, and
``unsupported`` refuses all values but those in its brackets.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from hisparse_pd.base.vocabulary import MAX_LOGIT_BIAS
from hisparse_pd.protocol.prompt_scores import MAX_LOGPROBS
from hisparse_pd.serving.api.declared import (
    AS_SPELLED,
    declared,
    rule,
    tagged,
    unsupported,
)
from hisparse_pd.serving.api.raw_json import MAX_FIELD_BYTES

MAX_SAMPLES = 4096
"""Most samples of one request: prompts times n."""
MAX_SAMPLES_PER_PROMPT = 128
MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Most parts or blocks of a message."""
MAX_TOOLS = 256
MAX_CALLS = 256
MAX_TOKEN_ID = 2**31 - 1
MAX_ROOM = 2**63 - 1
MAX_RECORD_BLOCKS = 256
"""Most blocks of journal records in a body: as many of 64 KiB as MAX_BODY_BYTES (``settings.py``) holds."""

MAX_TOKENS = 2**31 - 1

Name = Annotated[str, Meta(max_length=1024)]
NeededName = Annotated[str, Meta(min_length=1, max_length=256)]
"""Name or id of a tool or a call."""
Effort = Annotated[str, Meta(max_length=64)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
NumSamples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES_PER_PROMPT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=256)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
_TOKEN_KEY = "^(0|[1-9][0-9]{0,9})$"
Biases = Annotated[
    dict[TokenId, Bias],
    Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": _TOKEN_KEY}}),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
IsolationKey = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        description="KV is shared only among requests with the same cache_salt and extra_key.",
    ),
]
IsolationKeys = IsolationKey | Annotated[list[IsolationKey | None], Meta(max_length=MAX_PROMPTS)]
"""One key for all prompts of a request, or one a prompt."""
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Port = Annotated[int, Meta(ge=1, le=65535)]
JsonSchema = dict[str, Any] | Annotated[str, Meta(min_length=1, max_length=128 << 10)]
A_SCHEMA = rule("must be a JSON schema, an object or its text of 1 to 131072 characters")
RegexText = Annotated[str, Meta(min_length=1, max_length=16 << 10)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=64 << 10)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=1024)]
ArgumentsText = Annotated[str, Meta(max_length=MAX_FIELD_BYTES)]

FLAG = rule('must be true, false or "auto"')
HOST = rule("must be a host name or an address")
HOSTED_TOOL = (
    "^(advisor|code_execution|code_interpreter|file_search|image_generation|mcp|programmatic_tool_calling"
    "|tool_search|web_fetch|web_search)(_[a-z0-9_]{1,64})?$"
)
"""Pattern of the types of tools that a server of the API's vendor runs, with or without a version."""


# Public routers in front of this service pass ``metadata`` and ``custom_labels`` on, and drop fields at the
# top level that they do not know.
@declared
class Labels:
    """Fields that public routers pass on in labels, and drop at the top level."""

    hisparse: Annotated[bool | Literal["true", "false", "auto"] | None, FLAG]
    cache_salt: IsolationKey | None
    extra_key: IsolationKey | None


@declared
class JournalHead:
    """The head of a router's journal: what lets an answer go on at another node (``request_journal.py``)."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    created: Annotated[int, Meta(ge=0, le=2**53)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    may_move: bool | None
    num_resumes: Count | None


@declared
class StructuredOutputs:
    """The format of an answer, in vLLM's fields."""

    json: Annotated[JsonSchema | None, A_SCHEMA, AS_SPELLED]
    regex: RegexText | None
    choice: Choices | None
    grammar: GrammarText | None
    json_object: bool | None
    structural_tag: Annotated[Raw | None, unsupported()]
    # False is taken, since it asks for nothing.
    disable_any_whitespace: Annotated[Raw | None, unsupported(False)]
    disable_additional_properties: Annotated[Raw | None, unsupported(False)]
    whitespace_pattern: Annotated[Raw | None, unsupported()]


@tagged("type", "text")
class TextBlock:
    text: str


@tagged("type", "refusal")
class Refusal:
    """Refusing text of the assistant."""

    refusal: str


@declared
class HostedTool:
    """A tool that a server of the API's vendor runs. It is left out beside other tools, and refused alone."""

    type: Annotated[str, Meta(pattern=HOSTED_TOOL)]


@declared
class ItemKind:
    """The fields that tell the kind of an item of ``input`` or of a tool. An item may lack its type."""

    type: str | None
    role: str | None
