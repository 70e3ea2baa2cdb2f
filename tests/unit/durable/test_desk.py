"""What `postroad subs` is answered: the lag, lists by pages, what moved, deletion on disk (D11)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Consumer, Reader

from postroad.cli.subs import _line
from postroad.durable.subscriber import desk as durable_desk
from postroad.ids import pubend_text
from postroad.links.access import AuthConfig, hash_token
from postroad.overlay.interest_entries import Claim
from postroad.seam import switchboard
from postroad.wire.frames import Ack, Kind, Reply, Request, Subscribe, Subscribed, encode, frame_kind


def ask(net: DurableNet, at: int, what: str = "subs", **arguments: str) -> Reply | None:
    client = DurableClient(net, at)
    client.send(encode(Request(number=1, what=what, arguments=arguments)))
    return next((message for message in client.messages if isinstance(message, Reply)), None)


def answer(net: DurableNet, at: int, **arguments: str) -> dict[str, Any]:
    reply = ask(net, at, **arguments)
    assert reply is not None
    return dict(json.loads(reply.body))


def lag(net: DurableNet, at: int, name: str = "s") -> int:
    (row,) = answer(net, at, name=name)["subscriptions"]
    assert (row["lag_events"] > 0) == (row["lag_s"] > 0)
    return int(row["lag_events"])


def acknowledge(reader: Reader, events: int) -> None:
    """The first so many events that it got."""
    ticks = [(batch.pubend, int(tick)) for batch in reader.batches for tick in batch.headers["tick"]]
    pubend, tick = ticks[events - 1]
    reader.send(encode(Ack(number=1, token=json.dumps({pubend_text(pubend): tick}))))


def test_the_lag_after_acknowledging_within_a_frame_and_coming_back() -> None:
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 10)))
    for left in (10, 7, 4):
        assert lag(net, 0) == left
        acknowledge(reader, 3)
        assert lag(net, 0) == left - 3
        reader.gone()
        assert lag(net, 0) == left - 3
        reader = Reader(net, 0)
        reader.begin("s", ack="manual")
        net.wait(1)
        assert len(reader.got()) == left - 3
    reader.ack()
    assert lag(net, 0) == 0
    reader.gone()
    publisher.send(publisher.durable("t", *numbers(10, 14)))
    assert lag(net, 0) == 4
    net.kill(0)
    net.start(0)
    net.wait(1)
    assert lag(net, 0) == 4


class Full(Reader):
    """Takes what it is sent, and never has room for more."""

    def take(self, frame: bytes) -> None:
        if frame_kind(frame) != Kind.DELIVERY:
            super().take(frame)


def test_a_subscription_is_consolidated_or_catches_up_or_is_away() -> None:
    def mode() -> str:
        (row,) = answer(net, 0, name="s")["subscriptions"]
        return str(row["mode"])

    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    assert mode() == "consolidated"
    reader.gone()
    assert mode() == ""
    for _ in range(6):
        publisher.send(publisher.durable("t", *("x" * 50_000 for _ in range(20))))
    reader = Full(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    assert mode() == "catchup"


def test_the_lag_after_a_replay() -> None:
    """What it got before it was known here does not make up for what it has not got since."""
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    net.wait(1)
    since = net.now_us
    publisher.send(publisher.durable("t", *numbers(0, 20)))
    net.wait(1)
    reader.begin("s", ack="manual", since_us=since)
    net.wait(2)
    assert (reader.got(), lag(net, 0)) == (numbers(0, 20), 20)
    acknowledge(reader, 5)
    assert lag(net, 0) == 15
    reader.ack()
    reader.gone()
    publisher.send(publisher.durable("t", *numbers(20, 30)))
    assert lag(net, 0) == 10


def test_the_lag_of_a_past_that_was_not_gone_through_is_at_least_what_is_known() -> None:
    """Who leaves in the middle of a replay: nobody has counted the rest; its age is known all the same."""
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    net.wait(1)
    since = net.now_us
    publisher.send(publisher.durable("t", *numbers(0, 20)))
    net.wait(2)
    reader = Reader(net, 1)
    net.cut(0, 1)
    reader.begin("s", ack="auto", since_us=since)
    reader.gone()
    net.link(0, 1)
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(20, 23)))
    for _ in range(2):
        net.wait(1)
        (row,) = answer(net, 1, name="s")["subscriptions"]
        assert (row["lag_events"], row["lag_at_least"]) == (3, True)
        assert row["lag_s"] > 5
        assert "at least 3 events" in _line(row | {"broker": "b0"})
        net.kill(1)
        net.start(1)
        net.link(0, 1)
    reader = Reader(net, 1)
    reader.begin("s", ack="auto", since_us=since)
    net.wait(2)
    (row,) = answer(net, 1, name="s")["subscriptions"]
    assert (row["lag_events"], row["lag_at_least"]) == (23, False)
    assert reader.got() == numbers(0, 23)


def test_the_lag_of_one_that_begins_with_the_first_tick_is_no_older_than_it() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    publisher.send(publisher.durable("t", "x"))
    net.wait(2)
    Reader(net, 1).begin("other")
    net.wait(2)
    net.cut(0, 1)
    reader.begin("s", token="{}")
    reader.gone()
    net.wait(5)
    for _ in range(2):
        (row,) = answer(net, 1, name="s")["subscriptions"]
        assert row["lag_at_least"]
        assert 4 < row["lag_s"] < 60
        net.kill(1)
        net.start(1)
        net.link(0, 1)
        net.wait(5)


def test_the_lag_after_moving() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    acknowledge(reader, 4)
    net.wait(1)
    reader.gone()
    reader = Reader(net, 1)
    reader.begin("s", ack="manual")
    net.wait(2)
    assert (reader.got(), lag(net, 1)) == (["4", "5"], 2)
    publisher.send(publisher.durable("t", "6"))
    assert lag(net, 1) == 3
    reader.ack()
    assert lag(net, 1) == 0


def test_the_lag_of_a_group_is_what_nobody_is_done_with() -> None:
    net = DurableNet(1)
    publisher, consumer = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 200)))
    consumer.ack(*numbers(1, 200))
    assert lag(net, 0, "g") == 1
    consumer.gone()
    assert lag(net, 0, "g") == 1
    publisher.send(publisher.durable("t", "more"))
    assert lag(net, 0, "g") == 2
    again = Consumer(net, 0).begin()
    net.wait(1)
    assert (again.got(), lag(net, 0, "g")) == (["0", "more"], 2)
    again.ack("0", "more")
    assert lag(net, 0, "g") == 0


@pytest.mark.parametrize("settled", [False, True])
def test_the_lag_of_a_group_after_a_restart(settled: bool) -> None:
    """Before any consumer is back, while it catches up, after another restart; whatever was saved last."""
    net = DurableNet(2, [(0, 1)])
    publisher, consumer = DurableClient(net, 0), Consumer(net, 1).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 100)))
    net.wait(1)
    consumer.ack(*numbers(0, 10), *numbers(20, 100), ticket=1)
    assert consumer.acked() == [(1, "")]
    if settled:
        net.wait(10)
    publisher.send(publisher.durable("t", "more"))
    net.wait(1)
    left = [*numbers(10, 20), "more"]
    for done in ([], left[4:], left[:2], left[2:4]):
        net.kill(1)
        net.start(1)
        net.link(0, 1)
        net.wait(2)
        assert lag(net, 1, "g") == len(left)
        for _ in range(2):  # the last one to leave begins anew
            again = Consumer(net, 1).begin()
            net.wait(2)
            assert (again.got(), lag(net, 1, "g")) == (left, len(left))
            again.gone()
            assert lag(net, 1, "g") == len(left)
        again = Consumer(net, 1).begin()
        net.wait(2)
        again.ack(*done, ticket=1)
        assert again.acked() == [(1, "")]
        left = [one for one in left if one not in done]
        assert lag(net, 1, "g") == len(left)
    net.brokers[1].check()


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_all_are_listed_page_by_page(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit == "rows":
        monkeypatch.setattr(durable_desk, "PAGE_ROWS", 4)
    else:
        monkeypatch.setattr(switchboard, "MAX_BODY_BYTES", 1_500)
    net = DurableNet(1)
    for number in range(11):
        Reader(net, 0).begin(f"n{number:02}", ack="auto")
    Consumer(net, 0).begin("z")
    net.wait(1)
    found, after, pages = [], "", 0
    while True:
        page = answer(net, 0, after=after) if after else answer(net, 0)
        assert ("constreams" in page) == (not after)
        assert [row["name"] for row in page["groups"]] == (["z"] if not page["more"] else [])
        found += [row["name"] for row in page["subscriptions"]]
        after, pages = found[-1], pages + 1
        if not page["more"]:
            break
    assert found == [*(f"n{number:02}" for number in range(11)), "z"]
    assert pages > 2
    assert [row["name"] for row in answer(net, 0, name="n07")["subscriptions"]] == ["n07"]
    assert answer(net, 0, name="nobody")["subscriptions"] == []


def test_what_moved_says_where_and_is_deleted_there() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, first = DurableClient(net, 0), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    assert lag(net, 0) == 5
    second = Reader(net, 1)
    second.begin("s", ack="auto")
    net.wait(1)
    rows = [answer(net, at)["subscriptions"][0] for at in (0, 1)]
    assert [(row["moved"], row["moved_to"], row["lag_events"]) for row in rows] == [
        (True, "b1", 0),
        (False, "", 5),
    ]
    assert _line(rows[0] | {"broker": "b0"}).endswith("at b0  moved to b1  ack auto")
    for _ in range(2):
        refused = ask(net, 0, "subs.delete", name="s")
        assert refused is not None
        assert (refused.code, refused.body) == (
            "usage",
            "the durable subscription 's' is at broker 'b1': delete it there",
        )
        net.wait(65)
    assert second.ended() == []
    done = ask(net, 1, "subs.delete", name="s")
    assert done is not None
    assert (done.code, second.ended()) == ("", ["deleted"])


@pytest.mark.parametrize("outcome", ["synced", "full", "gone"])
def test_deletion_is_answered_when_it_is_on_disk(outcome: str) -> None:
    net = DurableNet(1)
    reader, client = Reader(net, 0), Reader(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    net.slow.add(0)
    client.send(encode(Request(number=7, what="subs.delete", arguments={"name": "s"})))
    assert [message for message in client.messages if isinstance(message, Reply)] == []
    assert b"s" in net.disks[0].tables["durable.subscriptions"]
    if outcome == "gone":
        client.gone()
    net.disks[0].full = outcome == "full"
    net.sync(0)
    replies = [(one.number, one.code) for one in client.messages if isinstance(one, Reply)]
    assert replies == {"synced": [(7, "")], "full": [(7, "storage")], "gone": []}[outcome]
    net.disks[0].full = False
    net.slow.clear()
    net.wait(1)
    assert b"s" not in net.disks[0].tables["durable.subscriptions"]
    net.brokers[0].check()


def test_since_holds_for_pubends_that_are_heard_of_later() -> None:
    """A broker that has just started knows none but its own."""
    net = DurableNet(2)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "old"))
    net.wait(8)
    since = net.now_us
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", since_us=since, ack="auto")
    net.wait(1)
    net.link(0, 1)
    net.wait(6)
    publisher.send(publisher.durable("t", "5"))
    net.wait(1)
    assert reader.got() == numbers(0, 6)


def test_an_acknowledgement_of_a_group_that_is_deleted_leaves_nothing_behind() -> None:
    net = DurableNet(1)
    publisher, consumer = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", "a", "b"))
    net.slow.add(0)
    consumer.ack("b", ticket=5)
    publisher.send(encode(Request(number=1, what="subs.delete", arguments={"name": "g"})))
    net.slow.clear()
    net.sync(0)
    net.wait(1)
    broker = net.brokers[0]
    assert broker is not None
    assert broker._rooms.subscribers is not None
    assert broker._rooms.subscribers._acking == {}


def test_a_referral_to_a_broker_that_does_not_have_it_any_more() -> None:
    """Whoever kept it deleted it and said so where the asked broker did not hear it: it begins anew."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    first = Reader(net, 2)
    first.begin("s", ack="auto")
    net.wait(1)
    broker = net.brokers[0]
    other = net.brokers[1]
    assert broker is not None
    assert other is not None
    assert broker._rooms.subscribers is not None
    assert other._rooms.subscribers is not None
    first.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
    net.wait(1)
    broker._rooms.subscribers.hosting.subscriptions.claims.hear(Claim("s", 1 << 60), 2, 1)
    other._rooms.subscribers.hosting.subscriptions.claims.hear(Claim("s", 1 << 60), 3, 1)
    second = Reader(net, 0)
    second.begin("s", ack="auto")
    net.wait(1)
    assert second.ended() == []
    assert [message for message in second.messages if isinstance(message, Subscribed)]


def test_long_names_are_not_echoed_whole() -> None:
    net = DurableNet(1)
    reply = ask(net, 0, "subs.delete", name="x" * 5_000)
    assert reply is not None
    assert reply.code == "usage"
    assert len(reply.body) < 120


def test_the_names_of_one_do_not_hide_those_of_others_in_the_metrics() -> None:
    """A hundred names that sort first, and another principal's behind them."""
    net = DurableNet(1)
    tokens = {hash_token(name): name for name in ("eve", "alice")}
    net.config = replace(net.config, auth=AuthConfig(tokens=tokens))
    net.kill(0)
    net.start(0)
    eve, alice = Reader(net, 0, "eve"), Reader(net, 0, "alice")
    for number in range(durable_desk.MAX_LABELS + 5):
        eve.send(
            encode(Subscribe(number=number + 1, topic="#", where="", durable=f"!{number:03}", ack="auto"))
        )
    alice.begin("billing")
    net.wait(1)
    broker = net.brokers[0]
    assert broker is not None
    named = [level.labels["subscription"] for level in broker.levels(net.now_us)]
    assert "billing" in named
    assert len(set(named)) == durable_desk.MAX_LABELS
