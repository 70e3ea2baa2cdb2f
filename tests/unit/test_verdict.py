"""T12: what is made of the brokers' answers, also of many, of strange and of hostile ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

import pytest

from postroad.errors import PeerError
from postroad.ids import MessageId
from postroad.tracking.messages import (
    MAX_SIGHTINGS,
    Finding,
    Receiver,
    Sighting,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.render import tree
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.tracking.trace import Trace
from postroad.tracking.verdict import TraceResult, judge, share

TIME_MS = 1_700_000_000_000
IDENTITY = MessageId(5, 1, TIME_MS, 0)


def judged(findings: Mapping[int, Finding]) -> TraceResult:
    return judge(IDENTITY, findings, failed=[], stopped="", names={})


def received(count: int, fpp: float) -> tuple[Receiver, ...]:
    return tuple(Receiver(subscriber=f"s{number}", fpp=fpp) for number in range(count))


def sighting(neighbour: int, fpp: float = 1e-3) -> Sighting:
    return Sighting(origin=1, neighbour=neighbour, fpp=fpp)


@pytest.mark.parametrize("fpp", [0.0, 1e-3, 0.9])
def test_hundreds_of_receivers_among_more_candidates(fpp: float) -> None:
    """600 of 1,200: the number of ways to choose them is larger than any float."""
    finding = Finding(published=1e-3, delivered=received(600, fpp), candidates=1200)
    result = judged({1: finding})
    assert (result.verdict, len(result.receivers)) == ("complete", 600)
    assert result.origin_doubt is not None
    assert 0 <= result.origin_doubt <= 1e-3


def test_doubt_of_an_origin_is_the_product_of_what_speaks_for_it() -> None:
    """Its own rate, that of two receivers among ten, and those of a broker below with one of three."""
    findings = {
        1: Finding(published=1e-2, delivered=received(2, 1e-3), candidates=10),
        2: Finding(routed=(sighting(1, 2e-3),), delivered=received(1, 4e-3), candidates=3),
    }
    expected = 1e-2 * comb(10, 2) * 1e-3**2 * 2e-3 * 3 * 4e-3
    assert judged(findings).origin_doubt == pytest.approx(expected, rel=1e-9, abs=0)


def test_what_a_broker_says_counts_once_by_whatever_way_it_is_reached() -> None:
    """After a reroute broker 4 has the message from 2 and from 3, which are both below 1."""
    findings = {
        1: Finding(published=1e-2),
        2: Finding(routed=(sighting(1),)),
        3: Finding(routed=(sighting(1),)),
        4: Finding(routed=(sighting(2), sighting(3)), delivered=received(1, 1e-3), candidates=1),
    }
    assert judged(findings).origin_doubt == pytest.approx(1e-2 * 1e-3**3 * 1e-3, rel=1e-9, abs=0)


def test_brokers_that_all_name_each_other_are_judged_in_time() -> None:
    """There are 29! ways through these claims."""
    brokers = range(1, 31)
    findings = {
        broker: Finding(routed=tuple(sighting(other) for other in brokers if other != broker))
        for broker in brokers
    }
    result = judged(findings)
    assert len(result.route) == 30 * 29
    assert result.verdict == "partial"


@pytest.mark.parametrize(
    ("source", "contradicted"),
    [
        (Finding(), True),
        (Finding(lost="died"), False),
        (Finding(forgotten=True), False),
        (Finding(begins_ms=TIME_MS + 1), False),
        (Finding(begins_ms=TIME_MS), True),
    ],
)
def test_only_a_whole_record_contradicts(source: Finding, contradicted: bool) -> None:
    """Broker 3 has the message from 2, which knows nothing of it: because it has not, or does not know."""
    findings = {1: Finding(published=0.0), 2: source, 3: Finding(routed=(sighting(2, 1e-6),))}
    doubts = {step.broker: step.doubt for step in judged(findings).route}
    assert (doubts["00000003"] == 1.0) is contradicted


@pytest.mark.parametrize(
    "finding",
    [
        Finding(published=float("nan")),
        Finding(published=-0.1),
        Finding(routed=(sighting(2, 1.5),)),
        Finding(routed=tuple(sighting(number) for number in range(MAX_SIGHTINGS + 1))),
        Finding(delivered=received(1, 0.5), more=-1),
        Finding(delivered=received(1, 0.5), candidates=-1),
    ],
)
def test_what_a_peer_says_is_checked(finding: Finding) -> None:
    trace = Trace([bytes(IDENTITY)], reachable=[1], now_us=TIME_MS * 1000)
    trace.start(TIME_MS * 1000)
    with pytest.raises(PeerError):
        trace.answered(1, TraceAnswer(findings=(finding,)), TIME_MS * 1000)


def test_a_filter_is_never_certain() -> None:
    """Nearly empty, it is wrong less often than 1 differs from 1 - 1e-17, and yet not never."""
    now_us = TIME_MS * 1000
    tracking = make_tracking(TrackingConfig(), me=1, stored=(), changes=(), now_us=now_us - 10**7)
    tracking.attached("ann", now_us)
    tracking.published(bytes(IDENTITY), now_us)
    tracking.delivered(1, ("ann",), bytes(IDENTITY), now_us)
    question = TraceQuestion(items=(TraceItem(id=bytes(IDENTITY), origin=1),))
    (finding,) = tracking.answer(question, {}, now_us).findings
    result = judged({1: finding})
    assert result.origin_doubt is not None
    assert 0 < result.origin_doubt < 1e-17
    assert [0 < one.doubt < 1e-17 for one in result.receivers] == [True]
    assert "certain" not in tree(result)


@pytest.mark.parametrize(
    ("rate", "claimed", "candidates"), [(0.1, 3, 20), (1e-3, 1, 1000), (0.5, 5, 5), (0, 1, 9)]
)
def test_the_share_of_false_claims(rate: float, claimed: int, candidates: int) -> None:
    """h = T + (N - T) f claims, of which (N - T) f are false."""
    true = (claimed - candidates * rate) / (1 - rate)
    expected = min(1.0, max(rate, 1 - true / claimed))
    assert share(rate, claimed, candidates) == pytest.approx(expected)
    assert share(1.0, claimed, candidates) == 1.0
