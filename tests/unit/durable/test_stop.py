"""A broker that stops in good order saves all that it knows, whatever waits for its time (D11)."""

from __future__ import annotations

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Consumer, Reader, stop

from postroad.durable.publisher.pubend import PUBLISHERS
from postroad.durable.publisher.release import TABLE as OWNERS
from postroad.durable.publisher.release import read_owner


@pytest.mark.parametrize("at", [0, 1])
def test_what_was_acknowledged_does_not_come_again(at: int) -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", ack="auto")
    net.wait(1)
    for number in range(5):
        publisher.send(publisher.durable("t", str(number)))
        reader.ack()
    assert reader.got() == numbers(0, 5)
    stop(net, at)
    net.start(at)
    net.link(0, 1)
    again = Reader(net, at)
    again.begin("s", ack="auto")
    net.wait(3)
    assert again.got() == []


def test_what_consumers_acknowledged_while_a_save_was_on_its_way_does_not_come_again() -> None:
    net = DurableNet(1)
    publisher, consumer = DurableClient(net, 0), Consumer(net, 0).begin()
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 6)))
    net.slow.add(0)
    consumer.ack("1")
    consumer.ack("3", "4")
    stop(net, 0)
    net.start(0)
    again = Consumer(net, 0).begin()
    net.wait(3)
    assert again.got() == ["0", "2", "5"]


def test_the_pubend_saves_reports_and_whose_ids_it_knows() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    net.wait(1)
    before = net.disks[0].tables[OWNERS]
    held = {key: read_owner(key, value).latest_delivered for key, value in before.items()}
    publisher.send(publisher.durable("t", "a"))
    net.wait(1.5)
    stop(net, 0)
    for key, value in net.disks[0].tables[OWNERS].items():
        assert read_owner(key, value).latest_delivered > held[key], "the report that came since the last save"
    assert any(len(key) == 16 for key in net.disks[0].tables[PUBLISHERS])
