"""Quotas: what one principal has too much of is refused to it, and to nobody else."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from tests.worlds.durable_brokers import DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.links.access import AuthConfig, QuotaConfig
from postroad.units import SECOND_US
from postroad.wire.frames import Ended, Refuse, Rejected, Reply, Request, Subscribe, Unsubscribe, encode


def start(**quotas: int) -> DurableNet:
    net = DurableNet(1)
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in ("alice", "eve")}
    auth, quota = AuthConfig(tokens=tokens), replace(QuotaConfig(), **quotas)
    net.config = replace(net.config, auth=auth, quotas=quota)
    restart(net)
    return net


def restart(net: DurableNet) -> None:
    net.kill(0)
    net.start(0)


def check(net: DurableNet) -> None:
    broker = net.brokers[0]
    assert broker is not None
    broker.check()


def refusals(client: Reader) -> list[str]:
    return [message.reason for message in client.messages if isinstance(message, Ended) and message.code]


def test_connections() -> None:
    net = start(connections=2)
    first, second, third = (Reader(net, 0, "eve") for _ in range(3))
    assert third.has(Refuse)
    assert not first.has(Refuse)
    assert not second.has(Refuse)
    assert not Reader(net, 0, "alice").has(Refuse)
    first.gone()
    assert not Reader(net, 0, "eve").has(Refuse)
    check(net)


def test_plain_subscriptions_of_all_its_connections_together() -> None:
    net = start(subscriptions=3)
    eve, again, alice = Reader(net, 0, "eve"), Reader(net, 0, "eve"), Reader(net, 0, "alice")
    for number in (1, 2):
        eve.subscribe(number, f"t/{number}")
    again.subscribe(1, "u")
    again.subscribe(2, "v")
    assert refusals(again) == ["eve has 3 subscriptions, at most 3 are allowed"]
    alice.subscribe(1, "t")
    assert refusals(alice) == []
    eve.send(encode(Unsubscribe(number=1)))
    again.subscribe(3, "w")
    eve.gone()
    again.subscribe(4, "x")
    assert len(refusals(again)) == 1
    check(net)


def test_durable_names_count_while_nobody_is_connected_and_after_a_restart() -> None:
    """One client made 20,000 in 3 s."""
    net = start(names=2)
    for name in ("a", "b"):
        reader = Reader(net, 0, "eve")
        reader.begin(name)
        net.wait(1)
        assert refusals(reader) == []
        reader.gone()
    restart(net)
    eve, alice = Reader(net, 0, "eve"), Reader(net, 0, "alice")
    eve.begin("c")
    alice.begin("d")
    net.wait(1)
    assert refusals(eve) == ["eve has 2 durable subscriptions, at most 2 are allowed"]
    assert refusals(alice) == []
    eve.send(encode(Request(number=1, what="subs.delete", arguments={"name": "a"})))
    net.wait(1)
    eve.send(encode(Subscribe(number=2, topic="t", where="", durable="c")))
    net.wait(1)
    assert len(refusals(eve)) == 1
    check(net)


@pytest.mark.parametrize("durable", ["", "s"])
def test_conditions_have_a_budget(durable: str) -> None:
    """Of LIKE searches over many attributes each principal has so much; equal ones cost once."""
    net = start(condition_cost=20_000)
    eve, alice = Reader(net, 0, "eve"), Reader(net, 0, "alice")
    for number in range(1, 6):
        name = durable and f"{durable}{number}"
        eve.send(encode(Subscribe(number=number, topic="t", where=f"a LIKE '%{number}%_x%'", durable=name)))
        net.wait(1)
    assert refusals(eve)
    assert "the limit is 20000" in refusals(eve)[0]
    alice.send(encode(Subscribe(number=1, topic="t", where="a LIKE '%1%_x%'")))
    assert refusals(alice) == []
    check(net)


def test_requests_a_second() -> None:
    net = start(requests=10)
    eve, alice = Reader(net, 0, "eve"), Reader(net, 0, "alice")

    def ask(client: Reader) -> str:
        client.send(encode(Request(number=1, what="heads")))
        reply = client.messages[-1]
        assert isinstance(reply, Reply)
        return reply.code

    codes = [ask(eve) for _ in range(12)]
    assert codes == [""] * 10 + ["unavailable"] * 2
    assert ask(alice) == ""
    net.wait(1)
    assert ask(eve) == ""
    broker = net.brokers[0]
    assert broker is not None
    assert broker.metrics()["quota_refusals_total"] == 2


def rejected(client: Reader) -> list[str]:
    return [message.reason for message in client.messages if isinstance(message, Rejected)]


def stored(net: DurableNet) -> float:
    broker = net.brokers[0]
    assert broker is not None
    return broker.metrics()["quota_stored_bytes"]


def test_durable_events_are_counted_until_the_log_lets_them_go_and_across_restarts() -> None:
    net = start(stored_bytes=100_000)
    net.config = replace(net.config, durable=replace(net.config.durable, keep_us=SECOND_US))
    restart(net)
    eve, alice, reader = (Reader(net, 0, name) for name in ("eve", "alice", "alice"))
    reader.begin("r")
    net.wait(1)
    for _ in range(9):
        eve.send(eve.durable("t", "x" * 10_000))
    net.wait(1)
    assert rejected(eve) == []
    assert 90_000 < stored(net) < 92_000
    eve.send(eve.durable("t", "x" * 10_000))
    net.wait(1)
    (reason,) = rejected(eve)
    assert reason.startswith("eve has 9")
    assert "at most 100000 are allowed" in reason
    alice.send(alice.durable("t", "x" * 10_000))
    net.wait(1)
    assert rejected(alice) == []
    before = stored(net)
    net.wait(11)  # it is saved by now
    restart(net)
    assert stored(net) == before
    eve = Reader(net, 0, "eve")
    eve.send(eve.durable("t", "x" * 10_000))
    net.wait(1)
    assert len(rejected(eve)) == 1
    reader = Reader(net, 0, "alice")
    reader.begin("r")
    net.wait(1)
    reader.ack()
    net.wait(20)
    assert stored(net) == 0
    eve.send(eve.durable("t", "x" * 10_000))
    net.wait(1)
    assert len(rejected(eve)) == 1
    check(net)


def test_frames_behind_one_that_was_refused_are_no_way_around_it() -> None:
    net = start(stored_bytes=20_000)
    eve, reader = Reader(net, 0, "eve"), Reader(net, 0, "alice")
    reader.begin("r")
    net.wait(1)
    for _ in range(10):
        eve.send(eve.durable("t", "x" * 9_000))
        net.wait(1)
    assert stored(net) < 20_000
    assert len(rejected(eve)) == 8
