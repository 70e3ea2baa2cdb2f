"""Whether datagrams pass: the two ends of a connection greet each other over a path that loses (spec B1)."""

from __future__ import annotations

from postroad.links.greetings import FIRST_GREET_US, GREET_US, SILENT_US, WINDOW, DatagramPath
from postroad.seam.datagrams import Datagram
from postroad.wire.datagrams import BEST_EFFORT

KEY = bytes(range(24))
DIALLER, DIALLED = ("127.0.0.1", 1), ("127.0.0.1", 2)


def pair() -> tuple[DatagramPath, DatagramPath]:
    return (
        DatagramPath(KEY, DIALLED, dialled=True, now_us=0),
        DatagramPath(KEY, None, dialled=False, now_us=0),
    )


def greet(first: DatagramPath, second: DatagramPath, now_us: int) -> int:
    """A greeting, and whatever it leads to: how many there were."""
    count, data, sides = 1, first.greeting(now_us), [first, second]
    while True:
        speaker, hearer = sides
        body = hearer.unseal(Datagram(DIALLER if speaker.dialled else DIALLED, data), now_us)
        assert body is not None
        if not hearer.greeted(body):
            return count
        count, data, sides = count + 1, hearer.greeting(now_us), [hearer, speaker]


def test_both_know_that_datagrams_pass_after_one_exchange() -> None:
    dialler, dialled = pair()
    assert not dialler.passes(0)
    assert greet(dialler, dialled, 0) == 4, "it hears nothing; heard; heard; heard"
    assert dialler.passes(0)
    assert dialled.passes(0)
    assert dialled.endpoint == DIALLER, "where its datagrams come from"
    assert greet(dialler, dialled, GREET_US) == 2, "a greeting and its answer"
    assert dialler.passes(GREET_US + SILENT_US - 1)
    assert not dialler.passes(GREET_US + SILENT_US)


def test_who_is_not_heard_sends_nothing_but_greetings() -> None:
    """Only one direction passes: neither side takes the path for open."""
    dialler, dialled = pair()
    waits, now_us = [], 0
    for _ in range(6):
        body = dialled.unseal(Datagram(DIALLER, dialler.greeting(now_us)), now_us)
        assert body is not None
        assert dialled.greeted(body)  # its answer is lost
        due_us = dialler.next_deadline()
        assert due_us is not None
        waits.append(due_us - now_us)
        now_us = due_us
    assert waits == [
        FIRST_GREET_US,
        2 * FIRST_GREET_US,
        4 * FIRST_GREET_US,
        8 * FIRST_GREET_US,
        GREET_US,
        GREET_US,
    ]
    assert not dialler.passes(now_us)
    assert not dialled.passes(now_us)


def test_a_silence_is_told_and_ends_the_path_on_both_sides() -> None:
    dialler, dialled = pair()
    greet(dialler, dialled, 0)
    now_us = SILENT_US
    body = dialled.unseal(Datagram(DIALLER, dialler.greeting(now_us)), now_us)
    assert body is not None
    dialled.greeted(body)
    assert not dialled.passes(now_us), "the other one says that it hears nothing"


def test_nothing_of_others_is_taken_and_without_a_key_nothing_at_all() -> None:
    dialler, dialled = pair()
    sealed = dialler.seal(BEST_EFFORT, b"x")
    assert dialler.unseal(Datagram(DIALLED, sealed), 0) is None, "its own, sent back"
    assert dialled.unseal(Datagram(DIALLER, sealed), 0) == b"x"
    keyless = DatagramPath(b"", DIALLED, dialled=True, now_us=0)
    assert keyless.next_deadline() is None
    assert keyless.unseal(Datagram(DIALLER, sealed), 0) is None
    assert dialled.next_deadline() is None, "who was dialled only answers"


def test_a_datagram_that_comes_again_moves_nothing_and_is_dropped() -> None:
    """Found: a captured greeting, sent from another port, diverted all that its connection gets."""
    dialler, dialled = pair()
    elsewhere = ("127.0.0.1", 3)
    captured, late, newest = (dialler.greeting(0) for _ in range(3))
    assert dialled.unseal(Datagram(DIALLER, captured), 0) is not None
    assert dialled.unseal(Datagram(DIALLER, newest), 0) is not None
    for again in (captured, newest):
        assert dialled.unseal(Datagram(elsewhere, again), SILENT_US) is None
    assert not dialled.hears(SILENT_US), "nor does it keep the path open"
    assert dialled.unseal(Datagram(elsewhere, late), 1) is not None, "overtaken on its way"
    assert dialled.endpoint == DIALLER, "only a newer one moves it"
    old = dialler.greeting(0)
    for _ in range(2 * WINDOW):
        assert dialled.unseal(Datagram(elsewhere, dialler.greeting(0)), 1) is not None
    assert dialled.endpoint == elsewhere
    assert dialled.unseal(Datagram(DIALLER, old), 1) is None, "too old to know whether it came"
