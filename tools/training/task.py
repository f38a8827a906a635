"""The task: documents of facts in filler text, questions about some of the facts, and the answers.

    <bos><|user|>Notes: The old clerk opened a window. The badge of amber falcon is 58213. ...
    Question: amber falcon, calm otter?<|assistant|>Answer: amber falcon is 58213. calm otter is 4012.<eos>

An answer names its key, an adjective and an animal that occur together once in the document, and then its
number of 4 to 6 digits. Which key comes next, and that none does, has to be read from the question; the
number, from anywhere in the document. A quarter of the documents are plain text instead of a chat.

Whole batches are made by tensor operations on any device: a sequence is a row of pieces of a few tokens,
which are laid one behind the other. Of each eight pairs of adjective and animal one is never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.training import vocabulary as words

CONTEXT_LENGTH = 8192
PIECE_WIDTH = 32
"""Tokens that the longest piece may have."""
NUM_FILLERS = 8192
HELD_OUT_EVERY = 8
ANSWER_WIDTH = 6
"""Tokens of the longest answer: adjective, animal, three of the number, full stop."""
HEAD_TOKENS = 4
MIN_UNIT_TOKENS = 5
NUMBER_OFFSET = 5
"""Of a fact's number in its sentence: " The badge of amber falcon" come before it."""

_NUM_ANIMALS = len(words.ANIMALS)
_NUM_PAIRS = len(words.ADJECTIVES) * _NUM_ANIMALS


@dataclass(frozen=True)
class Batch:
    """Sequences with their right answers. All tensors have the shape [batch, width] unless noted."""

    tokens: Tensor
    """int64; what follows the end is padding."""
    targets: Tensor
    """int64: the next token of each."""
    is_answer: Tensor
    """bool: the target belongs to the answers (or is the end), and so is fully determined."""
    is_text: Tensor
    """bool: the target is no padding."""
    question: Tensor
    """int64: the number of the question that the target answers, -1 elsewhere."""
    positions: Tensor
    """int64: rotary positions; ``jumps`` leaves gaps between sentences."""
    prompt_tokens: Tensor
    """int64 [batch]: tokens before the first answer, "Answer:" not included."""
    num_questions: Tensor
    """int64 [batch]."""
    fact_at: Tensor
    """int64 [batch, questions]: where the number of each asked fact begins."""


@dataclass(frozen=True)
class Shape:
    """What a batch is to look like."""

    batch: int
    width: int
    """Tokens of prompt and answers at most; the document fills what the questions leave."""
    max_questions: int
    jumps: bool = False
    """Leave gaps in the rotary positions, up to the whole context."""
    repeats: bool = False
    """In half of the sequences, tell few facts, again and again."""
    held_out: bool = False
    """Use the pairs that are never trained on too; a chat only, ``max_questions``, facts as in most texts."""


class TaskGenerator:
    """Makes batches on ``device``; equal seeds give equal batches on equal devices."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self._random = torch.Generator(self.device).manual_seed(seed)
        fillers = _fillers(random.Random(1234), NUM_FILLERS)
        self._filler_lengths = torch.tensor([len(filler) for filler in fillers], device=self.device)
        self._fillers = _padded(fillers).to(self.device)
        # Made once: copies to a GPU wait for all that it has to do.
        self._head = self._piece([words.BOS_ID, words.USER_ID, *words.token_ids("Notes:")])
        self._question = self._piece(words.token_ids("\nQuestion:"))
        self._opener = self._piece([words.ASSISTANT_ID, *words.token_ids("Answer:")])
        self._end = self._piece([words.EOS_ID])
        self._adjectives = self._ids(words.ADJECTIVES)
        self._animals = self._ids(words.ANIMALS)
        self._attributes = self._ids(words.ATTRIBUTES)
        self._first_pairs = self._ids(f"is {number:02d}" for number in range(100))
        self._plain_pairs = torch.tensor([words.WORD_IDS[f"{n:02d}"] for n in range(100)], device=self.device)
        pairs = torch.arange(_NUM_PAIRS, device=self.device)
        self._is_held_out = (pairs // _NUM_ANIMALS * 3 + pairs % _NUM_ANIMALS) % HELD_OUT_EVERY == 0

    def seed(self, seed: int) -> None:
        self._random.manual_seed(seed)

    def batch(self, shape: Shape) -> Batch:
        size, num_asked = shape.batch, shape.max_questions
        num_units = shape.width // MIN_UNIT_TOKENS
        density = 0.35 if shape.held_out else 0.05 + 0.95 * self._rand(size, 1)
        is_fact = self._rand(size, num_units) < density
        # One fact at least, where the document surely reaches.
        sure = (self._rand(size, 1) * max(1, shape.width // (2 * PIECE_WIDTH))).long()
        is_fact.scatter_(1, sure, True)
        pairs, numbers = self._keys(size, num_units, shape.held_out), self._numbers(size, num_units)
        is_repeat = torch.zeros_like(is_fact)
        if shape.repeats:
            mention = self._mentions(size, num_units)
            pairs, numbers = pairs.gather(1, mention), _take(numbers, mention)
            is_repeat = _seen_before(mention, is_fact)
        units, unit_lengths = self._units(is_fact, pairs, numbers)

        asked_wanted = torch.full((size, 1), num_asked, device=self.device)
        if not shape.held_out:
            fewer = (self._rand(size, 1) * num_asked).long() + 1
            asked_wanted = torch.where(self._rand(size, 1) < 0.5, asked_wanted, fewer)
        tail_tokens = 3 + 3 * asked_wanted + 3 + ANSWER_WIDTH * asked_wanted + 1
        fits = unit_lengths.cumsum(1) <= shape.width - HEAD_TOKENS - tail_tokens
        unit_lengths = unit_lengths * fits
        lottery = self._rand(size, num_units).masked_fill(~(is_fact & fits & ~is_repeat), -1.0)
        drawn, asked = lottery.topk(num_asked, dim=1)
        is_asked = (drawn >= 0) & (torch.arange(num_asked, device=self.device) < asked_wanted)
        asked_pairs = pairs.gather(1, asked)
        questions, question_lengths = self._questions(asked_pairs, is_asked)
        answers, answer_lengths = self._answers(asked_pairs, _take(numbers, asked), is_asked)

        is_chat = torch.ones_like(is_fact[:, :1])
        if not shape.held_out:
            is_chat = self._rand(size, 1) < 0.75
        heads = self._head.repeat(size, 1, 1)
        heads[:, 0, :2] = torch.where(is_chat, heads[:, 0, :2], heads[:, 0, 2:4])
        openers = self._opener.repeat(size, 1, 1)
        openers[:, 0, :1] = torch.where(is_chat, openers[:, 0, :1], ord("\n"))
        parts = [
            (heads, torch.where(is_chat, HEAD_TOKENS, 2)),
            (units, unit_lengths),
            (self._question.expand(size, -1, -1), torch.full_like(asked_wanted, 3)),
            (questions, question_lengths),
            (openers, torch.full_like(asked_wanted, 3)),
            (answers, answer_lengths),
            (self._end.expand(size, -1, -1), torch.ones_like(asked_wanted)),
        ]
        return self._packed(parts, shape, asked, is_asked, is_repeat)

    def _packed(
        self,
        parts: list[tuple[Tensor, Tensor]],
        shape: Shape,
        asked: Tensor,
        is_asked: Tensor,
        is_repeat: Tensor,
    ) -> Batch:
        """Lay the pieces of all parts one behind the other."""
        pieces = torch.cat([piece for piece, _ in parts], dim=1)
        lengths = torch.cat([length for _, length in parts], dim=1)
        num_units, num_asked = parts[1][0].shape[1], asked.shape[1]
        ends = lengths.cumsum(1)
        # Rounded up, because attention kernels want masks with aligned rows.
        at = (
            torch.arange(-(-shape.width // 8) * 8 + 1, device=self.device)
            .expand(shape.batch, -1)
            .contiguous()
        )
        owner = torch.searchsorted(ends, at, right=True)
        is_text = owner < pieces.shape[1]
        owner = owner.clamp(max=pieces.shape[1] - 1)
        offset = at - (ends - lengths).gather(1, owner)
        flat = pieces.view(shape.batch, -1)
        tokens = flat.gather(1, owner * PIECE_WIDTH + offset.clamp(max=PIECE_WIDTH - 1))
        tokens = tokens.masked_fill(~is_text, words.PAD_ID)

        first_unit = 1
        opener = first_unit + num_units + 1 + num_asked
        question = (owner - opener - 1).masked_fill((owner <= opener) | (owner > opener + num_asked), -1)
        in_chat = tokens[:, :1] == words.BOS_ID
        is_answer = is_text & ((owner > opener) | ((owner == opener) & (offset > 0) & in_chat))
        unit = owner - first_unit
        in_repeat = (unit >= 0) & (unit < num_units)
        in_repeat &= is_repeat.gather(1, unit.clamp(0, num_units - 1)) & (offset >= NUMBER_OFFSET)
        is_answer |= in_repeat & is_text
        fact_at = (ends - lengths).gather(1, asked + first_unit) + NUMBER_OFFSET
        return Batch(
            tokens=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(),
            is_answer=is_answer[:, 1:],
            is_text=is_text[:, 1:],
            question=question[:, 1:],
            positions=self._positions(at, owner, num_units, shape)[:, :-1].contiguous(),
            prompt_tokens=ends[:, opener] - 2,
            num_questions=is_asked.sum(1),
            fact_at=fact_at,
        )

    def _positions(self, at: Tensor, owner: Tensor, num_units: int, shape: Shape) -> Tensor:
        """``at``, for half of the sequences with gaps before each unit."""
        if not shape.jumps or shape.width >= CONTEXT_LENGTH:
            return at
        weights = -torch.log(self._rand(shape.batch, num_units) + 1e-6)
        extra = (CONTEXT_LENGTH - shape.width) * self._rand(shape.batch, 1)
        extra = extra * (self._rand(shape.batch, 1) < 0.5)
        gaps = (weights.cumsum(1) / weights.sum(1, keepdim=True) * extra).long()
        gaps = torch.cat((torch.zeros_like(gaps[:, :1]), gaps), dim=1)
        return at + gaps.gather(1, owner.clamp(max=num_units))

    def _mentions(self, size: int, count: int) -> Tensor:
        """Which fact each place in the document tells, int64 [size, count]: its own, or one of a few."""
        own = torch.arange(count, device=self.device).expand(size, -1)
        num_facts = 2 + (self._rand(size, 1) * (count // 4)).long()
        few = (self._rand(size, count) * num_facts).long()
        return torch.where(self._rand(size, 1) < 0.5, own, few)

    def _keys(self, size: int, count: int, held_out: bool) -> Tensor:
        """Different pairs, int64 [size, count]."""
        lottery = self._rand(size, _NUM_PAIRS)
        if not held_out:
            lottery = lottery.masked_fill(self._is_held_out, -1.0)
        return lottery.topk(count, dim=1).indices

    def _numbers(self, size: int, count: int) -> Tensor:
        """Tokens of numbers, int64 [size, count, 3], 0 where a number has no third."""
        first = 10 + (self._rand(size, count) * 90).long()
        second = (self._rand(size, count) * 100).long()
        third = (self._rand(size, count) * 100).long()
        num_digits = 4 + (self._rand(size, count) * 3).long()
        last = torch.where(num_digits == 6, self._plain_pairs[third], ord("0") + third % 10)
        last = last.masked_fill(num_digits == 4, 0)
        return torch.stack((self._first_pairs[first], self._plain_pairs[second], last), dim=2)

    def _units(self, is_fact: Tensor, pairs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The sentences of the documents, facts and filler, and their lengths."""
        size, count = is_fact.shape
        filler = (self._rand(size, count) * NUM_FILLERS).long()
        attribute = self._attributes[(self._rand(size, count) * len(self._attributes)).long()]
        facts = torch.zeros(size, count, PIECE_WIDTH, dtype=torch.int64, device=self.device)
        facts[..., 0], facts[..., 1], facts[..., 2] = words.WORD_IDS[" The"], attribute, words.WORD_IDS[" of"]
        self._write_keys(facts[..., 3:], pairs)
        lengths = NUMBER_OFFSET + self._write_numbers(facts[..., NUMBER_OFFSET:], numbers)
        units = torch.where(is_fact[..., None], facts, self._fillers[filler])
        return units, torch.where(is_fact, lengths, self._filler_lengths[filler])

    def _questions(self, pairs: Tensor, is_asked: Tensor) -> tuple[Tensor, Tensor]:
        questions = torch.zeros(*pairs.shape, PIECE_WIDTH, dtype=torch.int64, device=self.device)
        self._write_keys(questions, pairs)
        is_last = torch.arange(pairs.shape[1], device=self.device) == is_asked.sum(1, keepdim=True) - 1
        questions[..., 2] = torch.where(is_last, ord("?"), ord(","))
        return questions, 3 * is_asked

    def _answers(self, pairs: Tensor, numbers: Tensor, is_asked: Tensor) -> tuple[Tensor, Tensor]:
        answers = torch.zeros(*pairs.shape, PIECE_WIDTH, dtype=torch.int64, device=self.device)
        self._write_keys(answers, pairs)
        return answers, (2 + self._write_numbers(answers[..., 2:], numbers)) * is_asked

    def _write_keys(self, out: Tensor, pairs: Tensor) -> None:
        """Write " amber falcon" to ``out``."""
        out[..., 0] = self._adjectives[pairs // _NUM_ANIMALS]
        out[..., 1] = self._animals[pairs % _NUM_ANIMALS]

    def _write_numbers(self, out: Tensor, numbers: Tensor) -> Tensor:
        """Write " is 58213." to ``out``; returns the lengths."""
        out[..., :2] = numbers[..., :2]
        is_short = numbers[..., 2] == 0
        out[..., 2] = torch.where(is_short, ord("."), numbers[..., 2])
        out[..., 3] = ord(".")
        return 4 - is_short.long()

    def _piece(self, tokens: list[int]) -> Tensor:
        """A piece [1, 1, PIECE_WIDTH] that is the same in all sequences."""
        return _padded([tokens])[None].to(self.device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._random, device=self.device)

    def _ids(self, spoken: Iterable[str]) -> Tensor:
        return torch.tensor([words.WORD_IDS[f" {word}"] for word in spoken], device=self.device)


def _take(values: Tensor, at: Tensor) -> Tensor:
    """``values`` [batch, n, k] at ``at`` [batch, m]."""
    return values.gather(1, at[..., None].expand(-1, -1, values.shape[2]))


def _seen_before(mention: Tensor, is_fact: Tensor) -> Tensor:
    """bool [batch, count]: a fact that an earlier place tells as well."""
    tells = torch.nn.functional.one_hot(mention, mention.shape[1]) * is_fact[..., None]
    earlier = tells.cumsum(1) - tells
    return (earlier.gather(2, mention[..., None])[..., 0] > 0) & is_fact


def _padded(pieces: list[list[int]]) -> Tensor:
    return torch.tensor([piece + [0] * (PIECE_WIDTH - len(piece)) for piece in pieces])


def _fillers(pick: random.Random, count: int) -> list[list[int]]:
    """Tokens of sentences in which now and then an adjective or an animal of the keys occurs, alone."""
    found: list[list[int]] = []
    while len(found) < count:
        quality = pick.choice(words.QUALITIES if pick.random() < 0.7 else words.ADJECTIVES)
        person = pick.choice(words.PEOPLE)
        subject = pick.choice((f"The {person}", f"A {person}", f"The {quality} {person}", f"Every {person}"))
        if pick.random() < 0.15:
            subject = f"The {pick.choice(words.ANIMALS)}"
        elif pick.random() < 0.05:
            subject = pick.choice(words.NAMES)
        article = pick.choice(("the", "a", "the old", "a new"))
        thing = f"{article} {pick.choice(words.THINGS)}"
        if pick.random() < 0.3:
            thing = f"the {pick.choice(words.ADJECTIVES)} {pick.choice(words.THINGS)}"
        ending = pick.choice(
            (
                "",
                f" near the {pick.choice(words.PLACES)}",
                f" behind the {pick.choice(words.PLACES)}",
                f" before {pick.choice(words.TIMES)}",
                f" after {pick.choice(words.TIMES)}",
                f" and then {pick.choice(words.VERBS)} it",
            )
        )
        tokens = words.token_ids(f" {subject} {pick.choice(words.VERBS)} {thing}{ending}.")
        if len(tokens) <= PIECE_WIDTH:
            found.append(tokens)
    return found
