"""D2: what a broker tells its neighbours of a stream, filtered for those behind them.

The neighbours are played by tests/worlds/neighbours.py.
"""

from __future__ import annotations

import itertools

from tests.worlds.brokers import Client, Net
from tests.worlds.neighbours import Fake, wants

from postroad.ids import volatile_pubend
from postroad.units import KIB
from postroad.wire.frames import (
    Attach,
    Credit,
    InterestEntry,
    InterestUpdate,
    Silence,
    Stamp,
)

OURS = volatile_pubend(1, 1)


def below(net: Net, *, window: int = 1 << 22, gives: bool = True) -> Fake:
    """A neighbour with a subscriber of topic t, fed with our own stream."""
    fake = Fake(net, 0, 2, window=window, gives=gives)
    fake.advertise()
    fake.say(wants(2), Attach(origin=1, known={}))
    return fake


def payloads(fake: Fake) -> list[str]:
    return [event.payload.decode() for batch in fake.batches for event in batch.events()]


def told(fake: Fake) -> list[tuple[int, int]]:
    """What it was told of our stream, in the order of its ticks."""
    spans = [(span[1], span[2]) for message in fake.of(Silence) for span in message.spans if span[0] == OURS]
    return sorted(spans + [(batch.start, batch.end) for batch in fake.batches])


def test_silence_is_told_with_the_next_event() -> None:
    """What nobody there wants costs no frame of its own, and leaves no hole."""
    net = Net(1)
    fake, publisher = below(net), Client(net, 0)
    publisher.publish("t", "first")
    frames = len(fake.sizes)
    for number in range(100):
        publisher.publish("else", str(number))
    assert len(fake.sizes) == frames
    publisher.publish("t", "second")
    assert payloads(fake) == ["first", "second"]
    first, second = fake.batches
    assert second.start == first.end


def test_silence_is_told_once_a_second_if_no_event_comes() -> None:
    net = Net(1)
    fake, publisher = below(net), Client(net, 0)
    publisher.publish("t", "first")
    publisher.publish("else", "x")
    after = net.now_us
    net.wait(2)
    assert payloads(fake) == ["first"]
    spans = told(fake)
    assert spans[-1][1] >= after
    assert all(later[0] <= earlier[1] for earlier, later in itertools.pairwise(spans))


def test_rows_wanted_by_several_behind_it_go_once_and_in_order() -> None:
    net = Net(1)
    fake, publisher = below(net), Client(net, 0)
    fake.advertise(3)
    fake.advertise(2, broker=3)
    entries = tuple(InterestEntry(entry=at, topic=topic, where="") for at, topic in enumerate(("u", "t")))
    fake.say(InterestUpdate(owner=3, base=0, version=1 << 32, added=entries, removed=()))
    frame_rows = [("u", "a"), ("t", "b"), ("else", "c"), ("u", "d")]
    publisher.send(*(publisher.frame(topic, payload) for topic, payload in frame_rows))
    assert payloads(fake) == ["a", "b", "d"]


def test_a_neighbour_out_of_credit_is_left_behind_and_goes_on_where_it_stood() -> None:
    """Nothing is buffered for it: its credit brings what is in the cache, each once and in order."""
    net = Net(1)
    fake, publisher = below(net, window=64 * KIB, gives=False), Client(net, 0)
    for number in range(40):
        publisher.publish("t", f"{number}-{'x' * 4 * KIB}")
    sent = len(payloads(fake))
    assert 16 <= sent <= 17  # a window, and the frame that overdraws it
    spent = sum(len(batch.data) for batch in fake.batches)
    net.wait(3)
    assert len(payloads(fake)) == sent
    while sent < 40:
        fake.say(Credit(size=spent))
        spent = sum(len(batch.data) for batch in fake.batches[sent:])
        assert len(payloads(fake)) > sent
        sent = len(payloads(fake))
    assert [int(text.split("-")[0]) for text in payloads(fake)] == list(range(40))
    assert all(first.end == second.start for first, second in itertools.pairwise(fake.batches))


def test_a_filter_of_a_newer_version_is_said_at_once() -> None:
    """Somebody behind it waits for just that, to know that the subscription is in force."""
    net = Net(1)
    fake, publisher = below(net), Client(net, 0)
    publisher.publish("t", "first")
    version = (1 << 32) + 1
    entry = InterestEntry(entry=2, topic="u", where="")
    fake.say(InterestUpdate(owner=2, base=1 << 32, version=version, added=(entry,), removed=()))
    stamps = {stamp.number for stamp in fake.of(Stamp) if stamp.versions.get(2) == version}
    assert stamps
    assert any(span[3] in stamps for message in fake.of(Silence) for span in message.spans)
    publisher.publish("u", "second")
    assert payloads(fake) == ["first", "second"]
