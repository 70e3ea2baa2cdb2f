"""Traces of durable deliveries name durable subscribers, however late they got the event (T4, T6)."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.worlds.durable_brokers import DurableClient, DurableNet, MemoryDisk
from tests.worlds.durable_subscribers import Reader, stop
from tests.worlds.tracking import Disk, trace

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.durable.subscriber.subscriptions import SUBSCRIPTIONS
from postroad.ids import Identity
from postroad.seam.tracking import FiltersRead, Keep, ReadFilters, TrackingEffect
from postroad.tracking.attachment_log import Change
from postroad.tracking.record import FilterMeta
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import SECOND_US
from postroad.wire.frames import Ended


class TracedNet(DurableNet):
    """Disks in memory; tracking stores nothing within a test."""

    def __init__(self, count: int, links: list[tuple[int, int]], strategy: str, **settings: Any) -> None:
        self.before: dict[int, int] = {}  # the boot that a backup knows of, where one was put back
        self.tracking_config = TrackingConfig(strategy=strategy, persist_us=3_600 * SECOND_US, **settings)
        super().__init__(count, links)

    def start(self, at: int) -> None:
        self.boots[at] += 1
        self.disks[at].waiting.clear()
        stored, changes = self.history(at)
        self.brokers[at] = Broker(
            BrokerConfig(tracking=self.tracking_config, durable=self.config.durable),
            Identity(
                number=at + 1,
                node=bytes([at + 1]) * 16,
                name=f"b{at}",
                boot=self.boots[at],
                starts=self.boots[at],
                before=self.before.pop(at, self.boots[at] - 1),
            ),
            draw=random.Random(at).randrange,
            now_us=self.now_us,
            tracking=make_tracking(
                self.tracking_config, me=at + 1, stored=stored, changes=changes, now_us=self.now_us
            ),
            stored=self.disks[at].stored(),
        )
        self.give(at, [])

    def history(self, at: int) -> tuple[list[FilterMeta], list[Change]]:  # noqa: ARG002
        """What the processes before stored of it."""
        return [], []

    def perform(self, at: int, effects: list[Any]) -> None:
        super().perform(at, [effect for effect in effects if not isinstance(effect, TrackingEffect)])


def receivers(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["subscriber"], one["broker"]) for one in found["receivers"]]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_trace_names_durable_subscribers_also_minutes_later(strategy: str) -> None:
    """T4."""
    net = TracedNet(3, [(0, 1), (1, 2)], strategy)
    publisher, reader, late = DurableClient(net, 0), Reader(net, 2), Reader(net, 2)
    reader.begin("prompt", ack="auto")
    late.begin("late", ack="auto")
    net.wait(1)
    late.gone()
    net.wait(2)
    publisher.send(publisher.durable("t", "x"))
    net.wait(1)
    identity = next(batch for batch in reader.batches if batch.count).id(0)
    found = trace(publisher, identity)
    assert [step["broker"] for step in found["route"]] == ["b0", "b1", "b2"]
    assert receivers(found) == [("prompt", "b2")]
    net.wait(150)
    again = Reader(net, 2)
    again.begin("late", ack="auto")
    net.wait(2)
    assert again.got() == ["x"]
    found = trace(DurableClient(net, 1), identity)
    assert found["origin"] == "b0"
    assert receivers(found) == [("late", "b2"), ("prompt", "b2")]


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "bloom"}, {"strategy": "bloom", "deliveries": "subscriber"}, {"strategy": "exact"}],
)
@pytest.mark.parametrize("stored", [False, True])
def test_nobody_takes_the_name_of_a_plain_subscription(settings: dict[str, str], stored: bool) -> None:
    """Two receivers under one name would be one to the attachment map: the first that left, both."""
    net = TracedNet(2, [(0, 1)], **settings)
    plain, other, publisher = Reader(net, 0), Reader(net, 0), DurableClient(net, 0)
    plain.subscribe(1, "t")
    publisher.publish("t", "a")
    ((name, _),) = receivers(trace(publisher, plain.batches[0].id(0)))
    if stored:  # by a broker that allowed it
        other.begin("s", ack="auto")
        rows = net.disks[0].tables[SUBSCRIPTIONS]
        rows[name.encode()] = rows.pop(b"s")
        net.kill(0)
        net.start(0)
        net.link(0, 1)
        plain, other, publisher = Reader(net, 0), Reader(net, 0), DurableClient(net, 0)
        plain.subscribe(1, "t")
        publisher.publish("t", "a")
        ((now, _),) = receivers(trace(publisher, plain.batches[0].id(0)))
        assert now != name, "publishers of another start have other numbers"
    other.begin(name, ack="auto")
    net.wait(1)
    (refused,) = [message for message in other.messages if isinstance(message, Ended)]
    assert (refused.code, "generated" in refused.reason) == ("usage", True)
    other.gone()
    publisher.publish("t", "b")
    assert plain.got() == ["a", "b"]
    assert len(receivers(trace(publisher, plain.batches[1].id(0)))) == 1
    net.wait(5)


class KeptNet(TracedNet):
    """Brokers that store what they track, at once."""

    def __init__(self, count: int, links: list[tuple[int, int]], strategy: str) -> None:
        self.histories = [Disk() for _ in range(count)]
        super().__init__(count, links, strategy)

    def history(self, at: int) -> tuple[list[FilterMeta], list[Change]]:
        return self.histories[at].metas, self.histories[at].changes

    def perform(self, at: int, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Keep):
                self.histories[at].keep(effect.effects)
            elif isinstance(effect, ReadFilters):
                found = {one: self.histories[at].records.get(one, b"") for one in effect.sequences}
                self.queue.append((at, [FiltersRead(tag=effect.tag, records=found)]))
        super().perform(at, effects)


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("late_s", [0, 60])
@pytest.mark.parametrize("then", ["goes on", "stops before the log is read", "dies"])
def test_what_reaches_the_log_after_a_stop_in_good_order_is_traced(
    strategy: str, late_s: int, then: str
) -> None:
    """T4: appends that are under way when a broker stops are done before it ends, but nobody is told of them
    any more; the next process records them, or the one after that."""
    net = KeptNet(2, [(0, 1)], strategy)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "before"))
    net.slow.add(0)
    publisher.send(publisher.durable("t", "x"))
    net.wait(late_s)
    stop(net, 0)
    net.wait(60)
    if then != "goes on":
        if then != "dies":
            net.slow.add(0)
        net.start(0)
        net.wait(1)
        if then == "dies":
            net.kill(0)
        else:
            stop(net, 0)
        net.wait(60)
    net.start(0)
    net.link(0, 1)
    net.wait(2)
    assert reader.got() == ["before", "x"]
    for batch in [batch for batch in reader.batches if batch.count]:
        found = trace(DurableClient(net, 1), batch.id(0))
        # A process that dies after it recorded something of another time does not know what else it did then.
        assert found["verdict"] == "complete" or then == "dies"
        assert found["origin"] == "b0"
        assert receivers(found) == [("s", "b1")]
        assert all(one["doubt"] < 1e-3 for one in [*found["route"], *found["receivers"]])


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("died", [False, True])
def test_a_process_that_dies_over_its_log_leaves_it_to_the_next(strategy: str, died: bool) -> None:
    """T4: it has stored something else meanwhile, which says nothing of what it had to record again."""
    net = KeptNet(2, [(0, 1)], strategy)
    net.tracking_config = replace(net.tracking_config, persist_us=10 * SECOND_US)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    net.slow.add(0)
    publisher.send(publisher.durable("t", "x"))
    if died:
        net.disks[0].sync()
        net.kill(0)
    else:
        stop(net, 0)
        net.slow.add(0)
    net.wait(60)
    net.start(0)
    DurableClient(net, 0).publish("t", "other")
    net.wait(60)
    assert net.histories[0].records
    net.kill(0)
    net.slow.discard(0)
    net.wait(60)
    net.start(0)
    net.link(0, 1)
    net.wait(2)
    assert reader.got() == ["x"]
    found = trace(DurableClient(net, 1), next(batch for batch in reader.batches if batch.count).id(0))
    assert found["verdict"] == ("partial" if died else "complete")
    assert [step["broker"] for step in found["route"]] == ["b0", "b1"]
    assert receivers(found) == [("s", "b1")]


def test_what_was_recorded_again_and_stored_is_not_read_once_more() -> None:
    """T4."""
    net = KeptNet(1, [], "exact")
    net.tracking_config = replace(net.tracking_config, persist_us=10 * SECOND_US)
    net.kill(0)
    for _ in range(2):
        net.wait(60)
        net.start(0)
        began_us = net.now_us
        publisher = DurableClient(net, 0)
        publisher.send(publisher.durable("t", "x"))
        net.wait(60)
        net.kill(0)
        stored, changes = net.history(0)
        next_one = make_tracking(net.tracking_config, me=1, stored=stored, changes=changes, now_us=net.now_us)
        assert next_one.unrecorded_us is not None
        assert next_one.unrecorded_us > began_us


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("restored", [0, 1, 2])
def test_a_broker_that_is_restored_from_a_backup_knows_that_it_does_not_know(
    strategy: str, restored: int
) -> None:
    """T4: what it did since then is gone, and its last word was that nothing happened after it."""
    net = KeptNet(3, [(0, 1), (1, 2)], strategy)

    def message() -> bytes:
        """From the first broker to the last."""
        writer, reader = DurableClient(net, 0), DurableClient(net, 2)
        reader.subscribe(1, "t")
        net.wait(1)
        writer.publish("t", "x")
        identity = next(batch for batch in reader.batches if batch.count).id(0)
        found = trace(DurableClient(net, 0), identity)
        assert found["verdict"] == "complete"
        assert [step["broker"] for step in found["route"]] == ["b0", "b1", "b2"]
        return identity

    def stopped() -> tuple[MemoryDisk, Disk, int]:
        stop(net, restored)
        return copy.deepcopy((net.disks[restored], net.histories[restored], net.boots[restored]))

    def go_on() -> None:
        net.wait(5)
        net.start(restored)
        for one, other in [(0, 1), (1, 2)]:
            if restored in (one, other):
                net.link(one, other)
        net.wait(5)

    before = message()
    net.wait(5)
    backup = stopped()
    go_on()
    since = message()
    stopped()
    net.disks[restored], net.histories[restored], net.before[restored] = backup
    go_on()
    for asked in range(3):
        found = trace(DurableClient(net, asked), since)
        assert found["verdict"] == "partial"
        assert f"b{restored}: its record of that time is not whole" in str(found)
        assert len(found["route"]) >= 2, "what the others know"
        assert trace(DurableClient(net, asked), before)["verdict"] == "complete"
    message()
