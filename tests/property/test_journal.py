"""The router's side of a stream that goes from node to node: nothing is shown twice, nothing is left out."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.router.route import MAX_LOSSES, Losses
from hisparse_pd.router.stream_journal import JournalBudget, StreamJournal
from hisparse_pd.serving.api.frame import PINGS
from hisparse_pd.serving.http.journal_lines import LEAVING, MARK, OVER, journal_line
from tests.examples import num_examples

EVENTS = [
    *(b'data: {"text": "%d"}\n\n' % number for number in range(6)),
    b'event: a\ndata: {"text": "\\n:journal [7]"}\n\nevent: b\ndata: {}\n\n',
    b'data: {"text": ":journal over\\n\\n"}\n\n',
    b"data: [DONE]\n\n",
]
"""The events of an undisturbed stream, by unit; their text may look like a line of the journal."""


def said(first: int) -> bytes:
    """Return what a node writes that goes on behind the ``first`` records."""
    last = len(EVENTS) - 1
    return b"".join(
        event + journal_line(OVER if number == last else msgspec.json.encode([0, [number]]))
        for number, event in enumerate(EVENTS[first:], first)
    )


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = JournalBudget(1 << 20)
        self.journal = StreamJournal(100, self.budget)
        self.shown = b""
        self.num_resumes = 0
        self.unsaid = said(0)
        self.num_pings = 0

    @precondition(lambda self: self.unsaid)
    @rule(num_bytes=st.integers(1, 120))
    def the_node_says_something(self, num_bytes: int) -> None:
        chunk, self.unsaid = self.unsaid[:num_bytes], self.unsaid[num_bytes:]
        self.shown += self.journal.feed(chunk)

    @precondition(lambda self: not self.journal.unshown)
    @rule(ping=st.sampled_from(sorted(set(PINGS.values()))))
    def it_has_nothing_to_say(self, ping: bytes) -> None:
        shown = self.journal.feed(ping)
        assert shown == (b"" if self.journal.is_over else ping)

    @rule()
    def it_is_lost(self) -> None:
        """In the middle of anything; the next one gets what the journal has."""
        if self.journal.is_over:
            return
        self.journal.next_node()
        assert (self.journal.unshown, self.journal.is_leaving) == (b"", False)
        self.num_resumes += 1
        fields = self.journal.fields(may_move=True, num_resumes=self.num_resumes)
        records = [
            record for block in json.loads(msgspec.json.encode(fields["journal_records"])) for record in block
        ]
        assert records == [[0, [number]] for number in range(self.journal.num_records)]
        self.unsaid = said(len(records))

    @rule(data=st.data())
    def it_says_that_it_leaves(self, data: st.DataObject) -> None:
        """Behind any line, in pieces; the stream goes on."""
        if self.journal.is_over or self.journal.unshown:
            return
        journal, line = self.journal, journal_line(LEAVING)
        cut = data.draw(st.integers(0, len(line)))
        assert journal.feed(line[:cut]) + journal.feed(line[cut:]) == b""
        assert (journal.is_leaving, journal.unshown) == (True, b"")

    @invariant()
    def the_client_has_what_the_journal_says(self) -> None:
        num_shown = len(EVENTS) if self.journal.is_over else self.journal.num_records
        assert self.shown == b"".join(EVENTS[:num_shown])

    def teardown(self) -> None:
        self.journal.close()
        self.journal.close()
        assert self.budget.num_bytes == 0


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=num_examples(20, 100))


def test_a_stream_for_which_there_is_no_room_is_shown_all_the_same() -> None:
    budget = JournalBudget(130)
    other = StreamJournal(50, budget)
    journal = StreamJournal(50, budget)
    assert journal.feed(said(0)) == b"".join(EVENTS)
    assert (journal.is_over, journal.is_kept, budget.num_dropped) == (True, False, 1)
    assert (other.is_kept, budget.num_bytes) == (True, 50)
    assert not StreamJournal(500, budget).is_kept


@pytest.mark.parametrize("word", [b"", b"over", b"leaving", b"[0,[1]]"])
def test_a_line_that_has_not_ended_shows_nothing(word: bytes) -> None:
    journal = StreamJournal(0, JournalBudget(1000))
    assert journal.feed(EVENTS[0] + MARK + word + b"\n") == b""
    assert (journal.num_records, journal.is_over, journal.is_leaving) == (0, False, False)


def test_a_word_of_a_later_release_is_passed_over() -> None:
    journal = StreamJournal(0, JournalBudget(1 << 20))
    assert journal.feed(EVENTS[0] + journal_line(b"[0,[1]]") + journal_line(b"later")) == EVENTS[0]
    records = msgspec.json.encode(journal.fields(may_move=False, num_resumes=1)["journal_records"])
    assert json.loads(records) == [[[0, [1]]]]


def test_a_request_that_nodes_die_of_goes_to_no_third() -> None:
    assert Losses().add("a", 0) == ""
    in_a_row = Losses()
    assert (in_a_row.add("a", 7), in_a_row.add("b", 8), in_a_row.add("a", 9)) == ("", "", "")
    assert "a and c were lost with this request" in in_a_row.add("c", 9)
    many = Losses()
    assert [many.add("a", number) for number in range(MAX_LOSSES)] == [""] * MAX_LOSSES
    assert f"{MAX_LOSSES + 1} decode nodes were lost" in many.add("b", MAX_LOSSES)
