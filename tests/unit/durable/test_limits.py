"""The limits under which durable events were written hold as long as one of them is kept (D12)."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.durable.publisher.pubend import TABLE
from postroad.durable.publisher.pubend_rows import LIMITS, read_facts, refuse_lower_limits
from postroad.errors import UsageError
from postroad.wire.frames import DEFAULT_LIMITS, Limits


def restart(net: DurableNet, limits: Limits) -> None:
    stored = net.disks[0].stored()
    refuse_lower_limits(stored.load(TABLE, read_facts), stored.streams, limits)
    net.kill(0)
    net.config = dataclasses.replace(net.config, limits=limits)
    net.start(0)
    net.wait(1)


def test_a_lower_limit_waits_until_nothing_is_kept() -> None:
    net = DurableNet(1)
    reader, publisher = Reader(net, 0), DurableClient(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    lower = {name: replace(DEFAULT_LIMITS, **{name: getattr(DEFAULT_LIMITS, name) - 1}) for name in LIMITS}
    restart(net, lower["attributes"])
    restart(net, DEFAULT_LIMITS)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    for name, limits in lower.items():
        with pytest.raises(UsageError, match=f"limits.{name} = {getattr(limits, name)} is below the "):
            restart(net, limits)
    restart(net, replace(DEFAULT_LIMITS, attributes=70, subscriptions=1))
    with pytest.raises(UsageError, match="attributes = 64 is below the 70 "):
        restart(net, DEFAULT_LIMITS)
    reader = Reader(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    assert reader.got() == ["a"]
    reader.ack()
    net.wait(20)
    restart(net, lower["attributes"])
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "b"))
    restart(net, lower["attributes"])


def test_a_folder_of_an_earlier_version_has_no_limits_yet() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    facts = net.disks[0].tables[TABLE]
    assert facts
    for key, value in facts.items():
        known = msgspec.msgpack.decode(value)
        assert known.pop("limits")
        facts[key] = msgspec.msgpack.encode(known)
    restart(net, replace(DEFAULT_LIMITS, attributes=3))
    with pytest.raises(UsageError):
        restart(net, replace(DEFAULT_LIMITS, attributes=2))
