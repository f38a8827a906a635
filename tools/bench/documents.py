"""Documents of the retrieval model: facts in filler text, and questions about some of the facts.

    Notes: The old clerk opened a window. The badge of amber falcon is 58213. ...
    Question: amber falcon, calm otter?

A key is an adjective and an animal that occur together once in the document; its number has 4 to 6 digits.
Training has not seen these documents. They use all pairs of adjective and animal, of which training left out
one in eight, and other random numbers. The same length gives the same documents on every machine.
``retrieval.py`` makes tasks of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.bench.facts import ROOT

RETRIEVAL_MODEL = ROOT / "tools" / "checkpoints" / "retrieval"
QUESTIONS = 8
"""Questions of a prompt, if it has as many facts."""
ANSWER_WIDTH = 6
"""Tokens of the longest answer: adjective, animal, three of the number, full stop."""
SEED = 90_000

_NUM_FILLERS = 8192
_MOST_FILLER_TOKENS = 32
_FACT_SHARE = 0.35
_HEAD_TOKENS = 4
"""Tokens before the first sentence: begin of the text, user, and "Notes:"."""
_NUMBER_OFFSET = 5
"""Tokens of a fact before its number: " The badge of amber falcon"."""
_MIN_SENTENCE_TOKENS = 5
_NOT_SENTENCES = 32
"""Tokens of a prompt that are reserved for all but its sentences, such as the question."""


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ADJECTIVES = _listed(
    "amber azure brave bright bronze calm clever copper coral crimson curious dusty eager emerald faint "
    "fierce frosty gentle gilded golden green grey hidden hollow humble indigo ivory jade jolly keen lively "
    "lofty lucky marble mellow merry misty noble olive pale patient plain proud quick quiet rapid rosy royal "
    "rusty scarlet silent silver sleepy solemn spotted stormy sunny swift tawny velvet violet wild wise "
    "young"
)
ANIMALS = _listed(
    "badger bear beaver bison bobcat camel crane cricket crow deer dingo dolphin donkey eagle egret falcon "
    "ferret finch fox gecko goose hare hawk hedgehog heron hornet ibis jackal jaguar koala lemur leopard "
    "lizard llama lynx magpie marten mole moose newt ocelot osprey otter owl panda parrot pelican penguin "
    "puffin python rabbit raven salmon seal sparrow stork swan tapir tiger toad turtle walrus weasel "
    "wolf"
)
ATTRIBUTES = _listed("badge code ticket locker parcel room desk phone permit crate ledger seat")

PEOPLE = _listed(
    "clerk captain gardener baker teacher doctor miller painter sailor porter farmer judge writer driver "
    "keeper mayor nurse pilot singer tailor"
)
VERBS = _listed(
    "opened carried painted repaired found cleaned moved counted sold bought watched left closed borrowed "
    "measured hung washed followed praised forgot"
)
THINGS = _listed(
    "window lantern table letter basket wagon bridge garden kettle mirror ladder blanket bottle fence "
    "hammer jacket kitchen market needle pillow piano river saddle teapot trumpet violin wheel "
    "chimney"
)
QUALITIES = _listed("old new narrow broken heavy small large wooden empty clean round long")
PLACES = _listed("harbor orchard station mill church school tower valley village forest square")
TIMES = _listed("noon dawn dusk winter summer supper midnight breakfast")
NAMES = _listed("Marlow Quentin Brisby Oakham Tolland Vesper Yarrow Zimbel")
"""Names in filler text that are not in the vocabulary, so each is several tokens of one byte."""


@dataclass(frozen=True)
class Fact:
    """A fact of a document. ``number_at``: index of the prompt's token at which its number begins."""

    key: str
    number: str
    number_at: int


@dataclass(frozen=True)
class Document:
    """A prompt, as a message and as tokens with the chat template, and the facts asked for, in order."""

    content: str
    token_ids: tuple[int, ...]
    asked: tuple[Fact, ...]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(RETRIEVAL_MODEL / "tokenizer.json"))


def documents(length: int, count: int) -> Iterator[Document]:
    """Yield ``count`` documents with prompts of about ``length`` tokens."""
    generator = torch.Generator().manual_seed(SEED + length)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def below(bound: int) -> list[list[int]]:
        """Draw an integer below ``bound`` for each sentence of each document."""
        return (rand(count, num_sentences) * bound).long().tolist()

    # A bound on tokens: those of the prompt, of "Answer:" and the answers, and the end token. A prompt needs
    # fewer, but the bound decides how many values are drawn: any other one would draw other documents.
    most_tokens = length + 2 + ANSWER_WIDTH * QUESTIONS + 1
    num_sentences = most_tokens // _MIN_SENTENCE_TOKENS
    is_fact = rand(count, num_sentences) < _FACT_SHARE
    # One fact comes so early that the document has it before it is full.
    early_place = (rand(count, 1) * max(1, most_tokens // 64)).long()
    is_fact.scatter_(1, early_place, True)
    pairs = rand(count, len(ADJECTIVES) * len(ANIMALS)).topk(num_sentences, dim=1).indices.tolist()
    number_parts = below(90), below(100), below(100), below(3)  # the arguments of ``_number``
    fillers, attributes = below(_NUM_FILLERS), below(len(ATTRIBUTES))
    priorities = rand(count, num_sentences)
    for row in range(count):
        parts_of_row = (part[row] for part in number_parts)
        numbers = [_number(*parts) for parts in zip(*parts_of_row, strict=True)]
        drawn = _Drawn(is_fact[row], pairs[row], numbers, fillers[row], attributes[row], priorities[row])
        yield _document(length, drawn)


class _Drawn(NamedTuple):
    """The values drawn for one document: one for each of its sentences, of which it takes the first ones."""

    is_fact: Tensor
    pairs: list[int]
    """Keys of facts: numbers of pairs of an adjective and an animal, each once."""
    numbers: list[str]
    fillers: list[int]
    """Places in ``_fillers``, for sentences without a fact."""
    attributes: list[int]
    priorities: Tensor
    """The facts with the highest ones are asked for."""


def _document(length: int, drawn: _Drawn) -> Document:
    """Return a document of as many sentences as fit into ``length`` tokens."""
    sentences: list[str] = []
    facts: dict[int, Fact] = {}  # by the places of their sentences
    num_tokens = 0
    for place in range(len(drawn.pairs)):
        sentence, added_tokens = _fillers()[drawn.fillers[place]]
        fact = None
        if drawn.is_fact[place]:
            adjective, animal = divmod(drawn.pairs[place], len(ANIMALS))
            key, number = f"{ADJECTIVES[adjective]} {ANIMALS[animal]}", drawn.numbers[place]
            fact = Fact(key, number, _HEAD_TOKENS + num_tokens + _NUMBER_OFFSET)
            sentence = f" The {ATTRIBUTES[drawn.attributes[place]]} of {key} is {number}."
            added_tokens = _NUMBER_OFFSET + (len(number) + 1) // 2 + 1  # two digits a token; full stop
        num_tokens += added_tokens
        if num_tokens > length - _NOT_SENTENCES:
            break
        sentences.append(sentence)
        if fact is not None:
            facts[place] = fact

    fact_priorities = drawn.priorities.masked_fill(~drawn.is_fact, -1.0)[: len(sentences)]
    asked_places = fact_priorities.topk(min(QUESTIONS, len(facts))).indices.tolist()
    asked = tuple(facts[place] for place in asked_places)
    content = f"Notes:{''.join(sentences)}\nQuestion: {', '.join(fact.key for fact in asked)}?"
    ids = tokenizer().encode(f"<bos><|user|>{content}<|assistant|>", add_special_tokens=False).ids
    return Document(content, tuple(ids), asked)


def _number(first_two: int, next_two: int, last_two: int, num_last: int) -> str:
    """Return a number of two digits, two more, and ``num_last`` at the end: at most a token for each two."""
    last = ("", f"{last_two % 10}", f"{last_two:02d}")[num_last]
    return f"{10 + first_two}{next_two:02d}{last}"


@cache
def _fillers() -> list[tuple[str, int]]:
    """Return filler sentences, each with its number of tokens. Some use words of keys, too."""
    pick = random.Random(1234)
    found: list[tuple[str, int]] = []
    while len(found) < _NUM_FILLERS:
        quality = pick.choice(QUALITIES if pick.random() < 0.7 else ADJECTIVES)
        person = pick.choice(PEOPLE)
        subject = pick.choice((f"The {person}", f"A {person}", f"The {quality} {person}", f"Every {person}"))
        if pick.random() < 0.15:
            subject = f"The {pick.choice(ANIMALS)}"
        elif pick.random() < 0.05:
            subject = pick.choice(NAMES)
        article = pick.choice(("the", "a", "the old", "a new"))
        thing = f"{article} {pick.choice(THINGS)}"
        if pick.random() < 0.3:
            thing = f"the {pick.choice(ADJECTIVES)} {pick.choice(THINGS)}"
        ending = pick.choice(
            (
                "",
                f" near the {pick.choice(PLACES)}",
                f" behind the {pick.choice(PLACES)}",
                f" before {pick.choice(TIMES)}",
                f" after {pick.choice(TIMES)}",
                f" and then {pick.choice(VERBS)} it",
            )
        )
        sentence = f" {subject} {pick.choice(VERBS)} {thing}{ending}."
        num_tokens = len(tokenizer().encode(sentence, add_special_tokens=False).ids)
        if num_tokens <= _MOST_FILLER_TOKENS:
            found.append((sentence, num_tokens))
    return found
