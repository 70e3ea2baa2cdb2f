"""Durable subscriptions that go on at another broker, through whole brokers with disks in memory (D10)."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader, names, reasons, retire
from tests.worlds.neighbours import Fake

from postroad.units import SECOND_US
from postroad.wire.frames import Answer, Query, Reply, Request, Unsubscribe, encode

P = 1 << 32
LINE = [(0, 1), (1, 2)]


@pytest.mark.parametrize("there", [0, 1])
def test_a_token_kept_by_a_broker_is_handed_over_and_back(there: int) -> None:
    net = DurableNet(3, LINE)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    first.ack()
    first.gone()
    publisher.send(publisher.durable("t", *numbers(5, 10)))
    second = Reader(net, there)
    second.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(10, 15)))
    net.wait(1)
    assert (second.got(), second.ended()) == (numbers(5, 15), [])
    assert names(net, 2) == {"s": True}
    second.ack()
    second.gone()
    publisher.send(publisher.durable("t", *numbers(15, 20)))
    third = Reader(net, 2)
    third.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(20, 25)))
    net.wait(1)
    assert third.got() == numbers(15, 25)


def test_who_comes_back_can_tell_whether_it_is_the_subscription_that_it_was() -> None:
    """D8: wherever that is, and whoever was restarted; one that was made anew is another one, to whoever asks
    first and to all after it."""
    net = DurableNet(3, LINE)

    def born(at: int) -> int:
        reader = Reader(net, at)
        reader.begin("s", ack="auto")
        net.wait(2)
        reader.gone()
        (begun,) = reader.begun
        return begun.born

    first = born(2)
    assert first > 0
    assert [born(at) for at in (2, 0, 0, 1)] == [first] * 4
    net.kill(1)
    net.start(1)
    net.link(0, 1)
    net.link(1, 2)
    net.wait(2)
    assert [born(at) for at in (1, 2)] == [first] * 2
    client = DurableClient(net, 2)
    client.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
    net.wait(2)
    second = born(2)
    assert second not in (0, first)
    assert [born(at) for at in (2, 0)] == [second] * 2
    keeper = Reader(net, 0)
    keeper.begin("own")
    net.wait(2)
    assert [message.born for message in keeper.begun] == [0], "its token says where it was"


def test_the_former_broker_lets_go_of_storage() -> None:
    net = DurableNet(3, LINE)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    token = first.token()
    first.gone()
    second = Reader(net, 1)
    second.begin("s", token=token)
    net.wait(5)
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    second.ack()
    net.wait(20)
    assert (names(net, 2), names(net, 1)) == ({"s": True}, {"s": False})
    last = net.disks[0].records[P][-1][1]
    assert net.disks[0].chopped.get(P, 0) < last, "it holds what was not acknowledged there, for a minute"
    net.wait(60)
    assert names(net, 2) == {}
    assert net.disks[0].chopped[P] == last
    assert second.got() == ["b"]


def test_a_connected_subscriber_is_ended_when_its_name_is_taken_elsewhere() -> None:
    net = DurableNet(3, LINE)
    first, second = Reader(net, 2), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    second.begin("s", ack="auto")
    net.wait(1)
    assert first.ended() == ["moved"]
    assert "at broker 'b0'" in reasons(first)[0]
    assert (second.ended(), bool(second.start)) == ([], True)
    third = Reader(net, 1)
    third.begin("s", token=second.token())
    net.wait(1)
    assert second.ended() == ["moved"]


def test_while_the_former_broker_is_away_nobody_begins_anew() -> None:
    """Also after a restart of the broker that is asked, before it has heard anything."""
    net = DurableNet(3, LINE)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", "a"))
    net.kill(2)
    net.wait(1)
    second = Reader(net, 1)
    second.begin("s", ack="auto")
    net.wait(1)
    assert second.ended() == ["unavailable"]
    assert "kept by broker 'b2'" in reasons(second)[0]
    net.kill(1)
    net.start(1)
    third = Reader(net, 1)
    third.begin("s", ack="auto")
    assert third.ended() == ["unavailable"]
    net.start(2)
    net.link(0, 1)
    net.link(1, 2)
    net.wait(2)
    fourth = Reader(net, 1)
    fourth.begin("s", ack="auto")
    net.wait(2)
    assert (fourth.got(), fourth.ended()) == (["a"], [])


def remembered(reader: Reader) -> dict[str, object]:
    """What a client that was attached knows: its token, and which attachment it was."""
    return {"token": reader.token(), "epoch": reader.begun[-1].epoch, "ack": "auto"}


def test_who_remembers_its_token_goes_on_while_its_broker_is_dead_and_that_lets_go_when_it_is_back() -> None:
    """D10, D11, issue "found, not configured": the client saw all that it acknowledged."""
    net = DurableNet(3, [*LINE, (0, 2)])
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    first.ack()
    first_token, born = remembered(first), first.begun[-1].born
    publisher.send(publisher.durable("t", *numbers(5, 10)))
    net.kill(2)
    net.wait(1)
    second = Reader(net, 1)
    second.begin("s", **first_token)  # type: ignore[arg-type]
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(10, 15)))
    net.wait(1)
    assert (second.got(), second.ended()) == (numbers(5, 15), [])
    assert [begun.born for begun in second.begun] == [born], "it is the subscription that it was"
    assert not second.begun[-1].created
    second.ack()
    net.start(2)
    net.link(0, 2)
    net.link(1, 2)
    net.wait(5)
    assert (names(net, 2), names(net, 1)) == ({"s": True}, {"s": False})
    assert second.ended() == []
    net.wait(65)
    assert names(net, 2) == {}
    assert net.disks[0].kept(P) == 0, "nobody holds anything"
    third = Reader(net, 2)
    third.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", "last"))
    net.wait(1)
    assert (third.got(), second.ended()) == (["last"], ["moved"])


def test_a_token_of_before_somebody_else_was_attached_is_not_gone_on_with() -> None:
    """What that one acknowledged would be delivered twice under this name."""
    net = DurableNet(3, [*LINE, (0, 2)])
    publisher, first = DurableClient(net, 0), Reader(net, 1)
    first.begin("s", ack="auto")
    net.wait(2)
    old = remembered(first)
    first.gone()
    second = Reader(net, 2)
    second.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    second.ack()
    net.wait(1)
    net.kill(2)
    for at in (0, 1):
        late = Reader(net, at)
        late.begin("s", **old)  # type: ignore[arg-type]
        net.wait(1)
        assert late.ended() == ["unavailable"]
        assert late.got() == []


def test_while_its_broker_can_be_asked_that_one_knows_the_token_best() -> None:
    """An acknowledgement that was not confirmed may be on its disk; what the client remembers is less."""
    net = DurableNet(3, LINE)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(2)
    old = remembered(first)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    first.ack()
    first.gone()
    for at in (2, 1):
        reader = Reader(net, at)
        reader.begin("s", **old)  # type: ignore[arg-type]
        net.wait(2)
        assert (reader.got(), reader.ended()) == ([], [])
        old = remembered(reader)
        reader.gone()


def test_an_epoch_without_a_token_that_a_broker_keeps_is_a_clear_error() -> None:
    net = DurableNet(1)
    for number, wrong in enumerate(({"ack": "auto"}, {"token": "{}"})):
        reader = Reader(net, 0)
        reader.begin(f"s{number}", epoch=5, **wrong)
        assert reader.ended() == ["usage"]
        assert "epoch 5" in reasons(reader)[0]
    assert names(net, 0) == {}


def test_a_token_that_is_remembered_is_no_past_of_streams_that_it_does_not_name() -> None:
    """Its broker did not know of them; to begin with their first tick would be to begin before itself."""
    net = DurableNet(3, [(1, 2)], keep_us=3_600 * 1_000_000)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(60)
    first = Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(6)
    token = remembered(first)
    net.kill(2)
    net.link(0, 1)
    net.wait(2)
    second = Reader(net, 1)
    second.begin("s", **token)  # type: ignore[arg-type]
    net.wait(2)
    publisher.send(publisher.durable("t", "new"))
    net.wait(2)
    assert (second.got(), second.ended()) == (["new"], [])


def test_silence_that_its_broker_went_over_is_no_gap_after_its_death() -> None:
    """What matched nothing of it was released; the client was told so, and drops a gap that it knows of."""
    net = DurableNet(3, [*LINE, (0, 2)], keep_us=2 * 1_000_000)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(2)
    for _ in range(30):
        publisher.send(publisher.durable("other", "x"))
        net.wait(1)
    released = net.disks[0].chopped[P]
    assert json.loads(first.token())["00000001-00000000"] >= released > 0
    net.kill(2)
    second = Reader(net, 1)
    second.begin("s", **remembered(first))  # type: ignore[arg-type]
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    assert (second.got(), second.ended()) == (["a"], [])


def test_a_former_broker_that_does_not_answer() -> None:
    net = DurableNet(3, LINE)
    Reader(net, 2).begin("s", ack="auto")
    net.wait(1)
    held = net.brokers[2]
    net.brokers[2] = None  # it hangs
    reader = Reader(net, 0)
    reader.begin("s", ack="auto")
    net.wait(4)
    assert reader.ended() == []
    net.wait(2)
    assert reader.ended() == ["unavailable"]
    reader.begin("s", ack="auto")
    reader.send(encode(Unsubscribe(number=1)))
    assert reader.ended() == ["unavailable", ""]
    reader.begin("s", ack="auto")
    reader.gone()
    net.brokers[2] = held
    net.wait(10)
    assert names(net, 0) == {}


def test_another_selector_is_refused_by_the_former_broker() -> None:
    net = DurableNet(2, [(0, 1)])
    Reader(net, 1).begin("s", ack="auto")
    net.wait(1)
    reader = Reader(net, 0)
    reader.begin("s", ack="auto", topic="other")
    net.wait(1)
    assert reader.ended() == ["usage"]
    assert names(net, 1) == {"s": False}


def test_deleted_elsewhere_means_begun_anew() -> None:
    net = DurableNet(3, LINE)
    publisher, first = DurableClient(net, 0), Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "before"))
    first.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
    net.wait(1)
    second = Reader(net, 0)
    second.begin("s", ack="auto", topic="t")
    net.wait(1)
    publisher.send(publisher.durable("t", "after"))
    net.wait(1)
    assert (second.got(), second.ended()) == (["after"], [])


def delete(net: DurableNet, at: int, name: str) -> None:
    client = DurableClient(net, at)
    client.send(encode(Request(number=1, what="subs.delete", arguments={"name": name})))
    net.wait(1)
    assert [message.code for message in client.messages if isinstance(message, Reply)] == [""]


def claimed(net: DurableNet) -> list[int]:
    """Brokers with something on their disks about names at others."""
    return [at for at, disk in enumerate(net.disks) if disk.tables.get("durable.claims")]


def deleted_while_away(net: DurableNet, publisher: DurableClient) -> None:
    """A subscription moves from b1, which is down, to b2, by its token, and is deleted there."""
    first = Reader(net, 1)
    first.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    first.ack()
    net.wait(1)
    net.kill(1)
    second = Reader(net, 2)
    second.begin("s", token=first.token())
    net.wait(1)
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    assert second.got() == ["b"]
    second.ack()
    delete(net, 2, "s")


@pytest.mark.parametrize("meanwhile", ["nothing", "restarts", "the deleting broker dies", "hours"])
def test_what_was_deleted_does_not_come_back_with_a_former_broker(meanwhile: str) -> None:
    """D7, D10: whoever remembers that it was deleted tells the one that was away."""
    net = DurableNet(3, [(0, 1), (0, 2)])
    publisher = DurableClient(net, 0)
    deleted_while_away(net, publisher)
    if meanwhile == "restarts":
        net.kill(2)
        net.kill(0)
        net.start(0)
        net.start(2)
        net.link(0, 2)
        publisher = DurableClient(net, 0)
    elif meanwhile == "the deleting broker dies":
        net.kill(2)
    elif meanwhile == "hours":
        net.wait(2 * 3600)
    net.start(1)
    net.link(0, 1)
    net.wait(3)
    assert names(net, 1) == {}
    publisher.send(publisher.durable("t", "c"))
    net.wait(20)
    assert net.disks[0].chopped[P] == net.disks[0].records[P][-1][1], "nothing is held for it"
    again = Reader(net, 1)
    again.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "d"))
    net.wait(1)
    assert (again.got(), again.ended()) == (["d"], [])
    delete(net, 1, "s")
    net.wait(1)
    assert claimed(net) == ([2] if meanwhile == "the deleting broker dies" else [])


def test_a_former_broker_of_whom_the_deleting_one_never_heard() -> None:
    net = DurableNet(3, [(0, 1)])
    publisher, first = DurableClient(net, 0), Reader(net, 1)
    first.begin("s")
    net.wait(1)
    net.kill(1)
    net.link(0, 2)
    second = Reader(net, 2)
    second.begin("s", token=first.token())
    net.wait(1)
    delete(net, 2, "s")
    publisher.send(publisher.durable("t", "a"))
    net.start(1)
    net.link(0, 1)
    net.wait(3)
    assert (names(net, 1), claimed(net)) == ({}, [])


def test_a_connected_subscriber_whose_name_was_deleted_beyond_a_partition_is_told() -> None:
    net = DurableNet(3, [(0, 1), (0, 2)])
    first = Reader(net, 1)
    first.begin("s")
    net.wait(1)
    net.cut(0, 1)
    second = Reader(net, 2)
    second.begin("s", token=first.token())
    net.wait(1)
    delete(net, 2, "s")
    assert first.ended() == []
    net.link(0, 1)
    net.wait(3)
    assert reasons(first) == ["the durable subscription 's' was deleted"]
    assert (names(net, 1), claimed(net)) == ({}, [])


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_name_that_is_made_again_after_its_deletion_is_another_one(where: int) -> None:
    """What a former broker held is deleted, also if the new one is lost for good; the new one stays."""
    net = DurableNet(4, [(0, 1), (0, 2), (0, 3)])
    publisher = DurableClient(net, 0)
    deleted_while_away(net, publisher)
    if where == 1:  # made at the former broker itself, before it hears of the deletion
        net.start(1)
    again = Reader(net, where)
    again.begin("s", ack="auto")
    net.wait(1)
    if where != 1:
        net.start(1)
    net.link(0, 1)
    net.wait(3)
    publisher.send(publisher.durable("t", "c"))
    net.wait(1)
    assert (again.got()[-1:], again.ended()) == (["c"], [])
    assert names(net, where) == {"s": False}
    if where == 2:
        net.kill(2)
        assert retire(net, 0, "b2")[0] == ""
        assert names(net, 1) == {}
    net.wait(65)
    assert sum(len(names(net, at)) for at in (0, 1, 3)) == (where != 2)


@pytest.mark.parametrize("restarted", [(), (0,), (0, 2)])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_a_clock_that_was_ahead_deletes_no_name_that_is_made_later(where: int, restarted: tuple[int]) -> None:
    """D10.

    b2, whose clock is ahead, has the name and deletes it while b1 is down. When b1 is back it knows b2's
    old claim only: what was made since, at a broker that remembers it or was never told, is another one."""
    net = DurableNet(4, [(0, 1), (0, 2)])
    net.ahead_us[2] = 60 * SECOND_US
    net.wait(1)
    first = Reader(net, 2)
    first.begin("s")
    net.wait(1)
    first.gone()
    net.kill(1)
    delete(net, 2, "s")
    net.ahead_us[2] = 0
    for at in restarted:
        net.kill(at)
        net.start(at)
    if restarted:
        net.link(0, 2)
    net.link(0, 3)
    net.wait(1)
    again = Reader(net, where)
    again.begin("s")
    net.wait(1)
    net.start(1)
    net.link(0, 1)
    net.wait(3)
    assert (bool(again.start), again.ended()) == (True, [])
    assert names(net, where) == {"s": False}


def test_a_broker_that_crashes_before_it_has_written_that_it_took_a_name_back_has_not_taken_it() -> None:
    """D10.

    Else the one that had it lets go, and so does the other, which remembers only that it had let go.
    """
    net = DurableNet(3, [(0, 1), (0, 2)])
    publisher, first = DurableClient(net, 0), Reader(net, 1)
    first.begin("s")
    net.wait(1)
    second = Reader(net, 2)
    second.begin("s", token=first.token())
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    net.slow.add(1)
    third = Reader(net, 1)
    third.begin("s", token=first.token())
    net.wait(1)
    assert third.begun == []
    net.kill(1)
    net.slow.clear()
    second.gone()
    net.start(1)
    net.link(0, 1)
    net.wait(100)
    assert (names(net, 1), names(net, 2)) == ({}, {"s": False})
    last = Reader(net, 1)
    last.begin("s", token=first.token())
    net.wait(1)
    assert last.got() == ["a"]


def test_a_name_made_in_two_partitions_is_that_of_the_later_one() -> None:
    net = DurableNet(2)
    one, two = Reader(net, 0), Reader(net, 1)
    one.begin("s", ack="auto")
    net.wait(1)
    two.begin("s", ack="auto")
    net.wait(1)
    net.link(0, 1)
    net.wait(2)
    assert (one.ended(), two.ended()) == (["moved"], [])
    assert (names(net, 0), names(net, 1)) == ({"s": True}, {"s": False})
    net.wait(65)
    assert names(net, 0) == {}


def test_the_new_broker_dies_before_its_disk_has_the_subscription() -> None:
    """Handing over is not letting go."""
    net = DurableNet(2, [(0, 1)])
    publisher, first = DurableClient(net, 0), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    first.gone()
    net.slow.add(1)
    second = Reader(net, 1)
    second.begin("s", ack="auto")
    net.wait(1)
    net.slow.clear()
    net.kill(1)
    net.wait(70)
    assert names(net, 0) == {"s": False}
    third = Reader(net, 0)
    third.begin("s", ack="auto")
    net.wait(1)
    assert third.got() == ["a"]


def test_the_former_broker_restarts_and_knows_that_it_moved() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, first = DurableClient(net, 0), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    second = Reader(net, 1)
    second.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    second.ack()
    net.wait(1)
    net.kill(0)
    net.start(0)
    third = Reader(net, 0)
    third.begin("s", ack="auto")
    assert third.ended() == ["unavailable"], "nothing is heard of the other broker yet"
    net.link(0, 1)
    net.wait(1)
    third.begin("s", ack="auto")
    net.wait(2)
    assert (third.got(), bool(third.start)) == ([], True)


def test_a_retired_broker_holds_nothing_and_its_names_are_free() -> None:
    """D7: asked at any broker; also what it says when some cannot be reached, and over restarts."""
    net = DurableNet(4, [*LINE, (1, 3)])
    publisher, reader = DurableClient(net, 0), Reader(net, 2)
    reader.begin("s", ack="auto")
    net.wait(2)
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    assert retire(net, 0, "b2")[0] == "usage", "it is there"
    assert retire(net, 0, "nobody")[0] == "usage"
    net.kill(2)
    net.wait(20)
    last = net.disks[0].records[P][-1][1]
    assert net.disks[0].chopped.get(P, 0) < last
    net.cut(1, 3)
    code, body = retire(net, 1, "b2")
    assert (code, json.loads(body)) == ("", {"retired": "b2", "done": ["b0", "b1"], "missing": ["b3"]})
    net.wait(15)
    assert net.disks[0].chopped[P] == last
    for at in (0, 1):
        net.kill(at)
        net.start(at)
    net.link(0, 1)
    net.link(1, 3)
    net.wait(15)
    away = Reader(net, 3)
    away.begin("s", ack="auto")
    assert away.ended() == ["unavailable"], "it was not asked"
    assert retire(net, 0, f"{3:08x}")[0] == ""
    away.begin("s", ack="auto")
    net.wait(1)
    assert away.start, "it begins anew"
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    assert away.got() == ["b"]


def test_a_retired_broker_that_comes_back_gets_gaps() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(2)
    net.cut(0, 1)
    publisher.send(publisher.durable("t", "lost"))
    net.wait(1)
    assert retire(net, 0, "b1")[0] == ""
    net.wait(15)
    publisher.send(publisher.durable("t", "kept"))
    net.link(0, 1)
    net.wait(2)
    assert reader.got() == ["GAP", "kept"]
    publisher.send(publisher.durable("t", "more"))
    net.wait(15)
    assert net.disks[0].chopped[P] < net.disks[0].records[P][-1][1], "it is an owner again"


NO_TEXT = b"\xa1\xff"  # of one byte, which is not UTF-8
DEEP = b"\x91" * 5_000  # lists in lists


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("handover", b"\x95" + NO_TEXT + b"\xa0\xa0\xc2\xa0"),
        ("handover", b"\x96\xa0\xa0\xa0\xc2\xa0" + DEEP),
        ("claims", b"\x91" + NO_TEXT),
        ("deleted", b"\x91\x92" + NO_TEXT + b"\x01"),
        ("trace", b"\x92\x90" + DEEP),
    ],
)
def test_a_question_that_cannot_be_read_has_no_answer(what: str, body: bytes) -> None:
    """Nor does it end the broker, nor the link to whoever passed it on."""
    net = DurableNet(1)
    other = Fake(net, 0, 9)
    other.advertise()
    for number, asked in enumerate([body, msgspec.msgpack.encode([])], 1):
        other.say(Query(source=9, target=1, number=number, hops=5, what=what, body=asked))
    other.say(Query(source=9, target=1, number=3, hops=5, what="claims", body=msgspec.msgpack.encode(["s"])))
    answers = other.of(Answer)
    assert (answers[-1].number, answers[-1].body) == (3, msgspec.msgpack.encode([]))
    assert 1 not in [message.number for message in answers]


@pytest.mark.parametrize("body", [b"\x91" + NO_TEXT, b"\x95\xa0\x00\xa0\xa0" + DEEP])
def test_a_token_that_cannot_be_read_is_none(body: bytes) -> None:
    """Its subscriber hears so, and may try again."""
    net = DurableNet(2, [(0, 1)])
    first, second = Reader(net, 1), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    net.cut(0, 1)
    other = Fake(net, 0, 2)  # in its place
    other.advertise()
    second.begin("s", ack="auto")
    net.wait(0.1)
    (query,) = other.of(Query)
    other.say(Answer(source=2, target=1, number=query.number, hops=5, body=body))
    assert second.ended() == ["unavailable"]


@pytest.mark.parametrize(
    "body", [b"\x91\x94" + NO_TEXT + b"\x01\x02\x03", b"\x91\x95\xa0\x01\x02\x03" + DEEP]
)
def test_who_answers_what_cannot_be_read_knows_of_no_claims(body: bytes) -> None:
    net = DurableNet(1)
    other, reader = Fake(net, 0, 9), Reader(net, 0)
    other.advertise()
    reader.begin("s", ack="auto")
    (query,) = other.of(Query)
    other.say(Answer(source=9, target=1, number=query.number, hops=5, body=body))
    net.wait(1)
    assert "s" in names(net, 0)
