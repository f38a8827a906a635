"""Makes a trace of Mooncake's format from sessions of coding agents that others have recorded.

    python -m tools.bench.replay.convert --format agentx --out agentx.jsonl --sessions 40 traces.jsonl
    python -m tools.bench.replay --trace agentx.jsonl --trace-block 64 …

``agentx``: InferenceX's AgentX (semianalysisai/cc-traces-weka-… of Hugging Face) and kv-cache-tester, one
JSON object a session, in a file of lines or in files of a folder. Calls of a session's subagents lie within
it, at times of the same clock. A call names the whole blocks of its prompt; where the ids' scope is
``local``, sessions share nothing. A session's clock begins at 0, so all begin at once unless
``--start-every`` says otherwise.

``tracelab``: TraceLab (arXiv:2606.30560), one JSON object a round of a session, in one file. A round says how
many tokens its prompt has and how many of them the provider's cache had, not what they are. A prompt that is
at least as long as the one before in its session is taken to go on from that, whatever the provider had lost
of it; a shorter one, which was compacted, begins with the tokens that were in the provider's cache. Sessions
share nothing.

Files that end in .gz are unpacked while they are read.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from tools.bench.replay.trace import TraceError, TraceRequest
from tools.bench.report import make_console
from tools.bench.serve import at_least

DEFAULT_BLOCK: Final = 64
"""Tokens of a block where the source has no blocks: SGLang's page, and AgentX's block."""

Count = Annotated[int, Meta(ge=0)]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Sessions:
    """The content of a source: the requests of each session in order, and the tokens of their blocks.

    ``num_left_out``: requests that say neither when they came nor what they had to read.
    """

    requests: list[list[TraceRequest]]
    block_tokens: int
    num_left_out: int


# --- AgentX -----------------------------------------------------------------------------------------------


class _Call(Struct, tag_field="type", tag="n"):
    """One call of a model, with times in seconds since the session's beginning."""

    t: float
    input_length: Count = field(name="in")
    output_length: Count = field(name="out")
    hash_ids: list[int] = []


class _StreamedCall(_Call, tag="s"):
    """A call whose answer was streamed."""


class _Subagent(Struct, tag_field="type", tag="subagent"):
    """A subagent of the session, with the calls that it made."""

    requests: list[_Call | _StreamedCall]


class _Session(Struct):
    block_size: Annotated[int, Meta(ge=1)]
    requests: list[_Call | _StreamedCall | _Subagent]
    hash_id_scope: Literal["local", "global"] = "local"

    @property
    def calls(self) -> list[_Call]:
        """All calls in the order of their times, those of subagents too."""
        parts = ([part] if isinstance(part, _Call) else part.requests for part in self.requests)
        return sorted(itertools.chain.from_iterable(parts), key=lambda call: call.t)


def read_agentx(paths: Sequence[Path], num_sessions: int = 0) -> Sessions:
    """Return the first sessions, all if ``num_sessions`` is 0. Raises TraceError."""
    known: dict[tuple[int, Hashable], int] = {}
    fresh = itertools.count()
    found: list[list[TraceRequest]] = []
    num_left_out, block_tokens = 0, 0
    for path, session in itertools.islice(_rows(paths, _Session), num_sessions or None):
        if session.block_size != (block_tokens or session.block_size):
            raise TraceError(f"{path}: blocks of {session.block_size} tokens behind ones of {block_tokens}")
        block_tokens = session.block_size
        if session.hash_id_scope == "local":
            known = {}
        calls = [call for call in session.calls if call.input_length]
        num_left_out += len(session.calls) - len(calls)
        found.append(
            [
                TraceRequest(
                    1e3 * call.t,
                    call.input_length,
                    call.output_length,
                    _chained(_block_names(call, block_tokens), known, fresh),
                )
                for call in calls
            ]
        )
    return Sessions(found, block_tokens, num_left_out)


def _block_names(call: _Call, block_tokens: int) -> Iterator[Hashable]:
    """Yield a name for each block of a prompt. Blocks without an id, mostly the last one, which is not whole,
    are the same in prompts of the same length behind the same ids."""
    num_blocks = -(-call.input_length // block_tokens)
    yield from call.hash_ids[:num_blocks]
    for number in range(len(call.hash_ids), num_blocks):
        yield (call.input_length, number)


def _chained(
    names: Iterable[Hashable], known: dict[tuple[int, Hashable], int], fresh: Iterator[int]
) -> tuple[int, ...]:
    """Return an id for each block that tells the whole prompt up to its end. ``known``: ids by the one before
    and the block's name, which grows."""
    ids: list[int] = []
    last = -1
    for name in names:
        if (number := known.get((last, name))) is None:
            number = known[last, name] = next(fresh)
        ids.append(number)
        last = number
    return tuple(ids)


# --- TraceLab ---------------------------------------------------------------------------------------------

_INPUT_EVENTS: Final = ("user_message", "tool_result")


class _Event(Struct):
    event_type: str
    timestamp: Annotated[datetime, Meta(tz=True)] | None = None


class _Round(Struct):
    """One call of a model."""

    session_id: str
    round_index: int = 0
    input_tokens_total: Count | None = None
    prefix_tokens: Count | None = None
    output_tokens: Count | None = None
    timing_events: list[_Event] = []

    @property
    def sent_at(self) -> float | None:
        """When it was sent, in seconds since 1970: with the last of its inputs, or else before its first
        output."""
        times = [
            (event.event_type in _INPUT_EVENTS, event.timestamp.timestamp())
            for event in self.timing_events
            if event.timestamp is not None
        ]
        inputs = [at for is_input, at in times if is_input]
        return max(inputs) if inputs else min((at for _, at in times), default=None)


class _Sent(NamedTuple):
    """The parts of a request of TraceLab; rounds of a session have this order."""

    sent_at: float
    round_index: int
    num_tokens: int
    num_in_cache: int
    num_new_tokens: int


def read_tracelab(
    paths: Sequence[Path], num_sessions: int = 0, block_tokens: int = DEFAULT_BLOCK
) -> Sessions:
    """Return the sessions that began first, all if ``num_sessions`` is 0. Raises TraceError."""
    by_session: defaultdict[str, list[_Sent]] = defaultdict(list)
    num_left_out = 0
    for _, row in _rows(paths, _Round):
        if (sent_at := row.sent_at) is None or not row.input_tokens_total:
            num_left_out += 1
            continue
        by_session[row.session_id].append(
            _Sent(
                sent_at,
                row.round_index,
                row.input_tokens_total,
                row.prefix_tokens or 0,
                row.output_tokens or 0,
            )
        )
    sessions = sorted(map(sorted, by_session.values()))[: num_sessions or None]
    fresh = itertools.count()
    return Sessions(
        [_requests_of(rounds, block_tokens, fresh) for rounds in sessions], block_tokens, num_left_out
    )


def _requests_of(rounds: Sequence[_Sent], block_tokens: int, fresh: Iterator[int]) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    ids: tuple[int, ...] = ()
    num_before = 0
    for sent in rounds:
        goes_on = sent.num_tokens >= num_before
        num_shared = num_before if goes_on else min(sent.num_in_cache, sent.num_tokens)
        num_blocks = -(-sent.num_tokens // block_tokens)
        shared = ids[: num_shared // block_tokens]
        ids = (*shared, *itertools.islice(fresh, num_blocks - len(shared)))
        num_before = sent.num_tokens
        requests.append(TraceRequest(1e3 * sent.sent_at, sent.num_tokens, sent.num_new_tokens, ids))
    return requests


# --- files ------------------------------------------------------------------------------------------------


def _rows(paths: Sequence[Path], row_type: type[Row]) -> Iterator[tuple[Path, Row]]:
    """Yield the JSON objects of files and of files in folders, one a line. Raises TraceError."""
    decoder = msgspec.json.Decoder(row_type)
    for path in itertools.chain.from_iterable(map(_files, paths)):
        num_lines = 0
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
                for line in lines:
                    num_lines += 1
                    if line.strip():
                        yield path, decoder.decode(line)
        except (OSError, EOFError) as error:  # gzip's errors are OSErrors, too
            raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {num_lines}: {error}") from error


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json*")) if path.is_dir() else [path]


def merged(sessions: Sequence[Sequence[TraceRequest]], start_every_secs: float | None) -> list[TraceRequest]:
    """Return the requests of all sessions in the order of their times, the first of which becomes 0.

    ``start_every_secs``: time between the beginnings of two sessions; None: as recorded.
    """
    moved: list[TraceRequest] = []
    for number, requests in enumerate(requests for requests in sessions if requests):
        shift = 0.0
        if start_every_secs is not None:
            shift = 1e3 * start_every_secs * number - requests[0].timestamp
        moved += (
            msgspec.structs.replace(request, timestamp=request.timestamp + shift) for request in requests
        )
    moved.sort(key=lambda request: request.timestamp)
    first = moved[0].timestamp if moved else 0.0
    return [
        msgspec.structs.replace(request, timestamp=round(request.timestamp - first, 3)) for request in moved
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Convert. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.replay.convert", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="PATH", help="files, or folders of files")
    add("--format", choices=("agentx", "tracelab"), required=True, help="whose sessions they are")
    add("--out", type=Path, required=True, metavar="FILE", help="trace of Mooncake's format")
    add("--sessions", type=at_least(0), default=0, metavar="N", help="the first N sessions; default: all")
    add(
        "--block-tokens",
        type=at_least(1),
        default=DEFAULT_BLOCK,
        metavar="N",
        help=f"tokens of a block of tracelab; agentx says its own (default: {DEFAULT_BLOCK})",
    )
    add(
        "--start-every",
        type=float,
        metavar="SECS",
        help="time between the beginnings of two sessions; default: as recorded",
    )
    options = parser.parse_args(words)
    if options.start_every is not None and options.start_every < 0:
        parser.error(f"--start-every {options.start_every} is below 0")
    console = make_console()
    try:
        if options.format == "agentx":
            found = read_agentx(options.paths, options.sessions)
        else:
            found = read_tracelab(options.paths, options.sessions, options.block_tokens)
        requests = merged(found.requests, options.start_every)
        if not requests:
            raise TraceError(f"{', '.join(map(str, options.paths))}: no requests")
        with options.out.open("wb") as file:
            file.writelines(msgspec.json.encode(request) + b"\n" for request in requests)
    except TraceError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(
        f"wrote {options.out}: {len(requests)} requests of {len(found.requests)} sessions, "
        f"{found.num_left_out} left out; replay it with --trace-block {found.block_tokens}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
