"""A client with many subscriptions goes: they end a few in a turn, and get nothing meanwhile."""

from __future__ import annotations

import itertools

from tests.worlds.durable_brokers import DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.seam.turn import LATER_PER_TURN
from postroad.wire.frames import Subscribe, encode

COUNT = 10 * LATER_PER_TURN


def metric(net: DurableNet, name: str) -> float:
    broker = net.brokers[0]
    assert broker is not None
    return broker.metrics()[name]


def turns_until_calm(net: DurableNet, name: str) -> list[float]:
    """A figure after each of the turns that the broker asks for at once."""
    broker = net.brokers[0]
    assert broker is not None
    figures = [metric(net, name)]
    while broker.next_deadline() <= net.now_us and broker._unanswered.later:
        net.give(0, [])
        figures.append(metric(net, name))
    return figures


def test_plain_subscriptions_end_a_few_in_a_turn() -> None:
    net = DurableNet(1)
    eve, alice = Reader(net, 0), Reader(net, 0)
    for number in range(COUNT):
        eve.subscribe(number, f"t/{number}" if number else "t", where=f"a > {number}")
    alice.subscribe(1, "t")
    eve.gone()
    sent = metric(net, "delivery_frames_total")
    alice.publish("t", "1", a=7)
    assert metric(net, "delivery_frames_total") == sent + 1, "nothing is sent to whoever is gone"
    left = turns_until_calm(net, "subscriptions")
    assert left[-1] == 1
    assert all(0 < before - after <= LATER_PER_TURN for before, after in itertools.pairwise(left))
    assert len(left) >= COUNT / LATER_PER_TURN - 2
    assert metric(net, "interest_subscriptions") == 1
    assert alice.got() == ["1"]


def test_durable_ones_too_and_whoever_takes_one_up_again_keeps_it() -> None:
    net = DurableNet(1)
    eve = Reader(net, 0)
    for number in range(COUNT):
        eve.send(encode(Subscribe(number=number, topic="t", where="", durable=f"d{number}", ack="manual")))
    net.wait(1)
    eve.gone()
    again = Reader(net, 0)
    again.begin(f"d{COUNT - 1}", ack="manual")
    assert again.begun, "before its turn came"
    turns_until_calm(net, "subscriptions")
    again.send(again.durable("t", "1"))
    net.wait(1)
    assert again.got() == ["1"]
    assert again.ended() == []
