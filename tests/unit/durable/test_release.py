"""Release through whole brokers with disks in memory (D7, D8): what is kept, for whom, and what becomes L."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.worlds.brokers import SECOND_US, Client, numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader
from tests.worlds.neighbours import Fake
from tests.worlds.turns import Turns, peer

from postroad.durable.publisher import release
from postroad.durable.publisher.release import TABLE, ReleaseRoot, Report, RetentionPolicy, read_owner
from postroad.durable.settings import DurableConfig
from postroad.durable.subscriber import hosting
from postroad.durable.subscriber.filtering import filtering_stream
from postroad.errors import UnavailableError
from postroad.seam.inputs import Closed
from postroad.seam.storage import Save
from postroad.wire.frames import (
    Advertisement,
    Attach,
    Kind,
    Refuse,
    Release,
    Reply,
    Request,
    TopologyUpdate,
    encode,
)

P = 1 << 32  # the durable pubend of the first broker
LINE = [(0, 1), (1, 2)]


def last_tick(net: DurableNet) -> int:
    return net.disks[0].records[P][-1][1]


def chopped(net: DurableNet) -> int:
    return net.disks[0].chopped.get(P, 0)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_everybody_acknowledged_is_reclaimed_here_and_there(at: int) -> None:
    """D7: up the tree, hop by hop; the filtering records go as well."""
    net = DurableNet(3, LINE)
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", ack="manual")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(20)
    assert reader.got() == numbers(0, 5)
    assert chopped(net) < net.disks[0].records[P][0][1], "it was delivered and not acknowledged"
    reader.ack()
    net.wait(20)
    assert chopped(net) == last_tick(net)
    assert net.disks[at].chopped[filtering_stream(P)] >= last_tick(net)
    publisher.send(publisher.durable("t", *numbers(5, 8)))
    net.wait(1)
    assert reader.got() == numbers(0, 8)


def test_the_slowest_subscriber_of_the_network_counts() -> None:
    net = DurableNet(3, LINE)
    publisher, fast, slow = DurableClient(net, 0), Reader(net, 1), Reader(net, 2)
    fast.begin("fast", ack="auto")
    slow.begin("slow", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    first = last_tick(net)
    fast.ack()
    slow.ack()
    slow.gone()
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    fast.ack()
    net.wait(30)
    assert first <= chopped(net) < last_tick(net)
    again = Reader(net, 2)
    again.begin("slow", ack="auto")
    net.wait(2)
    assert (again.got(), again.ended()) == (["b"], [])


def test_what_nobody_needs_goes_after_a_while() -> None:
    net = DurableNet(2, [(0, 1)], keep_us=5 * SECOND_US)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    net.wait(3)
    assert chopped(net) == 0
    reader = Reader(net, 1)
    reader.begin("s", since_us=net.now_us - 4 * SECOND_US)
    net.wait(2)
    assert reader.got() == ["a"], "kept for replay"
    reader.ack()
    net.wait(10)
    assert chopped(net) == last_tick(net)


def test_by_default_events_stay_for_a_week_whoever_has_acknowledged_them() -> None:
    """As users of Kafka and JetStream expect: who comes later reads the past."""
    net = DurableNet(2, [(0, 1)], keep_us=DurableConfig().keep_us)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    reader.ack()
    net.wait(600)
    later = Reader(net, 1)
    later.begin("later", since_us=net.now_us - 900 * SECOND_US)
    net.wait(2)
    assert (later.got(), chopped(net)) == (["a"], 0)


def test_what_nobody_needs_goes_earlier_where_it_is_more_than_may_be_kept() -> None:
    size = 100_000
    net = DurableNet(2, [(0, 1)], keep_us=3_600 * SECOND_US, keep_bytes=8 * size)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    for number in range(24):
        publisher.send(publisher.durable("t", f"{number}" + " " * size))
        net.wait(1)
    net.wait(30)
    assert chopped(net) == 0, "the subscriber has not acknowledged them"
    reader.ack()
    net.wait(30)
    assert 7 <= net.disks[0].kept(P) <= 9


def test_what_nobody_needs_makes_room_on_a_full_disk() -> None:
    net = DurableNet(2, [(0, 1)], keep_us=DurableConfig().keep_us)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    reader.ack()
    net.disks[0].short = True
    publisher.send(publisher.durable("t", "b"))
    net.wait(30)
    assert chopped(net) == last_tick(net)


def test_what_is_older_than_max_age_goes_although_it_would_be_kept_longer() -> None:
    net = DurableNet(2, [(0, 1)], keep_us=3_600 * SECOND_US, max_age_us=20 * SECOND_US)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    net.wait(15)
    assert chopped(net) == 0
    net.wait(15)
    assert chopped(net) == last_tick(net)


def test_early_release_by_age_is_one_gap_with_exact_bounds_for_who_was_away() -> None:
    """D8: the connected, caught-up subscriber of the same broker sees none."""
    net = DurableNet(3, LINE, keep_us=2 * SECOND_US, max_age_us=20 * SECOND_US)
    publisher, here, away = DurableClient(net, 0), Reader(net, 2), Reader(net, 2)
    here.begin("here", ack="auto")
    away.begin("away", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "both"))
    net.wait(1)
    away.ack()
    net.wait(1)
    away.gone()
    for number in range(5):
        publisher.send(publisher.durable("t", f"old {number}"))
        net.wait(1)
    first, last = net.disks[0].records[P][1][1], last_tick(net)
    net.wait(30)
    publisher.send(publisher.durable("t", "new"))
    net.wait(2)
    assert here.got() == ["both", *(f"old {n}" for n in range(5)), "new"]
    net.kill(2)  # else it still has them in memory
    net.start(2)
    net.link(1, 2)
    again = Reader(net, 2)
    again.begin("away", ack="auto")
    net.wait(3)
    assert again.got() == ["GAP", "new"]
    (gap,) = [batch for batch in again.batches if batch.lost]
    assert (gap.start + 1, gap.end) == (first, last), "from the first matching event that is lost to the last"
    publisher.send(publisher.durable("t", "newer"))
    net.wait(1)
    assert again.got() == ["GAP", "new", "newer"]


@pytest.mark.parametrize("size", [1_000_000, 10_000])
def test_early_release_by_size(size: int) -> None:
    """D8: also where little is to be kept, about as much as is asked for."""
    net = DurableNet(2, [(0, 1)], keep_us=2 * SECOND_US, max_bytes=8 * size)
    publisher, here, away = DurableClient(net, 0), Reader(net, 1), Reader(net, 1)
    here.begin("here")
    away.begin("away", ack="auto")
    net.wait(1)
    away.gone()
    sent = []
    for number in range(24):
        sent.append(f"{number}" + " " * size)
        publisher.send(publisher.durable("t", sent[-1]))
        net.wait(0.5)
    net.wait(10)
    assert here.got() == sent
    net.kill(1)
    net.start(1)
    net.link(0, 1)
    again = Reader(net, 1)
    again.begin("away", ack="auto")
    net.wait(5)
    assert again.got()[0] == "GAP"
    kept = again.got()[1:]
    assert kept == sent[-len(kept) :]
    assert 7 <= len(kept) <= 9, "as finely as sizes are remembered"


def test_a_broker_that_cannot_be_reached_holds_what_it_held() -> None:
    """Also over a restart of the publishing broker, which must not forget its owners."""
    net = DurableNet(3, LINE)
    publisher, reader = DurableClient(net, 0), Reader(net, 2)
    reader.begin("s", ack="auto")
    net.wait(3)
    net.cut(1, 2)
    publisher.send(publisher.durable("t", "a"))
    net.wait(30)
    net.kill(0)
    net.start(0)
    net.link(0, 1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "b"))
    net.wait(30)
    assert chopped(net) < net.disks[0].records[P][0][1]
    net.link(1, 2)
    net.wait(3)
    assert reader.got() == ["a", "b"]
    reader.ack()
    net.wait(20)
    assert chopped(net) == last_tick(net)


def test_reports_are_told_again_to_a_new_parent() -> None:
    net = DurableNet(4, [(0, 1), (1, 3)])
    publisher, reader = DurableClient(net, 0), Reader(net, 3)
    reader.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    net.kill(1)  # it held the reports
    reader.ack()
    net.wait(2)
    net.link(0, 2)
    net.link(2, 3)
    net.wait(20)
    assert chopped(net) == last_tick(net)


def test_the_last_subscription_of_a_broker_holds_nothing_once_it_is_deleted() -> None:
    """Though the broker, and with it the report that says so, dies at that moment."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(3)
    publisher.send(publisher.durable("t", "a"))
    net.wait(15)
    assert chopped(net) < last_tick(net)
    reader.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
    net.kill(1)
    net.wait(15)
    assert chopped(net) < last_tick(net)
    net.start(1)
    net.link(0, 1)
    net.wait(15)
    assert chopped(net) == last_tick(net)
    other = Reader(net, 1)
    other.begin("another")
    net.wait(1)
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    assert other.got() == ["b"], "it begins where it is made, not where the broker left off"


@pytest.mark.parametrize("at", [0, 1])
def test_a_crash_between_a_subscription_and_its_first_latest_delivered(at: int) -> None:
    """It is confirmed, so what comes after it is for it, though nothing else is on disk."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", ack="auto")
    assert reader.start
    net.slow.add(at)
    if at:
        publisher.send(publisher.durable("t", "a"))
    net.slow.clear()
    net.kill(at)
    net.start(at)
    if not at:
        publisher = DurableClient(net, 0)
        publisher.send(publisher.durable("t", "a"))
    net.link(0, 1)
    net.wait(2)
    publisher.send(publisher.durable("t", "b"))
    again = Reader(net, at)
    again.begin("s", ack="auto")
    net.wait(3)
    assert again.got() == ["a", "b"]


def test_a_plain_subscriber_holds_nothing() -> None:
    net = DurableNet(2, [(0, 1)], keep_us=2 * SECOND_US)
    publisher, plain = DurableClient(net, 0), Client(net, 1)
    plain.subscribe(1, "t")
    publisher.send(publisher.durable("t", "a"))
    net.wait(10)
    assert chopped(net) == last_tick(net)
    publisher.send(publisher.durable("t", "b"))
    net.wait(10)
    assert plain.got() == ["a", "b"]


def test_hostile_reports_cost_only_their_sender() -> None:
    net = DurableNet(1)
    for row in [
        (P, 2, 1, 5, 4, 0),
        (P, 0, 1, 1, 1, 0),
        (P, 2, -1, 1, 1, 0),
        (P, 2, 1, 1, 1 << 63, 0),
        (P | 1 << 31, 2, 1, 1, 1, 0),
        (P, 2, 1, 1, 1, 2),
    ]:
        client = Client(net, 0)
        client.send(encode(Release(reports=(row,))))
        assert client.has(Refuse), "a client does not report"
        broker = net.brokers[0]
        assert broker is not None
        with pytest.raises(Exception, match="a report"):
            broker._board.brokers[Release](
                Turns().turn(), peer(1, "broker", broker=2), Release(reports=(row,))
            )
    assert Kind.RELEASE == 38


def reports(owners: range, pubends: range) -> Release:
    """Of brokers without durable subscriptions, on pubends of the first broker."""
    return Release(reports=tuple((P + one, owner, 1, 0, 0, 1) for one in pubends for owner in owners))


def check_is_held_for(net: DurableNet, at: int) -> None:
    """A durable subscription at this broker is reported to the first."""
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", ack="manual")
    net.wait(12)  # a peer that does not say what it knows of the name, or follow it, is waited for
    publisher.send(publisher.durable("t", "a"))
    net.wait(20)
    assert reader.got() == ["a"]
    holding = net.brokers[0]._rooms.releasing._pubends[P][1]._holding()
    assert list(holding) == [at + 1]
    assert chopped(net) < last_tick(net)


def test_reports_that_a_peer_makes_up_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """D7."""
    monkeypatch.setattr(release, "MAX_REPORTS", 4)
    net = DurableNet(3, LINE)
    peer = Fake(net, 1, 9)
    peer.advertise()
    peer.say(reports(range(100, 200), range(1)), reports(range(9, 10), range(1, 200)))
    assert not peer.refused()
    check_is_held_for(net, 2)


def test_the_own_report_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """D7."""
    monkeypatch.setattr(release, "MAX_REPORTS", 2)
    net = DurableNet(1)
    peer = Fake(net, 0, 9)
    for broker in (9, 10, 11):
        peer.advertise(broker=broker)
    peer.say(reports(range(9, 11), range(1)))
    assert not peer.refused()
    peer.say(reports(range(11, 12), range(1)))
    assert "finds no room" in peer.refused()
    check_is_held_for(net, 0)


def test_reports_go_with_the_broker_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """D7: Once it is forgotten, after an hour out of reach."""
    monkeypatch.setattr(release, "MAX_REPORTS", 4)
    net = DurableNet(3, LINE)
    peer = Fake(net, 1, 9)
    for broker in range(9, 13):
        peer.advertise(broker=broker)
    peer.say(reports(range(9, 13), range(1)))
    net.wait(1)
    assert net.brokers[0]._rooms.releasing._pubends[P][1].owners == 4
    del net.ends[1, peer.connection]
    net.give(1, [Closed(peer.connection)])
    for _ in range(900):
        net.now_us += 5 * SECOND_US
        net.wait(0.1)
    check_is_held_for(net, 2)


class Root:
    """A release root and its table."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.begin()

    def begin(self) -> None:
        self.turns = Turns({TABLE: self.rows})
        self.root = ReleaseRoot(P, RetentionPolicy(keep_us=0), now_us=0)
        self.root.recover(self.turns.board.table(TABLE, read_owner))

    def report(self, owner: int, released: int, *, serial: int = 1, ended: bool = False) -> bool:
        report = Report(owner=owner, serial=serial, released=released, latest_delivered=released, ended=ended)
        return self.root.report(report)

    def save(self) -> None:
        for effect in self.turns.effects(self.root.close):
            assert isinstance(effect, Save)
            for key, value in effect.rows:
                if value is None:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = value
            self.turns.written(effect)

    @property
    def floor(self) -> int:
        return self.root.floor(1000, 1000, lambda _: 0)


def test_owners_that_have_ended_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MAX_OWNERS", 3)
    one = Root()
    for owner in range(1, 4):
        assert one.report(owner, 10 * owner)
    assert one.report(2, 20, serial=2, ended=True)
    one.save()
    assert not one.report(2, 20), "an older report may come late, by another route"
    assert one.report(4, 5)
    assert one.root.owners == 3
    assert one.floor == 5
    one.save()
    one.begin()
    assert one.root.owners == 3
    assert one.floor == 5


def test_nothing_is_released_while_somebody_holds_who_cannot_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "MAX_OWNERS", 2)
    one = Root()
    assert one.report(1, 10)
    assert one.report(2, 20)
    assert not one.report(3, 1, ended=True), "it holds nothing"
    for owner in (4, 5):
        with pytest.raises(UnavailableError, match="more than 2 brokers"):
            one.report(owner, 1)
    assert (one.floor, one.root.followed) == (0, True)
    assert not one.root.retire(5)
    assert one.floor == 0
    assert one.report(1, 30, serial=2, ended=True)
    assert one.floor == 0, "until that one reports again"
    assert one.report(4, 15, serial=2)
    assert one.floor == 15


def owners(net: DurableNet, at: int = 0) -> list[object]:
    return [one["owners"] for one in net.brokers[at]._rooms.releasing.status()]


def delete(reader: Reader, name: str) -> None:
    reader.send(encode(Request(number=9, what="subs.delete", arguments={"name": name})))


def test_a_broker_that_forgot_another_says_again_that_nothing_is_held() -> None:
    """D7.

    Its last subscription was deleted while the publishing broker was away, which was for over an hour.
    """
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(5)
    net.cut(0, 1)
    net.wait(2)
    delete(reader, "s")
    net.wait(6200)
    assert owners(net) != [[]]
    net.link(0, 1)
    net.wait(30)
    assert owners(net) == [[]]
    assert chopped(net) == last_tick(net)


def test_a_pubend_that_took_over_an_owner_hears_that_it_has_ended() -> None:
    """D7.

    A new pubend believes in an owner that was away, deleted its last subscription and restarted. It opens
    before its sibling, which has a log to read."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(5)
    net.kill(0)
    net.config = replace(net.config, durable=replace(net.config.durable, pubends=2))
    net.start(0)
    net.wait(3)
    delete(reader, "s")
    net.wait(3)
    assert len(owners(net)) == 2
    net.kill(1)
    net.start(1)
    assert all(owners(net))
    net.link(0, 1)
    net.wait(30)
    assert owners(net) == [[], []]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("phase", [0, 0.3, 0.6, 0.9])
def test_a_subscription_that_is_confirmed_is_held_for(before: bool, phase: float) -> None:
    """D7: Its broker is cut off at once, for longer than `keep`; it had a subscription before, or never."""
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "x"))
    net.wait(3)
    if before:
        first = Reader(net, 1)
        first.begin("s", ack="auto")
        net.wait(5)
        delete(first, "s")
        net.wait(5)
    net.wait(phase)
    reader = Reader(net, 1)
    reader.begin("new", ack="auto")
    while not reader.start:
        net.wait(0.01)
    net.cut(0, 1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(30)
    net.kill(0)
    net.start(0)
    net.link(0, 1)
    net.wait(5)
    assert reader.got() == numbers(0, 5)


def test_a_past_that_is_confirmed_is_held_for() -> None:
    """D7: Another subscription there has released it already."""
    net = DurableNet(2, [(0, 1)], keep_us=60 * SECOND_US)
    publisher, other = DurableClient(net, 0), Reader(net, 1)
    other.begin("other", ack="auto")
    net.wait(65)
    since_us = net.now_us - SECOND_US
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(20)
    other.ack()
    net.wait(10.5)
    reader = Reader(net, 1)
    reader.begin("new", ack="auto", since_us=since_us)
    while not reader.start:
        net.wait(0.005)
    reader.gone()
    net.cut(0, 1)
    net.wait(60)
    for at in (0, 1):
        net.kill(at)
        net.start(at)
    net.link(0, 1)
    net.wait(5)
    again = Reader(net, 1)
    again.begin("new", ack="auto")
    net.wait(5)
    assert again.got() == numbers(0, 5)


def test_who_never_had_a_durable_subscription_reports_nothing() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(30)
    assert net.brokers[0]._rooms.releasing._pubends[P][1].owners == 0


def test_a_clock_that_was_ahead_does_not_hold_storage() -> None:
    """D7."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    net.now_us += 3600 * SECOND_US
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader.ack()
    net.wait(2)
    net.now_us -= 3600 * SECOND_US
    for at in (0, 1):
        net.kill(at)
        net.start(at)
    net.link(0, 1)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    publisher.send(publisher.durable("t", *numbers(5, 9)))
    net.wait(5)
    assert reader.got() == numbers(5, 9)
    reader.ack()
    net.wait(60)
    assert chopped(net) == last_tick(net)


def test_a_pubend_that_opens_later_is_held_by_those_who_hold_its_siblings() -> None:
    """The history of a broker has a pubend of its own, opened when it is first wanted."""
    net = DurableNet(2, [(0, 1)])
    reader = Reader(net, 1)
    reader.begin("s", topic="$postroad/#")
    net.wait(1)
    net.cut(0, 1)
    net.wait(30)
    history = 1 << 32 | 0x7FFF_FFFF
    held = net.disks[0].records[history]
    assert held
    assert net.disks[0].chopped.get(history, 0) < held[0][1]
    net.link(0, 1)
    net.wait(5)
    assert not any(batch.lost for batch in reader.batches)
    reader.ack()
    net.wait(30)
    assert net.disks[0].chopped[history] >= held[0][1], "once it reports, it counts as any other"


def test_more_pubends_than_can_be_followed_end_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """D7.

    Brokers come and go, or a neighbour makes them up: who reads here goes on with those that it has.
    """
    monkeypatch.setattr(hosting, "MAX_FOLLOWED", 4)
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    fake = Fake(net, 0, 20)
    pubends = tuple(20 << 32 | number for number in range(6))
    fake.advertise(pubends=pubends)
    fake.say(Attach(origin=20, known=dict.fromkeys(pubends, 1)))
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 3)))
    net.wait(1)
    assert reader.got() == numbers(0, 3)
    later = Reader(net, 0)
    later.begin("later", ack="auto")
    net.wait(20)
    publisher.send(publisher.durable("t", *numbers(3, 5)))
    net.wait(1)
    assert later.got() == numbers(3, 5)
    for again in range(2):
        net.kill(0)
        net.start(0)
        net.wait(1)
        reader = Reader(net, 0)
        reader.begin("s", ack="auto")
        net.wait(1)
        publisher = DurableClient(net, 0)
        publisher.send(publisher.durable("t", str(again)))
        net.wait(1)
        assert reader.got()[-1:] == [str(again)]


def test_a_broker_that_follows_no_more_holds_nothing_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """D7: it follows one pubend of a broker, which then opens another, that of its history."""
    monkeypatch.setattr(hosting, "MAX_FOLLOWED", 2)
    net = DurableNet(2, [(0, 1)])
    Reader(net, 1).begin("s", ack="auto")
    net.wait(1)
    monkeypatch.setattr(hosting, "MAX_FOLLOWED", 3)
    watcher = Reader(net, 0)
    watcher.begin("w", topic="$postroad/#", ack="auto")
    net.wait(1)
    monkeypatch.setattr(hosting, "MAX_FOLLOWED", 2)
    for _ in range(6):
        net.wait(10)
        watcher.ack()
    net.wait(30)
    assert 1 << 32 | 0x7FFF_FFFF in net.disks[0].chopped


def test_own_pubends_keep_their_places_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: others are met before the disk has said how far an own one was."""
    monkeypatch.setattr(hosting, "MAX_FOLLOWED", 2)
    net = DurableNet(3, [(0, 1)])
    reader, publisher = Reader(net, 0), DurableClient(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    assert reader.got() == ["a"]
    net.kill(0)
    net.slow.add(0)
    net.start(0)
    net.link(0, 1)
    net.link(0, 2)
    net.wait(1)
    net.slow.clear()
    net.sync(0)
    net.wait(2)
    again, publisher = Reader(net, 0), DurableClient(net, 0)
    again.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "b"))
    net.wait(2)
    assert again.got() == ["a", "b"]


def test_heads_that_fit_no_answer_end_no_broker() -> None:
    """A neighbour makes up brokers with thousands of pubends each."""
    net = DurableNet(1)
    fake = Fake(net, 0, 20)
    for broker in range(20, 27):
        pubends = tuple(broker << 32 | number for number in range(4096))
        fake.advertise(broker=0 if broker == 20 else broker, pubends=pubends)
        fake.say(Attach(origin=broker, known=dict.fromkeys(pubends, net.now_us)))
    client = DurableClient(net, 0)
    client.send(encode(Request(number=1, what="heads")))
    assert [one.code for one in client.messages if isinstance(one, Reply)] == ["unavailable"]


def test_names_that_fit_no_answer_are_cut() -> None:
    net = DurableNet(1)
    fake = Fake(net, 0, 20)
    fake.advertise()
    made_up = tuple(
        Advertisement(
            broker=one,
            node=one.to_bytes(16, "big"),
            name="\u00e9" * 120 + str(one),
            boot=1,
            sequence=1,
            neighbours=(),
            pubends=(),
        )
        for one in range(1000, 6000)
    )
    for first in range(0, len(made_up), 400):
        fake.say(TopologyUpdate(advertisements=made_up[first : first + 400]))
    client = DurableClient(net, 0)
    client.send(encode(Request(number=2, what="subs.retire", arguments={"broker": f"{1000:08x}"})))
    net.wait(60)
    (reply,) = (one for one in client.messages if isinstance(one, Reply))
    assert reply.code == ""
    assert 100 < len(json.loads(reply.body)["missing"]) < 5000
