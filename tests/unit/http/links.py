"""A front's links to engines that do not run, so that messages stay in the ranks' outboxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION
from hisparse_pd.engine.messages import EngineReady, Generate, GenerateGroup, ToEngine
from hisparse_pd.serving.http.board import Board
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.queue_limits import QueueLimits
from hisparse_pd.serving.http.rank_choice import RankChoice
from hisparse_pd.serving.http.rank_link import RankLink

ROOMY = QueueLimits(100, 1000)


def make_link(
    choose_rank: RankChoice,
    num_ranks: int = 3,
    limits: QueueLimits = ROOMY,
    board: Board | None = None,
    front: int = 0,
) -> EngineLink:
    """Make a link whose engines are ready."""
    endpoints = [f"ipc://unused-{rank}" for rank in range(num_ranks)]
    link = EngineLink(endpoints, 5.0, limits=limits, choose_rank=choose_rank, board=board, front_number=front)
    for rank in link.ranks:
        link.handle(rank, EngineReady(100, 100 - rank.rank, 50 + rank.rank))
    return link


def by_room(ranks: Sequence[RankLink], prompt: GenerateGroup) -> Iterator[RankLink]:
    """Choose the rank by the room, so that a test knows it beforehand."""
    for sample in prompt.samples:
        yield ranks[sample.room % len(ranks)]


def group_of(rooms: range, num_prompt_tokens: int = 7) -> GenerateGroup:
    """Make a group with a sample for each room, with the request id ``rROOM``."""
    greedy = SamplingParams(1, temperature=0.0)
    samples = (Generate(f"r{room}", room, num_prompt_tokens, greedy, "127.0.0.1", 1) for room in rooms)
    return GenerateGroup(tuple(samples), NO_ISOLATION, b"prompt")


def sent(link: EngineLink) -> list[list[ToEngine]]:
    """Take what goes to each rank out of the outboxes, as the links' turns do."""
    messages: list[list[ToEngine]] = []
    for rank in link.ranks:
        messages.append([])
        while rank.outbox:
            message, on_sent = rank.outbox.popleft()
            on_sent()
            if message is not None:
                messages[-1].append(message)
    return messages
