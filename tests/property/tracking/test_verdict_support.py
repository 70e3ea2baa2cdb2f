"""T12: what speaks for a claim is put together from the leaves; the naive twin walks down from each."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.ids import MessageId
from postroad.tracking.query import verdict
from postroad.tracking.query.messages import Finding, Receiver, Sighting
from postroad.tracking.query.verdict import judge, not_whole

IDENTITY = MessageId(5, 1, 1_700_000_000_000, 0)


def all_false(
    claim: verdict._Claim, claims: list[verdict._Claim], findings: dict[int, Finding], asked: int
) -> tuple[float, bool]:
    """Every broker below counts once, by the claim that leads there first."""
    least = {claim.origin: claim.rate}
    delivered, supported = 1.0, False
    reached = {claim.broker}
    queue = [claim.broker]
    for here in queue:
        finding = findings[here]
        delivered *= verdict._rate_delivered(finding)
        supported = supported or bool(finding.delivered) or not_whole(finding)
        for other in claims:
            if other.source == here and other.broker not in reached:
                reached.add(other.broker)
                queue.append(other.broker)
                least[other.origin] = min(other.rate, least.get(other.origin, 1.0))
    return min(1.0, asked * prod(least.values())) * delivered, supported


def found(random: Random, brokers: int, shape: str) -> dict[int, Finding]:
    """A tree of brokers that have the message each from one before it; or with further claims in it, of other
    origins and the same sources too; or anything."""
    findings: dict[int, Finding] = {}
    for broker in range(1, brokers + 1):
        sources = [random.randrange(1, broker)] if broker > 1 and random.random() < 0.9 else []
        if shape == "meetings" and broker > 1 and random.random() < 0.2:
            sources += [random.randrange(1, broker), random.choice([1, *sources])]
        elif shape == "anything" and random.random() < 0.3:
            sources += [random.randrange(1, brokers + 2) for _ in range(random.randrange(3))]
        findings[broker] = Finding(
            published=random.choice((None, None, 0.0, 1e-3)) if broker > 1 else 1e-3,
            routed=tuple(
                Sighting(
                    origin=random.choice((1, 1, 2, 3)), neighbour=source, fpp=random.choice((1e-3, 1e-2, 0.3))
                )
                for source in sources
            ),
            delivered=tuple(
                Receiver(subscriber=f"s{number}", fpp=random.choice((1e-3, 1e-2)))
                for number in range(random.choice((0, 0, 1, 4)))
            ),
            candidates=9,
            lost=random.choice(("", "", "", "died")),
            neighbours=tuple(range(1, brokers + 1)),
        )
    return findings


@given(
    seed=st.integers(0, 10**6),
    brokers=st.integers(1, 12),
    shape=st.sampled_from(("tree", "meetings", "anything")),
)
@settings(max_examples=300, deadline=None)
def test_support_is_that_of_the_walk_from_every_claim(seed: int, brokers: int, shape: str) -> None:
    findings = found(Random(seed), brokers, shape)
    claims = verdict._claims(IDENTITY, findings)
    below: dict[int, list[verdict._Claim]] = {}
    for claim in claims:
        if claim.source is not None:
            below.setdefault(claim.source, []).append(claim)
    received = {broker: verdict._rate_delivered(finding) for broker, finding in findings.items()}
    support = verdict._support(claims, below, findings, received)
    for claim in claims:
        for asked in (1, brokers):
            false, supported = all_false(claim, claims, findings, asked)
            mine = support[claim.broker]
            assert verdict._all_false(claim, mine, asked=asked) == pytest.approx(false, rel=1e-9, abs=0)
            assert mine.somebody == supported
    judge(IDENTITY, findings, failed=[], stopped="", names={})


def test_a_tree_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what leads to a broker that has it from two: only what is above that one."""
    walked: list[int] = []
    walk = verdict._walked

    def noted(broker: int, *rest: object) -> verdict._Support:
        walked.append(broker)
        return walk(broker, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(verdict, "_walked", noted)
    findings = {1: Finding(published=1e-3, neighbours=(2, 3))} | {
        broker: Finding(routed=(Sighting(origin=1, neighbour=broker // 2, fpp=1e-3),), neighbours=(1,))
        for broker in range(2, 16)
    }
    judge(IDENTITY, findings, failed=[], stopped="", names={})
    assert walked == []
    twice = tuple(Sighting(origin=1, neighbour=source, fpp=1e-3) for source in (6, 7))
    judge(IDENTITY, findings | {12: Finding(routed=twice)}, failed=[], stopped="", names={})
    assert sorted(walked) == [1, 3, 6, 7]
