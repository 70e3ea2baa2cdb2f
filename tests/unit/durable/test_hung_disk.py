"""A disk that hangs: what waits for it is bounded, and nothing is lost by that (D1, D9)."""

from __future__ import annotations

import pytest
from tests.worlds.brokers import numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.durable.publisher import pubend as durable_pubend
from postroad.durable.subscriber import filtering, hosting
from postroad.seam.storage import Append, Save


def waiting(net: DurableNet, at: int) -> tuple[int, int]:
    """Effects that wait for a disk, and their bytes."""
    held = net.disks[at].waiting
    rows = [row for one in held if isinstance(one, Save) for row in one.rows]
    size = sum(len(one.data) for one in held if isinstance(one, Append))
    return len(held), size + sum(len(key) + len(value or b"") for key, value in rows)


def drain(net: DurableNet, at: int) -> None:
    net.slow.discard(at)
    net.sync(at)
    net.wait(3)


@pytest.mark.parametrize("crash", [False, True])
def test_the_disk_of_a_subscribers_broker(monkeypatch: pytest.MonkeyPatch, crash: bool) -> None:
    """Events of others come and are acknowledged meanwhile: filtering records and saves."""
    monkeypatch.setattr(filtering, "MAX_PENDING_BYTES", 20_000)
    monkeypatch.setattr(hosting, "MAX_SAVES", 8)
    net = DurableNet(2, [(0, 1)])
    publisher, reader, away = DurableClient(net, 0), Reader(net, 1), Reader(net, 1)
    reader.begin("reader", ack="manual")
    away.begin("away", ack="manual")
    net.wait(2)
    away.gone()
    net.slow.add(1)
    sizes = []
    for number in range(600):
        publisher.send(publisher.durable("t", str(number)))
        net.wait(0.3)
        reader.ack()
        if number % 200 == 199:
            sizes.append(waiting(net, 1))
    assert reader.got() == numbers(0, 600), "nobody waits for the disk of its broker"
    assert sizes[1] == sizes[2]
    assert sizes[2][1] < 30_000
    if crash:
        net.kill(1)
        net.slow.clear()
        net.start(1)
        net.link(0, 1)
    else:
        drain(net, 1)
    publisher.send(publisher.durable("t", "600"))
    net.wait(3)
    back = Reader(net, 1)
    back.begin("away", ack="manual")
    net.wait(3)
    assert back.got() == numbers(0, 601)
    net.brokers[1].check()
    assert waiting(net, 1) == (0, 0)


def test_the_disk_of_a_publishers_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers are held back: what is on its way is bounded, the rest is their credit."""
    monkeypatch.setattr(durable_pubend, "MAX_STAGED_BYTES", 35_000)
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("reader", ack="manual")
    net.wait(2)
    net.slow.add(0)
    sizes = []
    for number in range(600):
        publisher.send(publisher.durable("t", str(number)))
        net.wait(0.3)
        if number % 200 == 199:
            sizes.append(waiting(net, 0))
    assert reader.got() == []
    assert sizes[1] == sizes[2]
    assert sizes[2][1] < 40_000
    assert net.brokers[0].metrics()["durable_frames_waiting"] == 600
    drain(net, 0)
    assert publisher.accepted()[-1] == 600
    assert reader.got() == numbers(0, 600)
    net.brokers[0].check()
