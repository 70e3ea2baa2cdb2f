"""What becomes of durable subscriptions that moved to a broker which is then retired, and of known names in
other orders of claims, failures and partitions: nobody begins one anew in silence (D7, D10)."""

from __future__ import annotations

import json
import random

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Consumer, Reader, names, reasons, retire

from postroad.broker.core import Broker
from postroad.durable.publisher.release import read_owner
from postroad.durable.retiring import read_retired
from postroad.durable.subscriber import claims
from postroad.durable.subscriber.claims import read_claims
from postroad.ids import Identity
from postroad.seam.inputs import Received
from postroad.seam.storage import Save
from postroad.wire.frames import Reply, Request, Subscribe, encode


class Mesh(DurableNet):
    """Four brokers, each linked with all others."""

    def __init__(self) -> None:
        super().__init__(4, [(one, other) for one in range(4) for other in range(one + 1, 4)])

    def isolate(self, at: int) -> None:
        for other in range(4):
            self.cut(at, other)

    def join(self, at: int) -> None:
        for other in range(4):
            if other != at and self.brokers[other] is not None:
                self.link(at, other)
        self.wait(2)

    def back(self, at: int) -> None:
        self.start(at)
        self.join(at)

    def restart(self, at: int) -> None:
        self.kill(at)
        self.back(at)


def move(net: Mesh, *brokers: int) -> Reader:
    """The subscription `s` is made at the first one, and goes on at the others; its last connection."""
    for at in brokers:
        reader = Reader(net, at)
        reader.begin("s", ack="auto")
        net.wait(1)
        assert (bool(reader.start), reader.ended()) == (True, [])
    return reader


def publish(net: Mesh, *payloads: str) -> None:
    publisher = DurableClient(net, 3)
    publisher.send(publisher.durable("t", *payloads))
    net.wait(1)


def goes_on(net: Mesh, at: int) -> list[str]:
    """What a subscriber of `s` gets at that broker."""
    reader = Reader(net, at)
    reader.begin("s", ack="auto")
    net.wait(2)
    assert reader.ended() == []
    return reader.got()


def refused(net: Mesh, at: int) -> str:
    reader = Reader(net, at)
    reader.begin("s", ack="auto")
    net.wait(6)
    assert (reader.ended(), reader.start) == (["unavailable"], {})
    return reasons(reader)[0]


def moved_to_a_broker_that_died(net: Mesh) -> None:
    """From 0 to 1, which had acknowledged nothing of five events."""
    move(net, 0)
    publish(net, *numbers(0, 5))
    move(net, 1)
    net.kill(1)
    net.wait(1)


@pytest.mark.parametrize("asked", [0, 2, 3])
def test_at_a_third_broker_it_goes_on_from_what_its_former_broker_has(asked: int) -> None:
    net = Mesh()
    moved_to_a_broker_that_died(net)
    assert retire(net, asked, "b1")[0] == ""
    assert names(net, 0) == {"s": False}
    assert goes_on(net, 2) == numbers(0, 5)
    assert names(net, 0) == {"s": True}
    net.wait(70)
    assert (names(net, 0), names(net, 2)) == ({}, {"s": False})


@pytest.mark.parametrize("restarted", [(0,), (2,), (0, 2), (2, 0)])
def test_also_after_restarts(restarted: tuple[int, ...]) -> None:
    net = Mesh()
    moved_to_a_broker_that_died(net)
    assert retire(net, 3, "b1")[0] == ""
    for at in restarted:
        net.restart(at)
    assert goes_on(net, 2) == numbers(0, 5)


@pytest.mark.parametrize("restarted", [(0,), (2,), (2, 0)])
def test_also_if_they_restarted_before_it_was_retired(restarted: tuple[int, ...]) -> None:
    net = Mesh()
    moved_to_a_broker_that_died(net)
    for at in restarted:
        net.restart(at)
    net.isolate(0)
    assert retire(net, 3, "b1")[0] == ""
    assert "kept by broker 'b0'" in refused(net, 2)
    assert retire(net, 0, "b1")[0] == ""
    net.join(0)
    assert goes_on(net, 2) == numbers(0, 5)


def test_while_its_former_broker_is_away_nobody_begins_anew() -> None:
    net = Mesh()
    moved_to_a_broker_that_died(net)
    assert retire(net, 3, "b1")[0] == ""
    net.kill(0)
    net.wait(1)
    assert "kept by broker 'b0'" in refused(net, 2)
    net.restart(2)
    assert "kept by broker 'b0'" in refused(net, 2)
    net.back(0)
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_former_broker_that_is_told_late() -> None:
    """It was down when its successor was retired, and holds what it has until it is told."""
    net = Mesh()
    moved_to_a_broker_that_died(net)
    net.kill(0)
    net.wait(1)
    assert retire(net, 3, "b1")[0] == ""
    net.back(0)
    net.wait(100)
    assert "kept by broker 'b1'" in refused(net, 2)
    assert names(net, 0) == {"s": True}
    assert retire(net, 3, f"{2:08x}")[0] == ""
    assert names(net, 0) == {"s": False}
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_third_broker_that_is_told_late_hears_the_claim() -> None:
    net = Mesh()
    moved_to_a_broker_that_died(net)
    net.isolate(2)
    assert retire(net, 0, "b1")[0] == ""
    net.join(2)
    assert goes_on(net, 2) == numbers(0, 5)


@pytest.mark.parametrize("restart", [False, True])
def test_the_newest_of_two_former_brokers_has_it(restart: bool) -> None:
    """What was acknowledged at the second does not come again from the first."""
    net = Mesh()
    move(net, 0)
    publish(net, *numbers(0, 5))
    reader = move(net, 1)
    net.wait(1)
    reader.ack()
    publish(net, *numbers(5, 8))
    move(net, 2)
    net.kill(2)
    net.wait(1)
    if restart:
        net.restart(0)
        net.restart(1)
    assert retire(net, 0, "b2")[0] == ""
    assert (names(net, 0), names(net, 1)) == ({"s": True}, {"s": False})
    assert goes_on(net, 3) == numbers(5, 8)


def moved_over_two_brokers_that_died() -> Mesh:
    """From b0, which lives, to b1 and on to b2."""
    net = Mesh()
    move(net, 0)
    publish(net, *numbers(0, 5))
    move(net, 1, 2)
    net.kill(2)
    net.kill(1)
    net.wait(1)
    return net


def test_the_newest_of_two_former_brokers_is_waited_for() -> None:
    net = moved_over_two_brokers_that_died()
    assert retire(net, 0, "b2")[0] == ""
    for at in (0, 3):
        assert "kept by broker 'b1'" in refused(net, at)
    assert retire(net, 0, "b1")[0] == ""
    assert goes_on(net, 3) == numbers(0, 5)


def test_both_were_retired_in_the_other_order() -> None:
    net = moved_over_two_brokers_that_died()
    assert retire(net, 0, "b1")[0] == ""
    assert "kept by broker 'b2'" in refused(net, 3)
    assert retire(net, 0, "b2")[0] == ""
    assert goes_on(net, 3) == numbers(0, 5)


def test_a_late_claim_of_the_retired_broker_does_not_count() -> None:
    """A broker that was not told still has its table, and gives it to one that restarts."""
    net = Mesh()
    moved_to_a_broker_that_died(net)
    net.isolate(3)
    assert retire(net, 0, "b1")[0] == ""
    net.restart(2)
    net.join(3)
    assert goes_on(net, 2) == numbers(0, 5)


def test_names_that_only_the_retired_broker_had_stay_free_though_its_table_comes_late() -> None:
    net = Mesh()
    move(net, 1)
    net.kill(1)
    net.wait(1)
    net.isolate(3)
    assert retire(net, 0, "b1")[0] == ""
    net.kill(2)
    net.start(2)
    net.link(2, 3)
    net.link(2, 0)
    net.wait(2)
    assert goes_on(net, 2) == []
    assert names(net, 2) == {"s": False}


@pytest.mark.parametrize("restart", [False, True])
def test_a_retired_broker_that_comes_back_has_its_names_again(restart: bool) -> None:
    net = Mesh()
    move(net, 1).gone()
    publish(net, *numbers(0, 5))
    net.isolate(1)
    assert retire(net, 0, "b1")[0] == ""
    if restart:
        net.kill(1)
        net.start(1)
    net.join(1)
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_retired_broker_that_comes_back_lets_go_of_what_its_former_broker_has() -> None:
    net = Mesh()
    move(net, 0)
    publish(net, *numbers(0, 5))
    there = move(net, 1)
    net.isolate(1)
    assert retire(net, 0, "b1")[0] == ""
    net.join(1)
    assert there.ended() == ["moved"]
    assert (names(net, 0), names(net, 1)) == ({"s": False}, {"s": True})
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_shared_one_is_at_its_former_broker_again() -> None:
    """Groups do not move; the same name was made in two partitions."""
    net = Mesh()
    net.isolate(1)
    Consumer(net, 0).begin().gone()
    net.wait(1)
    publish(net, *numbers(0, 5))
    Consumer(net, 1).begin()
    net.join(1)
    assert names(net, 0) == {"g": True}
    net.kill(1)
    net.wait(1)
    assert retire(net, 3, "b1")[0] == ""
    net.restart(0)
    assert Consumer(net, 2).begin().ended() == [
        "the shared subscription 'g' is at broker 'b0': its consumers connect there"
    ]
    consumer = Consumer(net, 0).begin()
    net.wait(2)
    assert consumer.got() == numbers(0, 5)


def test_a_former_broker_holds_on_while_the_new_one_is_away() -> None:
    """The minute begins when the new one is back: only then can it have reported."""
    net = Mesh()
    moved_to_a_broker_that_died(net)
    net.wait(120)
    assert names(net, 0) == {"s": True}
    net.back(1)
    net.wait(50)
    assert names(net, 0) == {"s": True}
    net.wait(20)
    assert names(net, 0) == {}
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_broker_whose_disk_fails_while_it_takes_over_still_knows_who_has_it() -> None:
    net = Mesh()
    move(net, 0).gone()
    publish(net, *numbers(0, 5))
    net.disks[2].full = True
    reader = Reader(net, 2)
    reader.begin("s", ack="auto")
    net.wait(1)
    assert reader.ended() == ["storage"]
    net.disks[2].full = False
    net.wait(1)
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_name_deleted_after_it_moved_is_not_handed_over_by_its_former_broker() -> None:
    net = Mesh()
    move(net, 0)
    publish(net, *numbers(0, 5))
    reader = move(net, 1)
    reader.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
    assert goes_on(net, 1) == []
    assert names(net, 1) == {"s": False}


def test_without_room_for_all_claims_no_unknown_name_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_CLAIMS", 1)
    net = Mesh()
    Reader(net, 0).begin("first", ack="auto")
    net.wait(1)
    move(net, 1).gone()
    publish(net, *numbers(0, 5))
    assert "it may be one of them" in refused(net, 2)
    assert goes_on(net, 1) == numbers(0, 5)


def known_only_on_disks(net: Mesh) -> None:
    """The broker that has it is gone, and those who heard its claim have restarted since."""
    publish(net, *numbers(0, 5))
    net.kill(1)
    for at in (0, 3):
        net.kill(at)
    for at in (0, 3):
        net.start(at)
    net.link(0, 3)
    net.wait(1)


def test_a_broker_that_joins_later_asks_the_others_before_a_name_begins() -> None:
    net = Mesh()
    net.kill(2)
    net.disks[2].tables.clear()
    net.disks[2].records.clear()
    move(net, 1).gone()
    known_only_on_disks(net)
    net.back(2)
    assert "kept by broker '00000002'" in refused(net, 2)
    consumer = Consumer(net, 2).begin("s")
    net.wait(1)
    assert consumer.ended() == [
        "the shared subscription 's' is at broker '00000002': its consumers connect there"
    ]
    net.back(1)
    assert goes_on(net, 2) == numbers(0, 5)


def test_a_broker_that_was_cut_off_while_a_name_moved_asks_the_others() -> None:
    net = Mesh()
    move(net, 0)
    net.isolate(2)
    move(net, 1).gone()
    net.wait(70)
    assert names(net, 0) == {}
    known_only_on_disks(net)
    net.join(2)
    assert "kept by broker 'b1'" in refused(net, 2)
    net.back(1)
    assert goes_on(net, 2) == numbers(0, 5)


def test_who_asks_waits_only_for_brokers_in_reach_and_not_for_ever() -> None:
    net = Mesh()
    held, net.brokers[1] = net.brokers[1], None  # it hangs
    reader, left = Reader(net, 2), Reader(net, 2)
    reader.begin("s", ack="auto")
    left.begin("other", ack="auto")
    left.gone()
    net.wait(3)
    assert (reader.start, reader.ended()) == ({}, [])
    net.wait(8)
    assert reader.start
    assert names(net, 2) == {"s": False}
    net.brokers[1] = held
    net.wait(15)
    net.brokers[1] = None
    third = Reader(net, 2)
    third.begin("third", ack="auto")
    for other in range(4):
        net.cut(1, other)
    net.wait(2)
    assert third.start


def test_names_of_one_turn_are_asked_for_together() -> None:
    """Two connections of one name: the later one has it, as if they had come one after the other."""
    net = Mesh()
    one, two = Reader(net, 2), Reader(net, 2)
    frames = [
        Received(reader.connection, encode(Subscribe(number=1, topic="t", where="", durable="s", ack="auto")))
        for reader in (one, two)
    ]
    net.give(2, [*frames])
    net.wait(1)
    assert (one.ended(), two.ended()) == (["usage"], [])
    publish(net, "a")
    assert two.got() == ["a"]


def test_an_unknown_name_with_since_begins_there() -> None:
    net = Mesh()
    begun_us = net.now_us
    publish(net, *numbers(0, 5))
    reader = Reader(net, 2)
    reader.begin("s", ack="auto", since_us=begun_us)
    net.wait(2)
    assert reader.got() == numbers(0, 5)


def test_an_old_table_of_a_broker_that_is_away_withdraws_nothing() -> None:
    """Brokers that restart get it from one that was cut off when the name was made."""
    net = Mesh()
    net.isolate(2)
    move(net, 1).gone()
    known_only_on_disks(net)
    net.join(2)
    assert "kept by broker 'b1'" in refused(net, 0)
    net.restart(0)
    assert "kept by broker 'b1'" in refused(net, 0)
    net.back(1)
    assert goes_on(net, 0) == numbers(0, 5)


def test_a_broker_without_a_disk_is_not_waited_for() -> None:
    net = Mesh()
    net.kill(1)
    net.boots[1] += 1
    identity = Identity(number=2, node=bytes([2]) * 16, name="b1", boot=net.boots[1], starts=net.boots[1])
    net.brokers[1] = Broker(net.config, identity, draw=random.Random(1).randrange, now_us=net.now_us)
    net.join(1)
    reader = Reader(net, 2)
    reader.begin("s", ack="auto")
    net.wait(1)
    assert reader.start


def retired(net: Mesh, at: int) -> dict[str, list[str]]:
    """Who has retired b1 and who has not, as an administrator is told who asks at that broker."""
    code, body = retire(net, at, "b1")
    answer = json.loads(body)
    assert (code, answer.pop("retired")) == ("", "b1")
    return answer


@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("harm", ["hangs", "fails"])
def test_a_broker_has_retired_another_when_that_is_on_its_disk(asked: int, harm: str) -> None:
    """Else a crash would undo what the administrator was told; the same at the broker that was asked."""
    net = Mesh()
    moved_to_a_broker_that_died(net)
    if harm == "hangs":
        net.slow.add(0)
    net.disks[0].full = harm == "fails"
    assert retired(net, asked) == {"done": ["b2", "b3"], "missing": ["b0"]}
    net.kill(0)
    net.slow.clear()
    net.disks[0].full = False
    net.back(0)
    assert "retired" not in net.disks[0].tables
    assert retired(net, asked) == {"done": ["b0", "b2", "b3"], "missing": []}
    net.restart(0)
    assert goes_on(net, 2) == numbers(0, 5)


@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("busy", [False, True])
def test_what_follows_from_a_retirement_is_on_disk_before_it_is_said_to_be_done(
    asked: int, busy: bool
) -> None:
    """Also where a save that is on its way holds it back."""
    net = Mesh()
    moved_to_a_broker_that_died(net)
    net.slow.add(0)
    if busy:
        Reader(net, 2).begin("other", ack="auto")
        net.wait(6)
        assert "durable.owners" in [one.table for one in net.disks[0].waiting if isinstance(one, Save)]
    client = DurableClient(net, asked)
    client.send(encode(Request(number=1, what="subs.retire", arguments={"broker": "b1"})))
    while not replies(client):
        assert net.disks[0].waiting, "nothing is under way"
        net.sync(0)
    tables = net.disks[0].tables
    assert [json.loads(reply.body)["done"] for reply in replies(client)] == [["b0", "b2", "b3"]]
    assert [read_retired(*row) for row in tables["retired"].items()] == [2]
    owners = {key[8:]: read_owner(key, value) for key, value in tables["durable.owners"].items()}
    assert owners[(2).to_bytes(4, "big")].ended
    assert all(one.broker != 2 for row in tables["durable.claims"].items() for one in read_claims(*row)[1])


def replies(client: DurableClient) -> list[Reply]:
    return [message for message in client.messages if isinstance(message, Reply)]


def test_a_broker_that_is_back_is_noted_again_if_the_disk_refused_it() -> None:
    """Else a start would ignore its claims, and a name that it hosts would begin anew in silence."""
    net = Mesh()
    move(net, 1).gone()
    publish(net, *numbers(0, 5))
    net.isolate(1)
    assert retire(net, 0, "b1")[0] == ""
    for at in (0, 2, 3):
        net.disks[at].full = True
    net.join(1)
    for at in (0, 2, 3):
        net.disks[at].full = False
    net.wait(5)
    assert [len(net.disks[at].tables.get("retired", {})) for at in (0, 2, 3)] == [0, 0, 0]
    for at in (0, 2, 3):
        net.restart(at)
    net.isolate(1)
    net.wait(2)
    reader = Reader(net, 2)
    reader.begin("s", ack="auto")
    net.wait(8)
    assert not reader.start
