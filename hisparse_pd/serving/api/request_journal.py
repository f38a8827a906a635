"""The journal of a stream that may go on at another node, as its router sends it with the request.

Tokens depend on the request alone, so an answer goes on elsewhere with the tokens that it would have had. The
router sends what must not be drawn again: the seed, and what the answer's ids are made from. It also keeps a
record of each engine message of the answer. When the node is lost, another one gets the request with all
records, feeds them to its dialect like engine messages, and so arrives at the events that the client has.
``schemas.py`` reads the journal, ``requests.py`` plans samples behind their resumed output, and
``answering.py`` replays and writes records.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw

from hisparse_pd.base.vocabulary import FinishReason, TokenLogprob
from hisparse_pd.engine.messages import RequestStats, Tokens
from hisparse_pd.serving.api.bodies import GeneratingBody
from hisparse_pd.serving.api.body_parts import MAX_RECORD_BLOCKS, TokenId
from hisparse_pd.serving.api.raw_json import check_size, not_json, split
from hisparse_pd.serving.http.http_errors import FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import taking_interpreter


@dataclass(frozen=True, slots=True)
class Identity:
    """When an answer began, and the key from which its ids are made."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time, in seconds."""

    def name(self, prefix: str, num_bytes: int, *place: int) -> str:
        """Return an id: ``prefix`` and hexadecimal digits. Equal arguments give equal ids, on every node.

        ``place``: numbers that tell ids of one prefix apart, such as the sample's and the tool call's.
        """
        named = f"{prefix}{place}".encode()
        return prefix + hashlib.blake2b(named, digest_size=num_bytes, key=self.key).hexdigest()


class JournalRecord(msgspec.Struct, array_like=True, frozen=True):
    """One engine message of a sample, or several joined: the fields of ``Tokens``, or ``num_scored``."""

    sample: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop_token: int | None = None
    stats: RequestStats | None = None
    num_scored: Annotated[int, Meta(ge=0)] = 0
    """Further tokens of the prompt that were shown with their logprobs."""

    @property
    def message(self) -> Tokens:
        return Tokens(
            request_id="",  # ``sample`` says whose tokens these are
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            matched_stop_token=self.matched_stop_token,
            stats=self.stats,
        )


_records_decoder = msgspec.json.Decoder(tuple[JournalRecord, ...])


@dataclass(frozen=True, slots=True)
class RequestJournal:
    """An answer's journal, as the request for the answer, or for its continuation, has it."""

    seed: int
    """Seed of samples for which the client named none."""
    identity: Identity
    may_move: bool = False
    """Whether a node that shuts down may end the answer, as the router then asks another decode node. False
    for streams, which the router itself moves."""
    num_resumes: int = 0
    """How often the answer went on at another node."""
    records: tuple[JournalRecord, ...] = ()
    """Records of what the client has, in order."""
    resumed: Mapping[int, Resumed] = field(default_factory=dict)
    """The output so far of each sample that has begun, made of ``records`` where the body is parsed: a long
    stream has a record for each token, too many for one turn of the event loop."""

    @classmethod
    def of(cls, body: GeneratingBody, num_samples: int) -> RequestJournal | None:
        """Read the journal of ``body``; None if it has none. Raises ApiError 400."""
        head = body.journal
        if head is None:
            return None
        records = () if body.journal_records is None else tuple(_records(body.journal_records))
        if records and not body.stream:
            raise FieldRefused("journal_records", "an answer that is not streamed has none; leave it out")
        resumed = _resumed(records, num_samples)
        identity = Identity(bytes.fromhex(head.id), head.created)
        return cls(head.seed, identity, bool(head.may_move), head.num_resumes or 0, records, resumed)


class Resumed(NamedTuple):
    """The output of a resumed sample so far."""

    token_ids: tuple[int, ...] = ()
    is_over: bool = False
    """Whether the sample has all its tokens."""
    num_scored: int = 0
    """Tokens of the prompt that the client has with their logprobs."""


NOT_RESUMED = Resumed()


def _resumed(records: Sequence[JournalRecord], num_samples: int) -> dict[int, Resumed]:
    """Return the output of each sample that ``records`` have. Raises InvalidField for a record of no sample,
    or of one that has ended."""
    token_ids: dict[int, list[int]] = {}
    num_scored: Counter[int] = Counter()
    over: set[int] = set()
    for record in records:
        sample = record.sample
        if not 0 <= sample < num_samples or sample in over:
            rule = f"must be one of {num_samples} samples, and one that has not ended"
            raise InvalidField("journal_records", sample, rule)
        token_ids.setdefault(sample, []).extend(record.token_ids)
        num_scored[sample] += record.num_scored
        if record.finish_reason is not None:
            over.add(sample)
    return {
        sample: Resumed(tuple(ids), sample in over, num_scored[sample]) for sample, ids in token_ids.items()
    }


def _records(blocks: Raw) -> Iterator[JournalRecord]:
    """Decode the records of all blocks: a JSON array of arrays of records, each of some 64 KiB, as the router
    collects them. Raises ApiError 400."""
    name = "journal_records"
    for block in split(name, blocks, MAX_RECORD_BLOCKS):
        check_size(name, block)
        try:
            with taking_interpreter(len(memoryview(block))):  # a Raw has no length of its own
                records = _records_decoder.decode(block)
        except msgspec.MsgspecError as error:
            raise not_json(name, error) from error
        yield from records
