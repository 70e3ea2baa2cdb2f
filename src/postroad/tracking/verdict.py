"""From what the brokers said to an answer: who to believe how much, and what is missing (spec T12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, lgamma, log
from typing import Any, Final

import msgspec

from postroad.ids import MessageId
from postroad.tracking.messages import Finding

COMPLETE: Final = "complete"
PARTIAL: Final = "partial"
UNKNOWN: Final = "unknown"
BEFORE_HISTORY: Final = "before-history"
UNREACHABLE: Final = "unreachable"
# How often, per broker that routed a message, nobody there got it; and how often somebody did. Brokers send
# messages only where they are wanted, so a dead end is rare: a subscriber that left, or one that dropped it.
TRUE_DEAD_ENDS: Final = 0.01
TRUE_BRANCHES: Final = 0.5


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    broker: int
    why: str


class RouteStep(msgspec.Struct, frozen=True, kw_only=True):
    broker: str
    source: str | None  # the neighbour it came from; None at the origin
    doubt: float


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    subscriber: str
    broker: str
    doubt: float


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one message. `verdict` is complete, partial, unknown, before-history or unreachable."""

    id: str
    publisher: int
    origin: str  # the broker it was published at, as far as known; else the one in the id
    origin_doubt: float | None  # None: nobody confirms that it was published
    route: tuple[RouteStep, ...]  # the origin first, then along the tree
    receivers: tuple[Delivered, ...]
    verdict: str
    explanation: str  # one sentence, "" when complete
    missing: tuple[tuple[str, str], ...]  # (broker, why its part is missing)

    def to_json(self) -> dict[str, Any]:
        """As `postroad trace --json` prints it."""
        return {
            "id": self.id,
            "origin": {"publisher": f"{self.publisher:08x}", "broker": self.origin},
            "route": [
                {"broker": step.broker, "from": step.source, "doubt": step.doubt} for step in self.route
            ],
            "receivers": [
                {"subscriber": one.subscriber, "broker": one.broker, "doubt": one.doubt}
                for one in self.receivers
            ],
            "missing": {
                "verdict": self.verdict,
                "text": self.explanation,
                "brokers": [{"broker": broker, "why": why} for broker, why in self.missing],
            },
        }


class _Claim:
    """One broker says: it came to me from `source` (None: from the publisher)."""

    __slots__ = ("broker", "contradicted", "doubt", "rate", "source")

    def __init__(self, broker: int, source: int | None, rate: float) -> None:
        self.broker = broker
        self.source = source
        self.rate = rate
        self.doubt = rate
        self.contradicted = False


def judge(
    identity: MessageId,
    findings: Mapping[int, Finding],
    *,
    failed: Sequence[Missing],
    stopped: str,
    names: Mapping[int, str],
) -> TraceResult:
    claims = _claims(identity, findings)
    _weigh(identity, claims, findings)
    chosen = _ordered(claims)
    route = tuple(
        RouteStep(
            broker=_name(claim.broker, names),
            source=None if claim.source is None else _name(claim.source, names),
            doubt=claim.doubt,
        )
        for claim in chosen
    )
    receivers = _receivers(chosen, findings, names)
    origin = next((claim for claim in chosen if claim.source is None), None)
    missing = [(_name(one.broker, names), one.why) for one in failed]
    missing += [(_name(broker, names), held.lost) for broker, held in sorted(findings.items()) if held.lost]
    missing += [
        (_name(broker, names), f"{held.more} more receivers")
        for broker, held in sorted(findings.items())
        if held.more
    ]
    # What could not be asked matters only if the message may have gone there, as it may wherever a trace
    # went; except that the broker in the id need not answer once another proves to be the origin, unless the
    # message may have gone there like anywhere else.
    gone_on = {broker for held in findings.values() for broker in onward(held)}
    if origin is not None and identity.broker not in gone_on | {origin.broker}:
        missing = [one for one in missing if one[0] != _name(identity.broker, names)]
    verdict, explanation = _verdict(identity, findings, origin, chosen, missing, stopped, names)
    return TraceResult(
        id=str(identity),
        publisher=identity.publisher,
        origin=_name(identity.broker if origin is None else origin.broker, names),
        origin_doubt=None if origin is None else origin.doubt,
        route=route,
        receivers=receivers,
        verdict=verdict,
        explanation=explanation,
        missing=tuple(missing),
    )


def not_whole(finding: Finding) -> bool:
    """Whether the broker may have had the message without knowing of it any more."""
    return finding.forgotten or bool(finding.lost)


def onward(finding: Finding) -> set[int]:
    """Where the broker may have passed the message on to."""
    if not_whole(finding):
        return set(finding.neighbours)
    if finding.published is None and not finding.routed:
        return set()
    if finding.forwarded is None:
        return set(finding.neighbours)
    return {forwarding.neighbour for forwarding in finding.forwarded}


def _claims(identity: MessageId, findings: Mapping[int, Finding]) -> list[_Claim]:
    claims: list[_Claim] = []
    for broker, finding in sorted(findings.items()):
        if finding.published is not None:
            claim = _Claim(broker, None, finding.published)
            # A message published elsewhere than its id says is rare; many were asked until one claimed it.
            if broker != identity.broker:
                claim.rate = claim.doubt = min(1.0, finding.published * len(findings))
            claims.append(claim)
        claims += [_Claim(broker, sighting.neighbour, sighting.fpp) for sighting in finding.routed]
    return claims


def _weigh(identity: MessageId, claims: list[_Claim], findings: Mapping[int, Finding]) -> None:
    """Corroboration along the tree: each claim's doubt."""
    # Only who would know is believed to know nothing.
    whole = {
        broker
        for broker, held in findings.items()
        if not (not_whole(held) or identity.time_ms < held.begins_ms)
    }
    claiming = {claim.broker for claim in claims}
    below: dict[int, list[_Claim]] = {}  # broker -> claims that name it as their source
    for claim in claims:
        if claim.source is not None:
            below.setdefault(claim.source, []).append(claim)
            claim.contradicted = claim.source in whole and claim.source not in claiming
    # Others have it from these, which do not know of it any more. Some neighbour passed it on to them.
    silent = below.keys() - claiming - whole
    for claim in claims:
        supported, rate_below = _rate_below(claim.broker, below, findings)
        if claim.source is None:
            claim.doubt = claim.rate * rate_below
        elif claim.contradicted and not supported:
            claim.doubt = 1.0
        else:
            # False claims of this kind to be expected among all who were asked, against true ones.
            false = min(1.0, len(findings) * claim.rate) * rate_below
            ahead = (silent & onward(findings[claim.broker])) - {claim.source}
            led_on = any(other.broker != claim.broker for broker in ahead for other in below[broker])
            claim.doubt = false / (false + (TRUE_BRANCHES if supported or led_on else TRUE_DEAD_ENDS))


def _rate_below(
    broker: int, below: Mapping[int, list[_Claim]], findings: Mapping[int, Finding]
) -> tuple[bool, float]:
    """Whether anything speaks for this broker having had the message, and how likely all that is false.

    Every broker below counts once, whichever of its claims leads there first: what it delivered speaks once.
    """
    rate = 1.0
    reached = {broker}
    queue = [broker]
    for here in queue:
        rate *= _rate_delivered(findings[here])
        for claim in below.get(here, ()):
            if claim.broker not in reached:
                reached.add(claim.broker)
                queue.append(claim.broker)
                rate *= claim.rate
    return bool(findings[broker].delivered) or len(queue) > 1, rate


def _rate_delivered(finding: Finding) -> float:
    """How likely so many of the candidates are claimed falsely, at most: their binomial term."""
    claimed = len(finding.delivered)
    if any(receiver.fpp == 0 for receiver in finding.delivered):
        return 0.0
    # The logarithm, since the number of ways to choose hundreds is more than a float holds.
    left = max(0, finding.candidates - claimed)
    ways = lgamma(claimed + left + 1) - lgamma(claimed + 1) - lgamma(left + 1)
    return exp(min(0.0, ways + sum(log(receiver.fpp) for receiver in finding.delivered)))


def _ordered(claims: list[_Claim]) -> list[_Claim]:
    """The origin, then breadth first along the sources; then likewise below sources that claim nothing."""
    rest = sorted(claims, key=lambda claim: (claim.doubt, claim.broker, claim.source or 0))
    origins = [claim for claim in rest if claim.source is None]
    placed = origins[:1]  # a message is published once: any other claim of that is less likely
    rest = [claim for claim in rest if claim.source is not None]
    reached: set[int | None] = {claim.broker for claim in placed}
    while rest:
        if not any(claim.source in reached for claim in rest):
            silent = {claim.source for claim in rest} - {claim.broker for claim in rest}
            reached |= silent or {rest[0].source}  # in a ring there is none
        step = [claim for claim in rest if claim.source in reached]
        rest = [claim for claim in rest if claim.source not in reached]
        step.sort(key=lambda claim: (claim.source or 0, claim.broker))
        placed += step
        reached |= {claim.broker for claim in step}
    return placed


def _receivers(
    claims: list[_Claim], findings: Mapping[int, Finding], names: Mapping[int, str]
) -> tuple[Delivered, ...]:
    found: list[Delivered] = []
    for broker in dict.fromkeys(claim.broker for claim in claims):
        finding = findings[broker]
        doubtful = all(claim.doubt >= 1.0 for claim in claims if claim.broker == broker)
        claimed = len(finding.delivered) + finding.more
        found += [
            Delivered(
                subscriber=receiver.subscriber,
                broker=_name(broker, names),
                doubt=1.0 if doubtful else share(receiver.fpp, claimed, finding.candidates),
            )
            for receiver in finding.delivered
        ]
    return tuple(found)


def share(rate: float, claimed: int, candidates: int) -> float:
    """The share of false claims among `claimed`, of `candidates` tested at that rate."""
    if rate >= 1.0:
        return 1.0
    # 1 - T / h, where h = T + (N - T) f.
    return min(1.0, max(rate, rate * (candidates - claimed) / (claimed * (1 - rate))))


def _verdict(
    identity: MessageId,
    findings: Mapping[int, Finding],
    origin: _Claim | None,
    chosen: list[_Claim],
    missing: list[tuple[str, str]],
    stopped: str,
    names: Mapping[int, str],
) -> tuple[str, str]:
    home = findings.get(identity.broker)
    name = _name(identity.broker, names)
    if origin is None and not chosen:
        if home is None and not stopped:
            return UNREACHABLE, f"broker {name}, where the message was published, cannot be reached"
        if home is not None and identity.time_ms < home.begins_ms:
            return BEFORE_HISTORY, f"the history of broker {name} does not reach back to that time"
        if home is not None and not home.lost and not missing and not stopped:
            return UNKNOWN, f"broker {name} has no record of such a message"
    if origin is None:
        reason = stopped or (home.lost if home is not None else f"broker {name} cannot be reached")
        if home is not None and identity.time_ms < home.begins_ms:
            reason = f"the history of broker {name} does not reach back to that time"
        return PARTIAL, f"the origin is not confirmed: {reason or f'broker {name} has no record of it'}"
    # A broker that began later cannot have routed it; one that forgot may have.
    early = [_name(broker, names) for broker, held in sorted(findings.items()) if held.forgotten]
    if missing or stopped or early:
        parts = [stopped] if stopped else []
        parts += [f"{broker}: {why}" for broker, why in missing]
        parts += [f"{broker}: its history does not reach back to that time" for broker in early]
        return PARTIAL, "; ".join(parts)
    return COMPLETE, ""


def _name(broker: int, names: Mapping[int, str]) -> str:
    return names.get(broker) or f"{broker:08x}"
