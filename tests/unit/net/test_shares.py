"""Shares of a turn: who is served how much, who is not read from, and what remains of one that is gone.

A connection is its number and its transport here; `tests/process/test_shares.py` has real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from postroad.net.shares import (
    EVENTS_US,
    FRAME_BYTES,
    LONG_LINE,
    MAX_SHARE,
    SHORT_LINE,
    TURN_BYTES,
    TURN_US,
    UNREAD_BYTES,
    Shares,
)
from postroad.seam.inputs import Closed, Received
from postroad.wire.frames import Ack, Request, encode

ASK = encode(Request(number=1, what="status"))
SAY = encode(Ack(number=1, token=""))


@dataclass(eq=False)
class Transport:
    unread: int = 0
    reading: bool = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


@dataclass(eq=False)
class Line:
    number: int
    transport: Transport = field(default_factory=Transport)

    def add(self, shares: Shares, *frames: bytes) -> bool:
        return shares.add(cast(Any, self), frames)

    def forget(self, shares: Shares) -> bool:
        return shares.forget(cast(Any, self))


def frames(shares: Shares) -> list[bytes]:
    return [item.frame for item in shares.take() if isinstance(item, Received)]


def served(shares: Shares) -> dict[int, int]:
    counts: dict[int, int] = {}
    for item in shares.take():
        counts[item.connection] = counts.get(item.connection, 0) + 1
    return counts


def test_only_those_that_ask_wait_and_what_they_send_after_it_stays_behind_it() -> None:
    shares, one, other = Shares(lambda: 0), Line(1), Line(2)
    assert not one.add(shares, SAY)
    assert other.add(shares, SAY, ASK)
    assert other.add(shares, SAY)
    assert frames(shares) == [SAY, ASK, SAY]
    assert not other.add(shares, SAY), "its line is empty"


def test_a_turn_is_divided_among_all_and_a_slow_one_takes_less() -> None:
    shares, greedy, modest = Shares(lambda: 0), Line(1), Line(2)
    greedy.add(shares, *[ASK] * 10_000)
    modest.add(shares, ASK)
    assert served(shares) == {1: MAX_SHARE - 1, 2: 1}
    shares.took(TURN_US + 1, 0)
    assert served(shares) == {1: MAX_SHARE // 2}
    for _ in range(20):
        shares.took(TURN_US + 1, 0)
    assert served(shares) == {1: 1}, "never nothing"
    late = Line(3)
    late.add(shares, ASK)
    assert served(shares) == {1: 1}
    assert served(shares) == {3: 1}, "each in its turn"
    for _ in range(100):
        shares.took(0, 0)
    assert served(shares) == {1: MAX_SHARE}


def test_a_turn_ends_with_the_frame_that_took_its_time() -> None:
    """What a frame costs is known once it is handled: whatever it was, the turn takes no more."""
    now_ns = 0
    shares, dear, cheap = Shares(lambda: now_ns), Line(1), Line(2)
    dear.add(shares, *[ASK] * 300)
    cheap.add(shares, *[ASK] * 3)
    order = []
    for _ in range(4):
        for item in shares.take():
            order.append(item.connection)
            now_ns += 30_000_000 if item.connection == 1 else 1_000
        assert [item.connection for item in shares.taken] == order[-len(shares.taken) :]
    assert order == [1, 2, 1, 2, 1, 2, 1], "the dear ones alone end their turns"


def test_a_long_line_is_not_read_from_until_it_is_short() -> None:
    shares, line = Shares(lambda: 0), Line(1)
    line.add(shares, *[ASK] * (LONG_LINE + 1))
    assert not line.transport.reading
    while shares.frames > SHORT_LINE:
        assert not line.transport.reading
        list(shares.take())
    assert line.transport.reading


def test_who_does_not_read_its_replies_is_asked_nothing() -> None:
    shares, deaf, other = Shares(lambda: 0), Line(1), Line(2)
    deaf.add(shares, *[ASK] * 10)
    deaf.transport.unread = UNREAD_BYTES + 1
    assert served(shares) == {}
    assert shares.stalled
    other.add(shares, ASK, ASK)
    assert served(shares) == {2: 2}
    deaf.transport.unread = 0
    assert served(shares) == {1: 10}
    assert not shares.stalled


def test_who_does_not_read_its_replies_may_say_what_asks_for_none_and_no_more() -> None:
    shares, deaf = Shares(lambda: 0), Line(1)
    deaf.add(shares, ASK)
    assert served(shares) == {1: 1}
    deaf.add(shares, SAY, ASK, SAY)  # the first one of them waits since the second does
    deaf.transport.unread = UNREAD_BYTES + 1
    assert frames(shares) == [SAY]
    assert served(shares) == {}
    assert shares.stalled


def test_a_turn_takes_so_many_bytes_and_of_everybody() -> None:
    """One client that sends a lot at once does not keep a turn from others: theirs is in it, too."""
    shares, greedy, modest = Shares(lambda: 0), Line(1), Line(2)
    large, small = SAY + bytes(90_000), SAY
    assert not greedy.add(shares, *[large] * 10)
    assert greedy.add(shares, *[large] * 10), "a mebibyte came before it in this turn"
    assert not modest.add(shares, small), "there is room for this one"
    assert not modest.add(shares, bytes(5) + bytes(20_000))
    assert modest.add(shares, bytes(5) + bytes(100_000)), "no more"
    assert served(shares) == {1: 10, 2: 1}
    shares.begin_turn()
    assert not modest.add(shares, small)
    greedy.add(shares, *[large] * 30)
    assert not greedy.transport.reading
    assert served(shares) == {1: TURN_BYTES // (len(large) + FRAME_BYTES) + 1}
    list(shares.take())
    assert not greedy.transport.reading
    list(shares.take())
    assert greedy.transport.reading


def test_where_the_core_takes_long_for_events_fewer_of_them_are_a_turn() -> None:
    """What a condition costs for an event is not in its bytes: others wait for one of such events, not for a
    mebibyte of them."""
    shares, dear, modest = Shares(lambda: 0), Line(1), Line(2)
    event = SAY + bytes(60_000)
    assert not dear.add(shares, *[event] * 10)
    shares.handled(shares.begin_turn(), 10 * EVENTS_US)
    assert dear.add(shares, *[event] * 20)
    assert not modest.add(shares, SAY), "what is small goes on in the turn in which it comes"
    for _ in range(5):
        shares.begin_turn()
        assert served(shares) == {1: 1}
        shares.took(EVENTS_US + 1, EVENTS_US + 1)
    assert not modest.add(shares, SAY)
    shares.handled(shares.begin_turn(), 10), "it was not full, so it does not show that more will do"
    assert served(shares) == {1: 1}
    counts = []
    while len(shares):
        shares.took(10, 10)
        counts += served(shares).values()
    assert counts == sorted(counts), "now it is quick"
    assert counts[-2] > 2


def test_a_pause_in_a_turn_that_asks_for_work_says_nothing_about_events() -> None:
    shares, line = Shares(lambda: 0), Line(1)
    line.add(shares, ASK)
    assert served(shares) == {1: 1}
    shares.took(10 * EVENTS_US, 10 * EVENTS_US)
    assert not line.add(shares, *[SAY + bytes(60_000)] * 10)


def test_small_frames_count_for_more_than_their_bytes() -> None:
    """An ACK of 20 bytes costs as much as an event of a thousand."""
    shares, line = Shares(lambda: 0), Line(1)
    assert not line.add(shares, *[SAY] * 200)
    assert line.add(shares, *[SAY] * 1_000)
    assert 200 < served(shares)[1] <= 2 * TURN_BYTES // FRAME_BYTES


def test_of_one_that_is_gone_what_it_said_counts_and_what_it_asked_does_not() -> None:
    shares, line = Shares(lambda: 0), Line(1)
    line.add(shares, SAY, ASK, SAY)
    assert line.forget(shares)
    assert list(shares.take()) == [*[Received(connection=1, frame=SAY)] * 2, Closed(connection=1)]
    assert not shares
    assert not line.forget(shares)
    line.add(shares, ASK)
    assert not line.forget(shares), "nothing but what is not answered"
    assert not shares


def test_ten_thousand_that_one_said_before_it_went_are_not_one_turn() -> None:
    shares, line = Shares(lambda: 0), Line(1)
    line.add(shares, *[SAY] * 10_000)
    assert line.forget(shares)
    turns = []
    while shares:
        turns.append(list(shares.take()))
    assert max(map(len, turns)) <= 2 * TURN_BYTES // FRAME_BYTES
    assert sum(map(len, turns)) == 10_001
    assert turns[-1][-1] == Closed(connection=1)
