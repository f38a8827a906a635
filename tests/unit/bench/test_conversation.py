"""What a conversation puts on the wire, as the benchmark reckons."""

from __future__ import annotations

from bench.conversation import Shape, arithmetic
from decode_node.held_prefixes import PromptKeys
from service.engine_messages import pack_token_ids


def test_what_is_sent_is_what_the_books_would_not_find() -> None:
    shape = Shape(first=50, more=9, answer=6, num_turns=6)
    for page_size in (1, 4, 16, 64):
        num_found, sent = 0, []
        for length in shape.prompt_lens():
            keys = PromptKeys.of(b"", pack_token_ids(range(length)), page_size)
            sent.append(length - min(num_found, (length - 1) // page_size) * page_size)
            num_found = len(keys.with_output(range(length, length + shape.answer - 1)))
        assert shape.sent_lens(page_size) == sent


def test_at_full_size_a_later_turn_sends_less_than_a_thirtieth() -> None:
    full_size = arithmetic()
    assert full_size["sent_tokens"][0] == 75_000
    assert full_size["share_of_a_later_turn"] < 0.03
