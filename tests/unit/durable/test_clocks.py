"""Tokens, acknowledgements and times that are ahead of a broker's clock (D3, D10)."""

from __future__ import annotations

import json
import re

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.units import SECOND_US
from postroad.wire.frames import Ack, Acked, Ended, Refuse, encode


class Net(DurableNet):
    """The clock of the first broker is ahead of the others'."""

    def __init__(self, count: int, links: list[tuple[int, int]], ahead_us: int) -> None:
        self.pubend_ahead_us = ahead_us
        super().__init__(count, links)

    def start(self, at: int) -> None:
        super().start(at)
        broker = self.brokers[at]
        if at == 0 and broker is not None:
            handle = broker.handle
            broker.handle = lambda inputs, now_us: handle(inputs, now_us + self.pubend_ahead_us)  # type: ignore[method-assign]


@pytest.mark.parametrize(("ahead_s", "taken"), [(50, True), (70, False), (3_500, False)])
def test_a_token_of_the_future_is_refused(ahead_s: int, taken: bool) -> None:
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    ahead = json.dumps(dict.fromkeys(reader.start, net.now_us + ahead_s * SECOND_US))
    reader.send(encode(Ack(number=1, token=ahead, ticket=1)))
    net.wait(1)
    (acked,) = [one for one in reader.messages if isinstance(one, Acked)]
    other = Reader(net, 0)
    other.begin("other", token=ahead)
    net.wait(1)
    if taken:
        assert acked.code == ""
        assert other.start == json.loads(ahead)
        return
    (ended,) = [one for one in other.messages if isinstance(one, Ended)]
    for one in (acked, ended):
        assert one.code == "usage"
        assert re.search(r"in the future, \d+ s ahead of this broker's clock", one.reason)
    publisher.send(publisher.durable("t", "b"))
    assert reader.got() == ["a", "b"], "what is refused is not believed"


@pytest.mark.parametrize(("ahead_s", "taken"), [(50, True), (70, False), (3_500, False)])
def test_a_subscription_begins_now_or_in_the_past(ahead_s: int, taken: bool) -> None:
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    publisher.send(publisher.durable("t", "a"))
    reader.begin("s", since_us=net.now_us + ahead_s * SECOND_US)
    net.wait(1)
    publisher.send(publisher.durable("t", "b"))
    assert reader.ended() == ([] if taken else ["usage"])
    assert reader.got() == (["b"] if taken else [])


@pytest.mark.parametrize("ack", ["", "auto"])
def test_a_pubend_whose_clock_is_far_ahead_is_believed(ack: str) -> None:
    """Also after a restart of who has heard of it, before it is heard again."""
    net = Net(2, [(0, 1)], ahead_us=600 * SECOND_US)
    publisher, first = DurableClient(net, 0), Reader(net, 0)
    first.begin("s", ack=ack)
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    token = first.token()
    first.ack()
    first.gone()
    second = Reader(net, 1)
    second.begin("s", token="" if ack else token, ack=ack)
    second.send(encode(Ack(number=1, token=token)))
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(5, 10)))
    token = second.token()
    second.ack()
    net.wait(1)
    net.kill(1)
    net.start(1)
    third = Reader(net, 1)
    third.begin("s", token="" if ack else token, ack=ack)
    third.send(encode(Ack(number=1, token=token)))
    net.link(0, 1)
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(10, 15)))
    net.wait(1)
    assert (first.got(), second.got(), third.got()) == (numbers(0, 5), numbers(5, 10), numbers(10, 15))
    assert not any(one.has(Refuse) or one.ended() for one in (second, third))


@pytest.mark.parametrize(("at", "early_ends"), [(0, ["unavailable"]), (1, [])])
def test_a_clock_that_was_put_right_does_not_end_who_comes_back_before_the_stream_is_heard(
    at: int, early_ends: list[str]
) -> None:
    """D3: while it is not known how far the stream is, its token is not of the future: one may ask again."""
    net = Net(2, [(0, 1)], ahead_us=3_600 * SECOND_US)
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", token="{}")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(0, 3)))
    net.wait(2)
    assert reader.got() == numbers(0, 3)
    net.pubend_ahead_us = 0
    net.kill(at)
    net.slow.add(at)
    net.start(at)
    early = Reader(net, at)
    early.begin("s", token=reader.token())
    assert early.ended() == early_ends
    net.slow.clear()
    net.sync(at)
    net.link(0, 1)
    net.wait(2)
    again = Reader(net, at)
    again.begin("s", token=reader.token())
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(3, 5)))
    net.wait(2)
    assert again.got() == numbers(3, 5)
    never = Reader(net, at)
    never.begin("never", token=json.dumps(dict.fromkeys(again.start, 1 << 60)))
    assert never.ended() == ["usage"]


def test_a_stream_that_keeps_nothing_is_not_acknowledged() -> None:
    net = DurableNet(1)
    reader = Reader(net, 0)
    reader.begin("s", ack="manual")
    reader.send(encode(Ack(number=1, token='{"00000001-80000001": 5}', ticket=1)))
    net.wait(1)
    assert [one.code for one in reader.messages if isinstance(one, Acked)] == ["usage"]
