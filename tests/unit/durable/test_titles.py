"""To whom durable names belong: principals that made them, at one broker and at several (spec D10)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader, names, reasons

from postroad.durable.subscriber.claims import NOBODY, Row, Title, ranked, title
from postroad.durable.subscriber.subscriptions import SUBSCRIPTIONS
from postroad.links.access import AuthConfig, Rule

PEOPLE = ("alice", "eve", "ops")
NOT_YOURS = ["denied"]


def guarded(net: DurableNet, *at: int) -> None:
    """From now on these brokers ask for tokens; anonymous clients are served as well. `ops` administers."""
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in PEOPLE}
    rules = (
        Rule(principal="ops", allow=True, action="admin"),
        Rule(principal="*", allow=False, action="admin"),
        Rule(principal="*", allow=True, action="link"),
    )
    auth = AuthConfig(tokens=tokens, anonymous=True, rules=rules)
    net.config = replace(net.config, auth=auth)
    for broker in at:
        net.kill(broker)
        net.start(broker)


def pair(linked: bool = True) -> DurableNet:
    net = DurableNet(2)
    guarded(net, 0, 1)
    if linked:
        net.link(0, 1)
        net.wait(1)
    return net


def attach(net: DurableNet, at: int, who: str, name: str = "s", **how: str) -> Reader:
    reader = Reader(net, at, who)
    reader.begin(name, **how)
    net.wait(2)
    return reader


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("ack", ["", "auto"])
def test_others_are_refused_at_every_broker_and_the_owner_is_not_disturbed(at: int, ack: str) -> None:
    net = pair()
    publisher, alice = DurableClient(net, 0), attach(net, 0, "alice", ack=ack)
    eve = attach(net, at, "eve", ack=ack)
    nobody = attach(net, at, "", ack=ack)
    assert (eve.ended(), nobody.ended()) == (NOT_YOURS, NOT_YOURS)
    assert "belongs to another principal" in reasons(eve)[0]
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    assert (alice.got(), alice.ended()) == (numbers(0, 5), [])
    assert names(net, 0)["s"] is False


def test_a_token_proves_a_position_and_no_identity() -> None:
    net = pair()
    publisher, alice = DurableClient(net, 0), attach(net, 0, "alice")
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    for at in (0, 1):
        assert attach(net, at, "eve", token=alice.token()).ended() == NOT_YOURS
    other = attach(net, 1, "alice", token=alice.token(), topic="t/else")
    assert other.ended() == ["usage"]
    assert alice.ended() == []
    moved = attach(net, 1, "alice", token=alice.token())
    publisher.send(publisher.durable("t", *numbers(5, 9)))
    net.wait(1)
    assert (moved.got(), alice.ended()) == (numbers(5, 9), ["moved"])


def test_an_administrator_may_use_a_name_and_does_not_get_it() -> None:
    net = pair()
    attach(net, 0, "alice", ack="auto").gone()
    ops = attach(net, 1, "ops", ack="auto")
    assert ops.ended() == []
    ops.gone()
    assert attach(net, 1, "eve", ack="auto").ended() == NOT_YOURS
    assert attach(net, 0, "alice", ack="auto").ended() == []


def test_what_is_nobodys_belongs_to_the_first_principal_that_attaches() -> None:
    """Names that anonymous clients made, and rows of before names had owners."""
    net = pair()
    attach(net, 0, "", ack="auto").gone()
    assert attach(net, 1, "alice", ack="auto").ended() == []
    assert attach(net, 0, "eve", ack="auto").ended() == NOT_YOURS
    assert attach(net, 0, "", ack="auto").ended() == NOT_YOURS
    old = DurableNet(1)
    attach(old, 0, "", "old", ack="auto").gone()
    table = old.disks[0].tables[SUBSCRIPTIONS]
    row = msgspec.msgpack.decode(table[b"old"])
    assert row.pop("principal") == ""
    table[b"old"] = msgspec.msgpack.encode(row)
    guarded(old, 0)
    assert attach(old, 0, "alice", "old", ack="auto").ended() == []
    old.kill(0)
    old.start(0)
    assert attach(old, 0, "eve", "old", ack="auto").ended() == NOT_YOURS


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_made_a_name_apart_it_belongs_to_the_first(first: int) -> None:
    """Whichever attached last: nobody takes a name by making it where its owner is not heard of."""
    net = pair(linked=False)
    alice = attach(net, first, "alice", ack="auto")
    eve = attach(net, 1 - first, "eve", ack="auto")
    assert (alice.ended(), eve.ended()) == ([], [])
    net.link(0, 1)
    net.wait(5)
    assert (alice.ended(), eve.ended()) == ([], NOT_YOURS)
    assert "s" not in names(net, 1 - first)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    assert alice.got() == numbers(0, 5)
    alice.gone()
    assert attach(net, 1 - first, "alice", ack="auto").ended() == []
    assert attach(net, first, "eve", ack="auto").ended() == NOT_YOURS


def test_an_owner_that_comes_while_its_broker_is_away_is_known_by_what_others_heard() -> None:
    net = DurableNet(3)
    guarded(net, 0, 1, 2)
    net.link(0, 1)
    net.wait(1)
    alice = attach(net, 0, "alice")
    net.wait(1)
    net.kill(0)
    net.link(1, 2)
    net.wait(1)
    publisher = DurableClient(net, 2)
    publisher.send(publisher.durable("t", *numbers(0, 3)))
    net.wait(1)
    assert attach(net, 2, "eve", token=alice.token()).ended() == NOT_YOURS


def test_claims_of_others_come_last_until_the_owners_are_gone() -> None:
    alice, later = Row(10, 1, 1, "alice", 5), Row(12, 3, 1, "alice", 9)
    eve, nobody, deleted = Row(20, 2, 1, "eve", 7), Row(11, 4, 1), Row(13, NOBODY, 0)
    assert title([eve, alice, later]) == Title(5, "alice")
    assert ranked([eve, alice, nobody, later]) == [later, nobody, alice, eve]
    assert ranked([eve, alice, later, deleted]) == [eve, deleted, later, alice]
    assert title([nobody, deleted]) is None
