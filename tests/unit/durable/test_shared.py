"""Shared durable subscriptions through whole brokers: consumers divide the events (issue 3, part 7)."""

from __future__ import annotations

import json

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Consumer

from postroad.durable.subscriber import groups
from postroad.durable.subscriber.dividing import MAX_WINDOW
from postroad.events.batch import BatchBuilder
from postroad.seam.effects import Effect, Note
from postroad.seam.inputs import Input
from postroad.seam.storage import Save, StorageEffect
from postroad.wire.frames import DEFAULT_LIMITS, Ack, Ended, Reply, Request, Subscribed, encode


def keyed(client: DurableClient, *pairs: tuple[str, str]) -> bytes:
    builder = BatchBuilder()
    for key, payload in pairs:
        identity = client.ids.next(client.net.now_us // 1000)
        builder.add(identity, "t", {"k": key}, payload.encode(), DEFAULT_LIMITS)
    client.sequence += 1
    return builder.finish(channel=client.sequence, durable=True)


@pytest.mark.parametrize("at", [0, 1])
def test_each_event_to_one_consumer(at: int) -> None:
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    one, two = Consumer(net, at).begin(), Consumer(net, at).begin()
    net.wait(1)
    assert one.has(Subscribed)
    assert two.has(Subscribed)
    for number in range(0, 20, 2):
        publisher.send(publisher.durable("t", *numbers(number, number + 2)))
    net.wait(1)
    assert sorted(one.got() + two.got(), key=int) == numbers(0, 20)
    assert len(one.got()) == len(two.got()) == 10
    net.brokers[at].check()


def test_what_a_dead_consumer_held_goes_to_another() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one, two = Consumer(net, 0).begin(), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    held, kept = one.got(), two.got()
    one.ack(held[0])
    one.gone()
    assert two.got() == kept + held[1:]
    two.ack(*two.got())
    publisher.send(publisher.durable("t", "6"))
    assert two.got()[-1] == "6"
    net.brokers[0].check()


def test_the_last_consumer_leaves_and_what_was_not_acknowledged_comes_again() -> None:
    net = DurableNet(1)
    publisher, one = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    one.ack("1", "4")
    one.gone()
    publisher.send(publisher.durable("t", "6"))
    two = Consumer(net, 0).begin()
    net.wait(1)
    assert two.got() == ["0", "2", "3", "5", "6"]
    net.brokers[0].check()


@pytest.mark.parametrize("at", [0, 1])
def test_the_last_consumer_leaves_without_acknowledging_anything(at: int) -> None:
    """What it is offered again begins where the token is, below what it was offered before."""
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    first = Consumer(net, at).begin()
    net.wait(1)
    publisher.send(publisher.durable("other", "x"))
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 2)))
    net.wait(1)
    assert first.got() == ["0", "1"]
    first.gone()
    net.wait(1)
    for _ in range(2):
        again = Consumer(net, at).begin()
        net.wait(1)
        assert again.got() == ["0", "1"]
        again.gone()
    net.brokers[at].check()


def test_what_the_last_consumer_left_unacknowledged_of_a_past_may_be_lost() -> None:
    """D8: that past is refiltered, so the gap begins where the stream goes on, in silence or not."""
    net = DurableNet(1, max_age_us=20_000_000)
    publisher, since_us = DurableClient(net, 0), net.now_us
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(0, 3)))
    net.wait(1)
    first = Consumer(net, 0).begin(since_us=since_us)
    net.wait(1)
    assert first.got() == numbers(0, 3)
    ticks = [tick for batch in first.batches for tick in batch.headers["tick"].tolist()]
    first.gone()
    net.wait(40)
    publisher.send(publisher.durable("t", "new"))
    for _ in range(2):
        again = Consumer(net, 0).begin()
        net.wait(3)
        assert again.got() == ["GAP", "new"]
        assert again.batches[0].start == ticks[0] - 1
        again.gone()
    net.brokers[0].check()


def test_what_was_acknowledged_is_skipped_and_lets_the_token_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has anything to acknowledge then: storage is given back, and nothing comes again."""
    net = DurableNet(1)
    publisher, one = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    zero, other = "0" * 200_000, "1" * 200_000  # too large for one message
    publisher.send(publisher.durable("t", zero))
    net.wait(1)
    publisher.send(publisher.durable("t", other))
    net.wait(1)
    last = one.batches[-1].end
    one.ack(other)
    one.gone()
    monkeypatch.setattr(groups, "MAX_HELD_BYTES", 1)  # so that one is acknowledged before the next is offered
    two = Consumer(net, 0).begin()
    net.wait(1)
    assert two.got() == [zero]
    two.ack(zero)
    net.wait(1)
    two.send(encode(Request(number=1, what="subs", arguments={})))
    (reply,) = [one for one in two.messages if isinstance(one, Reply)]
    (row,) = json.loads(reply.body)["subscriptions"]
    assert min(row["released"].values()) >= last
    two.gone()
    three = Consumer(net, 0).begin()
    net.wait(1)
    assert three.got() == []
    net.brokers[0].check()


def test_a_group_without_consumers_that_matches_nothing_holds_no_storage() -> None:
    net = DurableNet(2, [(0, 1)], keep_us=2_000_000)
    publisher, one = DurableClient(net, 0), Consumer(net, 1).begin()
    net.wait(12)
    publisher.send(publisher.durable("t", "0", "1"))
    net.wait(1)
    one.ack("0", "1")
    one.gone()
    for _ in range(20):
        publisher.send(publisher.durable("other", "x" * 1_000))
        net.wait(1)
    net.wait(10)
    assert net.disks[0].kept(1 << 32) < 5
    publisher.send(publisher.durable("t", "2"))
    two = Consumer(net, 1).begin()
    net.wait(2)
    assert two.got() == ["2"]
    two.ack("2", ticket=1)
    assert two.acked() == [(1, "")]
    net.brokers[1].check()


@pytest.mark.parametrize("late", [False, True])
def test_what_was_acknowledged_is_not_given_out_again_after_a_crash(late: bool) -> None:
    """Acknowledged out of order above the token, and the token itself may be older on disk."""
    net = DurableNet(2, [(0, 1)])
    publisher, one = DurableClient(net, 0), Consumer(net, 1).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    one.ack("0", "1", "4", ticket=9)
    assert one.acked() == [(9, "")]
    if late:
        net.wait(1)
    net.kill(1)
    publisher.send(publisher.durable("t", "6"))
    net.start(1)
    net.link(0, 1)
    net.wait(2)
    two = Consumer(net, 1).begin()
    net.wait(3)
    assert two.got() == ["2", "3", "5", "6"]
    two.ack(*two.got())
    net.wait(1)
    two.gone()
    three = Consumer(net, 1).begin()
    net.wait(1)
    assert three.got() == []
    net.brokers[1].check()


def test_events_of_one_key_go_to_one_consumer_at_a_time() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one, two = Consumer(net, 0).begin(key="k"), Consumer(net, 0).begin(key="k")
    net.wait(1)
    publisher.send(keyed(publisher, ("a", "a0"), ("b", "b0"), ("a", "a1"), ("a", "a2"), ("b", "b1")))
    assert (one.got(), two.got()) == (["a0", "a1", "a2"], ["b0", "b1"])
    one.ack("a0")
    one.gone()
    assert two.got() == ["b0", "b1", "a1", "a2"]


def test_a_consumer_has_a_window_and_others_take_the_rest() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one = Consumer(net, 0).begin()
    net.wait(1)
    count = MAX_WINDOW + 50
    for number in range(0, count, 10):
        publisher.send(publisher.durable("t", *numbers(number, number + 10)))
    assert one.got() == numbers(0, MAX_WINDOW)
    two = Consumer(net, 0).begin()
    assert two.got() == numbers(MAX_WINDOW, count + 4)[: len(two.got())]
    assert len(two.got()) >= 50


def test_acknowledgements_are_confirmed_when_they_are_on_disk() -> None:
    """D11."""
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one, alone = Consumer(net, 0).begin(), Consumer(net, 0).begin("alone", shared=False)
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.slow.add(0)
    one.ack("a", ticket=1)
    token = json.dumps({"00000001-00000000": int(alone.batches[0].headers["tick"][0])})
    alone.send(encode(Ack(number=1, token=token, ticket=2)))
    net.wait(0.3)
    assert (one.acked(), alone.acked()) == ([], [])
    net.sync(0)
    net.sync(0)
    assert (one.acked(), alone.acked()) == ([(1, "")], [(2, "")])
    one.ack("a", ticket=3)
    assert one.acked() == [(1, ""), (3, "")], "nothing is left to be saved"
    net.disks[0].full = True
    alone.send(encode(Ack(number=1, token=token, ticket=4)))
    net.sync(0)
    assert alone.acked()[-1] == (4, "storage")


def test_a_group_that_could_not_be_saved_is_refused_to_all_who_came() -> None:
    net = DurableNet(1)
    net.wait(1)
    net.disks[0].full = True
    net.slow.add(0)
    consumers = [Consumer(net, 0).begin(), Consumer(net, 0).begin()]
    for _ in range(5):
        net.wait(0.5)
        net.sync(0)
    for one in consumers:
        (ended,) = [message for message in one.messages if isinstance(message, Ended)]
        assert (ended.code, ended.reason) == ("storage", "no space left")
    net.disks[0].full = False
    net.slow.clear()
    net.wait(1)
    assert Consumer(net, 0).begin(key="k").ended() == [], "there is none with another key"
    net.brokers[0].check()


def test_a_disk_that_refuses_is_not_asked_without_end() -> None:
    """What consumers are done with is saved when it can be; meanwhile the broker has other things to do."""
    net = DurableNet(1)
    publisher, one = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", "a", "b"))
    asked, do = 0, net.disks[0]._do

    def refuse(effect: StorageEffect) -> list[Input]:
        nonlocal asked
        asked += isinstance(effect, Save) and effect.table == groups.TABLE
        assert asked < 100, "turn after turn"
        return do(effect)

    net.disks[0]._do = refuse  # type: ignore[method-assign]
    net.disks[0].full = True
    one.ack("b", ticket=1)
    assert one.acked() == [(1, "storage")]
    net.wait(2)
    assert 2 <= asked <= 10
    one.ack("a", ticket=2)
    net.wait(1)
    assert one.acked()[-1] == (2, "storage")
    net.disks[0].full = False
    net.wait(1)
    net.kill(0)
    net.start(0)
    again = Consumer(net, 0).begin()
    net.wait(2)
    assert again.got() == []


def test_a_name_is_shared_or_it_is_not() -> None:
    net = DurableNet(1)
    Consumer(net, 0).begin("g", key="k")
    Consumer(net, 0).begin("alone", shared=False)
    net.wait(1)
    wrong = [
        Consumer(net, 0).begin("g", key="other"),
        Consumer(net, 0).begin("g", shared=False),
        Consumer(net, 0).begin("alone"),
        Consumer(net, 0).begin("new", ack=""),
        Consumer(net, 0).begin("new", shared=False, key="k"),
    ]
    assert [one.ended() for one in wrong] == [
        ["the durable subscription 'g' is shared with key 'k': delete it first, or choose another name"],
        ["the durable subscription 'g' is shared with key 'k': delete it first, or choose another name"],
        ["the durable subscription 'alone' is not shared: delete it first, or choose another name"],
        ["the token of a shared subscription is kept by the broker: choose an `ack`"],
        ["only a shared subscription is ordered by a key"],
    ]
    net.brokers[0].check()


def test_a_group_is_at_one_broker_and_others_say_which() -> None:
    """A broker that comes later knows it too; once it is deleted it may be anywhere."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    net.kill(2)
    publisher, one = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    net.start(2)
    net.link(1, 2)
    net.wait(1)
    elsewhere = ["the shared subscription 'g' is at broker 'b0': its consumers connect there"]
    for at in (1, 2):
        assert Consumer(net, at).begin().ended() == elsewhere
    publisher.send(publisher.durable("t", *numbers(0, 3)))
    net.wait(1)
    assert one.got() == numbers(0, 3), "the group is where it was"
    publisher.send(encode(Request(number=2, what="subs.delete", arguments={"name": "g"})))
    net.wait(1)
    other = Consumer(net, 2).begin()
    net.wait(1)
    assert other.has(Subscribed)
    for broker in net.brokers:
        assert broker is not None
        broker.check()


def test_a_group_made_in_two_partitions_is_at_one_broker_once_they_meet() -> None:
    """The higher epoch has the name, as with any durable name; the consumers of the other are told."""
    net = DurableNet(2, [(0, 1)])
    net.cut(0, 1)
    publisher, first = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    second, third = Consumer(net, 1).begin(), Consumer(net, 1).begin()
    net.wait(3)
    net.link(0, 1)
    net.wait(3)
    assert (len(first.ended()), second.ended(), third.ended()) == (1, [], [])
    publisher.send(publisher.durable("t", *numbers(0, 4)))
    net.wait(1)
    assert sorted(second.got() + third.got()) == numbers(0, 4)
    assert first.got() == []
    for broker in net.brokers:
        assert broker is not None
        broker.check()


def test_deleting_a_group_ends_its_consumers_and_leaves_nothing_on_disk() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one, two = Consumer(net, 0).begin(), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    one.ack(*one.got()[1:])
    net.wait(1)
    assert net.disks[0].tables["durable.groups"]
    publisher.send(encode(Request(number=1, what="subs")))
    reply = next(message for message in publisher.messages if isinstance(message, Reply))
    assert json.loads(reply.body)["groups"][0]["consumers"] == 2
    publisher.send(encode(Request(number=2, what="subs.delete", arguments={"name": "g"})))
    net.wait(1)
    assert one.ended() == two.ended() == ["the durable subscription 'g' was deleted"]
    assert net.disks[0].tables["durable.groups"] == {}
    again = Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", "6"))
    assert again.got() == ["6"]
    net.brokers[0].check()


def test_one_consumer_too_many_is_refused_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_CONSUMERS", 2)
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    one, two, three = (Consumer(net, 0).begin() for _ in range(3))
    net.wait(1)
    assert three.ended() == ["the shared subscription 'g' has 2 consumers: there cannot be more"]
    assert not three.has(Subscribed)
    net.brokers[0].check()
    one.gone()
    two.gone()
    publisher.send(encode(Request(number=1, what="subs")))
    reply = next(message for message in publisher.messages if isinstance(message, Reply))
    body = json.loads(reply.body)
    assert (body["subscriptions"][0]["connected"], body["groups"][0]["consumers"]) == (False, 0)
    net.brokers[0].check()
    assert Consumer(net, 0).begin().has(Subscribed)


@pytest.mark.parametrize("killed", [False, True])
def test_a_gap_goes_to_the_next_consumer_until_one_has_acknowledged_it(killed: bool) -> None:
    """Also when the broker dies meanwhile. Those who are there together are told all of them."""
    net = DurableNet(2, [(0, 1)], keep_us=2_000_000, max_age_us=20_000_000)
    publisher, one = DurableClient(net, 0), Consumer(net, 1).begin()

    def restart() -> None:
        net.kill(1)
        net.start(1)
        net.link(0, 1)

    net.wait(1)
    one.gone()
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(30)
    publisher.send(publisher.durable("t", "new"))
    restart()  # else it still has them in memory
    for _ in range(2):
        dying = Consumer(net, 1).begin()
        net.wait(3)
        assert dying.got() == ["GAP", "new"]
        dying.gone()
        if killed:
            restart()
    two = Consumer(net, 1).begin()
    net.wait(3)
    three = Consumer(net, 1).begin()
    net.wait(1)
    assert (two.got(), three.got()) == (["GAP", "new"], ["GAP"])
    two.ack("new", ticket=1)
    three.ack("GAP", ticket=1)
    assert two.acked() == three.acked() == [(1, "")]
    net.brokers[1].check()
    four = Consumer(net, 1).begin()
    for consumer in (two, three, four):
        consumer.gone()
    if killed:
        restart()
    five = Consumer(net, 1).begin()
    net.wait(3)
    assert (four.got(), five.got()) == ([], [])
    net.brokers[1].check()


def test_a_gap_leaves_out_what_was_acknowledged() -> None:
    """Lost is what nobody was done with, and the lag counts no more than that."""
    net = DurableNet(2, [(0, 1)], keep_us=2_000_000, max_age_us=20_000_000)
    publisher, one = DurableClient(net, 0), Consumer(net, 1).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 8)))
    net.wait(1)
    ticks = [tick for batch in one.batches for tick in batch.headers["tick"].tolist()]
    one.ack("1", "2", "5", ticket=1)
    assert one.acked() == [(1, "")]
    one.gone()
    net.wait(30)
    net.kill(1)  # else it still has them in memory
    net.start(1)
    net.link(0, 1)
    two = Consumer(net, 1).begin()
    net.wait(3)
    told = [(batch.start + 1, batch.end) for batch in two.batches if batch.lost]
    assert told == [(ticks[0], ticks[0]), (ticks[3], ticks[4]), (ticks[6], ticks[7])]
    two.send(encode(Request(number=1, what="subs")))
    reply = next(message for message in two.messages if isinstance(message, Reply))
    assert json.loads(reply.body)["subscriptions"][0]["lag_events"] == 5
    two.ack("GAP", ticket=1)
    net.brokers[1].check()
    two.gone()
    three = Consumer(net, 1).begin()
    net.wait(3)
    assert three.got() == []


class Logging(DurableNet):
    """Keeps the warnings of its brokers."""

    def __init__(self, count: int) -> None:
        self.warnings: list[str] = []
        super().__init__(count)

    def perform(self, at: int, effects: list[Effect]) -> None:
        self.warnings += [one.text for one in effects if isinstance(one, Note) and one.level == "warning"]
        super().perform(at, effects)


def test_who_holds_up_the_others_of_its_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: What waits for the keys of one that never acknowledges is bounded: then the group waits."""
    monkeypatch.setattr(groups, "MAX_HELD", 20)
    net = Logging(1)
    publisher = DurableClient(net, 0)
    hung, other = Consumer(net, 0).begin(key="k"), Consumer(net, 0).begin(key="k")
    net.wait(1)
    for number in range(60):
        publisher.send(keyed(publisher, ("a", f"a{number}"), ("b", f"b{number}")))
        other.ack(*other.got())
    net.wait(28)
    assert 18 <= len(other.got()) < 60
    assert net.warnings == []
    net.wait(5)
    (warning,) = net.warnings
    assert warning == (
        "the shared subscription 'g' waits: 20 events are not acknowledged, the oldest of them with client "
        f"'c' (connection {hung.connection}), which has acknowledged nothing for 30 s"
    )
    net.wait(60)
    assert len(net.warnings) == 2, "at growing intervals"
    hung.gone()
    for _ in range(10):
        other.ack(*other.got())
        net.wait(1)
    assert len(other.got()) == 120
    net.wait(120)
    assert len(net.warnings) == 2


def test_who_works_for_long_and_hinders_nobody_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_HELD", 20)
    net = Logging(1)
    publisher, one = DurableClient(net, 0), Consumer(net, 0).begin(key="k")
    net.wait(1)
    for number in range(60):
        publisher.send(keyed(publisher, ("a", str(number))))
    net.wait(100)
    assert len(one.got()) == 20
    assert net.warnings == []


def test_a_key_is_no_longer_than_the_name_of_an_attribute() -> None:
    """1 MB was taken, kept on disk and in memory, and left no room for anything else in a list."""
    net = DurableNet(1)
    assert Consumer(net, 0).begin(key="k" * 256).ended() == [
        "a key is the name of an attribute, which has up to 255 bytes: this one has 256"
    ]
    consumer = Consumer(net, 0).begin(key="k" * 255)
    net.wait(1)
    assert consumer.ended() == []
