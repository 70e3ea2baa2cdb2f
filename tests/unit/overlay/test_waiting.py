"""Interest that is taken in piece by piece: what a neighbour's thousand conditions do to others."""

from __future__ import annotations

import pytest
from tests.worlds.brokers import Client, Net
from tests.worlds.neighbours import Fake, wants

from postroad.overlay import waiting
from postroad.seam.inputs import Closed
from postroad.wire.frames import InterestClaim, InterestEntry, InterestPull, InterestUpdate

LONG = " AND ".join(f"name{number} <> {number}" for number in range(40))  # about 2 ms of work


def conditions(
    owner: int, count: int, *, version: int = 1 << 32, part: int = 0, parts: int = 1
) -> InterestUpdate:
    entries = tuple(
        InterestEntry(entry=part * count + number + 1, topic="t", where=f"{LONG} AND part{part} > {number}")
        for number in range(count)
    )
    return InterestUpdate(
        owner=owner, base=0, version=version, added=entries, removed=(), part=part, parts=parts
    )


def version(net: Net, owner: int) -> int:
    broker = net.brokers[0]
    assert broker is not None
    return broker._rooms.interest.version(owner)


def waiting_updates(net: Net) -> float:
    broker = net.brokers[0]
    assert broker is not None
    return broker.metrics()["interest_waiting"]


def turn(net: Net) -> None:
    """One turn in which nothing comes in; the broker must have asked for it."""
    broker = net.brokers[0]
    assert broker is not None
    assert broker.next_deadline() <= net.now_us
    net.give(0, [])


def test_a_table_of_many_conditions_takes_many_turns_and_events_pass_between_them() -> None:
    net = Net(1)
    fake, publisher, reader = Fake(net, 0, 2), Client(net, 0), Client(net, 0)
    reader.subscribe(1, "t")
    fake.advertise()
    fake.say(conditions(2, 50))
    turns = 0
    while waiting_updates(net):
        assert version(net, 2) == 0, "whole or not at all"
        publisher.publish("t", str(turns))  # a turn of its own
        turns += 1
    assert turns >= 50 / 2, "20 units a turn, of conditions of over 10 units"
    assert reader.got() == [str(number) for number in range(turns)]
    assert version(net, 2) == 1 << 32


def test_the_interest_of_one_owner_does_not_wait_for_that_of_another() -> None:
    net = Net(1)
    busy, other = Fake(net, 0, 2), Fake(net, 0, 3)
    busy.advertise()
    other.advertise()
    busy.say(conditions(2, 50))
    other.say(wants(3))
    while not version(net, 3):
        turn(net)
    assert version(net, 2) == 0
    assert waiting_updates(net) == 1


def test_parts_of_a_table_are_looked_at_once() -> None:
    """The last part finds the others in the index: the turn that makes the table whole is as short as any."""
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    for part in range(3):
        fake.say(conditions(2, 20, part=part, parts=3))
    broker = net.brokers[0]
    assert broker is not None
    index = broker._rooms.interest._index
    before = index.stats()["selectors"]
    while waiting_updates(net):
        turn(net)
        assert 0 <= index.stats()["selectors"] - before <= 2
        before = index.stats()["selectors"]
    assert before == 60
    assert version(net, 2) == 1 << 32
    fake.say(conditions(2, 20, version=2 << 32))  # other conditions are gone
    while waiting_updates(net):
        turn(net)
    assert index.stats() | {"selectors": 20, "keys": 20} == index.stats()


def test_a_link_that_ends_takes_what_it_sent_with_it_and_a_bad_entry_ends_its_link() -> None:
    net = Net(1)
    fake, bad = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    fake.say(conditions(2, 50))
    net.give(0, [Closed(fake.connection)])
    assert waiting_updates(net) == 0
    wrong = InterestEntry(entry=99, topic="t", where="a = =")
    update = conditions(3, 5)
    bad.say(InterestUpdate(owner=3, base=0, version=1, added=(*update.added, wrong), removed=()))
    while waiting_updates(net):
        turn(net)
    assert "entry 99 of broker 3's interest" in bad.refused()
    assert version(net, 3) == 0


def test_claims_are_looked_at_in_pieces_too() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    claims = tuple(InterestClaim(entry=number, name=f"n{number}", epoch=1) for number in range(1, 3_001))
    fake.say(InterestUpdate(owner=2, base=0, version=1 << 32, added=(), removed=(), claims=claims))
    turns = 0
    while waiting_updates(net):
        turn(net)
        turns += 1
    assert turns >= 3_000 / waiting.UNITS_PER_TURN / 32 - 1
    assert version(net, 2) == 1 << 32


def test_what_waits_of_one_neighbour_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BYTES_PER_LINK", 100_000)
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    for part in range(5):
        fake.say(conditions(2, 50, part=part, parts=5))
    assert "bytes of interest wait to be taken in" in fake.refused()


def test_a_change_behind_one_that_waits_is_not_pulled() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.say(conditions(2, 50))
    entry = InterestEntry(entry=51, topic="u", where="")
    change = InterestUpdate(owner=2, base=1 << 32, version=(1 << 32) + 1, added=(entry,), removed=())
    fake.say(change)
    while waiting_updates(net):
        turn(net)
    assert version(net, 2) == (1 << 32) + 1
    assert fake.of(InterestPull) == []
