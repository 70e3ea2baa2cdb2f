"""What traces know of best-effort events and of queue messages, from records to the answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from postroad.client.repair.neighbours import Neighbours
from postroad.client.repair.receiver import Receiver
from postroad.client.repair.reporting import MAX_IDS, MAX_WAITING, REPORT_US, Reporting
from postroad.client.repair.settings import DEFAULTS
from postroad.ids import MessageId, first_number, queue_message_id, session_from
from postroad.tracking.query.render import dot, tree
from postroad.tracking.query.trace import Trace
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking

NOW_MS = 1_800_000_000_000
NOW = NOW_MS * 1_000
NAMES = {1: "b1", 2: "b2", 3: "b3"}


def line(strategy: str) -> dict[int, Tracking]:
    """Three brokers in a line; a subscriber at the last two."""
    config = TrackingConfig(strategy=strategy)
    made = {me: make_tracking(config, me=me, stored=(), changes=(), now_us=NOW) for me in NAMES}
    for one, two in ((1, 2), (2, 3)):
        made[one].linked(two, NOW)
        made[two].linked(one, NOW)
    for broker in (2, 3):
        made[broker].attached(f"s{broker}", NOW)
    return made


def traced(brokers: dict[int, Tracking], identity: bytes, away: Iterable[int] = ()) -> TraceResult:
    reachable = set(brokers) - set(away)
    trace = Trace([identity], reachable=reachable, known=brokers, now_us=0)
    asks = trace.start(0)
    while asks:
        ask = asks.pop()
        answer, unread = brokers[ask.broker].answer(ask.question, {})
        assert unread == ()
        asks += trace.answered(ask.broker, answer, 0)
    (result,) = trace.results(NAMES)
    return result


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_an_event_that_was_lost_on_a_link_and_repaired_behind_it(strategy: str) -> None:
    brokers = line(strategy)
    identity = bytes(MessageId(5, 1, NOW_MS, 1))
    brokers[1].published(identity, NOW)
    brokers[1].sent(1, 2, identity, NOW)
    result = traced(brokers, identity)
    assert [(loss.source, loss.target) for loss in result.lost] == [("b1", "b2")]
    assert result.receivers == ()
    later = NOW + 3_000_000
    brokers[2].repaired("s2", identity, later)
    brokers[3].repaired("s3", identity, later)  # where no neighbour of the origin leads
    result = traced(brokers, identity)
    assert [(one.subscriber, one.broker, one.repair) for one in result.receivers] == [
        ("s2", "b2", True),
        ("s3", "b3", True),
    ]
    assert max(one.doubt for one in (*result.receivers, *result.lost)) < 0.01
    told = result.to_json()
    assert told["lost"] == [{"from": "b1", "to": "b2", "doubt": result.lost[0].doubt}]
    assert [one["repair"] for one in told["receivers"]] == [True, True]
    shown = tree(result)
    assert "lost from b1 to b2" in shown
    assert "at b3 → s3, as a repair" in shown
    assert "s3, as a repair" in dot(result)


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_an_event_that_came_is_not_lost_and_the_last_step_may_be(strategy: str) -> None:
    brokers = line(strategy)
    identity = bytes(MessageId(5, 1, NOW_MS, 1))
    brokers[1].published(identity, NOW)
    brokers[1].sent(1, 2, identity, NOW)
    brokers[2].routed(1, 1, identity, NOW)
    brokers[2].delivered(1, ["s2"], identity, NOW)
    result = traced(brokers, identity)
    assert (result.lost, [one.repair for one in result.receivers]) == ((), [False])
    assert set(result.to_json()["receivers"][0]) == {"subscriber", "broker", "doubt"}
    brokers[2].repaired("s2", identity, NOW + 1_000_000)
    result = traced(brokers, identity)
    assert [(loss.source, loss.target) for loss in result.lost] == [("b2", "s2")]
    assert [(one.subscriber, one.repair) for one in result.receivers] == [("s2", True)]


def test_where_a_broker_cannot_be_asked_nobody_says_that_it_lost_something() -> None:
    brokers = line("bloom")
    identity = bytes(MessageId(5, 1, NOW_MS, 1))
    brokers[1].published(identity, NOW)
    brokers[1].sent(1, 2, identity, NOW)
    result = traced(brokers, identity, away=[2])
    assert (result.lost, result.verdict) == ((), "partial")


def test_a_queue_message_may_be_anywhere_until_somebody_accepts_it() -> None:
    """Its way keeps to no links: b1 is no neighbour of b3, which is responsible."""
    brokers = line("bloom")
    identity = queue_message_id(session_from(b"abcdef"), first_number(NOW_MS))
    brokers[1].published(identity, NOW)
    assert traced(brokers, identity).verdict == "complete"
    result = traced(brokers, identity, away=[3])
    assert (result.verdict, result.missing) == ("partial", (("b3", "cannot be reached"),))
    brokers[3].routed(1, 1, identity, NOW)
    brokers[2].routed(1, 3, identity, NOW)
    brokers[2].delivered(1, ["s2"], identity, NOW)
    result = traced(brokers, identity)
    assert [(step.broker, step.source) for step in result.route] == [
        ("b1", None),
        ("b3", "b1"),
        ("b2", "b3"),
    ]
    assert result.verdict == "complete"
    result = traced(brokers, identity, away=[3])
    assert (result.verdict, [name for name, _ in result.missing]) == ("partial", ["b3"])
    assert [one.subscriber for one in result.receivers] == ["s2"]


def test_subscribers_tell_of_repairs_a_part_at_a_time_once_a_second() -> None:
    reporting, receiver = Reporting(), Receiver(bytes(8), (), DEFAULTS, 0)
    mine = (7, receiver, Neighbours(bytes(8), DEFAULTS, draw=lambda _: 0))
    assert reporting.next_deadline() is None
    reporting.received(7, 3)
    (first,) = reporting.take([mine], NOW)
    assert (first.number, first.ids, first.received) == (7, b"", 3)
    assert reporting.take([mine], NOW + REPORT_US) == []  # nothing is new
    ids = [number.to_bytes(16, "big") for number in range(MAX_WAITING + 5)]
    for identity in ids:
        reporting.repaired(7, identity)
    assert reporting.next_deadline() == NOW + REPORT_US
    told = b""
    now_us = NOW
    while reporting.next_deadline() is not None:
        now_us += REPORT_US
        for report in reporting.take([mine], now_us):
            assert 0 < len(report.ids) <= MAX_IDS * 16
            told += report.ids
    assert told == b"".join(ids[5:])  # the oldest were too many
    reporting.end(7)
    assert reporting.take([mine], now_us + REPORT_US) == []
