"""Numbers for people: singular and plural, sizes, spans; a broker at a glance."""

from __future__ import annotations

from typing import Any

import pytest

from postroad.cli.glance import CONCERNS, broker_line, concerns, glance
from postroad.cli.words import count, printable, size, span

WELL: dict[str, Any] = {
    "name": "b1",
    "address": "127.0.0.1:7420",
    "uptime_s": 7_300,
    "kernel": "compiled",
    "brokers": [{"broker": "b1"}, {"broker": "b2"}],
    "links": [{"broker": "b2", "rtt_ms": 0.42}],
    "ring": {"joining": False},
    "durable_pubends": [],
    "queues": {},
    "metrics": {
        "clients": 1,
        "subscriptions": 2,
        "durable_subscriptions": 1,
        "durable_subscriptions_connected": 0,
        "events_in_total": 1_234,
        "deliveries_total": 1,
        "durable_deliveries_total": 2,
        "durable_events_total": 3,
        "durable_kept_bytes": 2_048,
        "queue_depth": 1,
        "queue_inboxes": 2,
        "links": 1,
    },
}


def test_one_is_singular_and_all_else_plural() -> None:
    assert [count(number, "event") for number in (0, 1, 2, 1_000)] == [
        "0 events",
        "1 event",
        "2 events",
        "1,000 events",
    ]
    assert count(2, "inbox", "inboxes") == "2 inboxes"


def test_spans_and_sizes() -> None:
    spans = [span(seconds) for seconds in (0, 1, 59.9, 60, 7_300, 86_400 * 3)]
    assert spans == ["0 seconds", "1 second", "59 seconds", "1 minute", "2 hours", "3 days"]
    assert [size(n) for n in (0, 1_023, 1_024, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert printable("a\x1b[2Jb") == "a?[2Jb"


def test_a_broker_at_a_glance() -> None:
    assert glance(WELL) == [
        "b1 is well: up 2 hours, at 127.0.0.1:7420",
        "  network  1 other broker in reach; linked to b2 (0.4 ms)",
        "  clients  1 client, 2 subscriptions; 1 durable subscription, 0 connected",
        "  events   1,234 events published here, 3 deliveries",
        "  durable  3 durable events since it started, 2.0 KiB kept",
        "  queues   1 message waits in 2 inboxes that it answers for",
    ]
    assert broker_line(WELL) == (
        "b1  127.0.0.1:7420  up 2 hours  1 link  1 client  1,234 events in  3 delivered  well"
    )


@pytest.mark.parametrize("metric", CONCERNS)
def test_what_is_not_as_it_should_be_is_said(metric: str) -> None:
    for number, at in ((1, 0), (2_000, 1)):
        ill = WELL | {"metrics": WELL["metrics"] | {metric: number}}
        assert concerns(ill) == [f"{number:,} {CONCERNS[metric][at]}"]
        assert glance(ill)[0].startswith("b1 works, but look below")
        assert glance(ill)[-1] == f"  look at  {number:,} {CONCERNS[metric][at]}"


def test_a_slow_kernel_and_a_broker_alone() -> None:
    alone = WELL | {
        "kernel": "reference",
        "brokers": [{"broker": "b1"}],
        "links": [],
        "ring": {"joining": True},
    }
    assert "  network  no other broker is linked" in glance(alone)
    assert concerns(alone) == [
        "its kernel is not compiled: it works, slowly",
        "it is still joining the ring of queues",
    ]
