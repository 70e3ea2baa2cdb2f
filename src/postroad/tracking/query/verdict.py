"""From what the brokers said to an answer: who to believe how much, and what is missing (spec T12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import comb, prod
from typing import Any, Final, TypeVar

import msgspec

from postroad.ids import OWN_IDS, QUEUE_IDS, MessageId, of_a_broker
from postroad.tracking.query.messages import Finding

COMPLETE: Final = "complete"
PARTIAL: Final = "partial"
UNKNOWN: Final = "unknown"
BEFORE_HISTORY: Final = "before-history"
UNREACHABLE: Final = "unreachable"
NO_RECORD: Final = "its history does not reach back to that time"
MOST_NAMED: Final = 32  # brokers in a sentence
# How often, per broker that routed a message, nobody there got it; and how often somebody did. Brokers send
# messages only where they are wanted, so a dead end is rare: a subscriber that left, or one that dropped it.
TRUE_DEAD_ENDS: Final = 0.01
TRUE_BRANCHES: Final = 0.5
TRUE_LOSSES: Final = 0.01  # how often a best-effort event is lost on a link, or comes as a repair
TRUE_REPEATS: Final = 0.001  # how often a message is published at a second broker as well
BELIEVED: Final = 0.5  # a claim of less doubt is more likely true than false
MOST_WEIGHED: Final = 256  # keys of one broker of which every number of false ones is weighed
_LARGE: Final = 1e100
T = TypeVar("T")
_NEGLIGIBLE: Final = 1e-12


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
    repair: bool = False  # of a best-effort event: not as it was first sent, but as a repair


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A best-effort event went from here to there and did not arrive."""

    source: str
    target: str  # a broker, or a subscriber that got a repair
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
    lost: tuple[Loss, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `postroad trace --json` prints it; `lost` and `repair` only where there is something to say."""
        lost = [{"from": loss.source, "to": loss.target, "doubt": loss.doubt} for loss in self.lost]
        return {
            "id": self.id,
            "origin": {"publisher": f"{self.publisher:08x}", "broker": self.origin},
            "route": [
                {"broker": step.broker, "from": step.source, "doubt": step.doubt} for step in self.route
            ],
            "receivers": [
                {"subscriber": receiver.subscriber, "broker": receiver.broker, "doubt": receiver.doubt}
                | ({"repair": True} if receiver.repair else {})
                for receiver in self.receivers
            ],
            **({"lost": lost} if lost else {}),
            "missing": {
                "verdict": self.verdict,
                "text": self.explanation,
                "brokers": [{"broker": broker, "why": why} for broker, why in self.missing],
            },
        }


class _Claim:
    """One broker says: it came to me from `source` (None: from the publisher)."""

    __slots__ = ("broker", "contradicted", "disowned", "doubt", "origin", "rate", "source")

    def __init__(self, broker: int, source: int | None, rate: float, *, origin: int) -> None:
        self.broker = broker
        self.source = source
        self.origin = origin
        self.rate = rate
        self.doubt = rate
        self.contradicted = False  # the neighbour named would know of it, and does not
        self.disowned = False  # the origin would


def judge(
    identity: MessageId,
    findings: Mapping[int, Finding],
    *,
    failed: Sequence[Missing],
    stopped: str,
    names: Mapping[int, str],
) -> TraceResult:
    claims = _claims(identity, findings)
    received = {broker: _rate_delivered(finding) for broker, finding in findings.items()}
    _weigh(identity, claims, findings, received)
    chosen = _ordered(identity, claims, received)
    route = tuple(
        RouteStep(
            broker=_name(claim.broker, names),
            source=None if claim.source is None else _name(claim.source, names),
            doubt=claim.doubt,
        )
        for claim in chosen
    )
    receivers, lost = _with_repairs(_receivers(chosen, findings, names), findings, names)
    lost += _lost(identity, chosen, findings, names)
    origin = next((claim for claim in chosen if claim.source is None), None)
    # What could not be asked, or does not know any more, matters only if the message may have been there.
    # While nobody says that it was published there, that is anywhere. So it is for a message of a queue,
    # which keeps to no links, until somebody has accepted it.
    gaps = [(absent.broker, absent.why) for absent in failed] + _gaps(findings)
    if identity.broker >= QUEUE_IDS:
        if origin is not None and receivers:
            sources = {claim.source for claim in chosen}
            gaps = [gap for gap in gaps if gap[0] in sources]
    elif origin is not None:
        way = _way(identity, chosen, findings)
        gaps = [gap for gap in gaps if gap[0] in way]
    missing = [(_name(broker, names), why) for broker, why in gaps]
    verdict, explanation = _verdict(identity, findings, chosen, missing, stopped, names)
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
        lost=tuple(lost),
    )


def within(result: TraceResult, most_bytes: int) -> TraceResult:
    """The result with as many rows as fit the JSON; it counts the rows left out, and is then partial."""
    rows = max(len(result.route), len(result.receivers), len(result.missing), len(result.lost))
    fitted = result
    while rows and (size := len(msgspec.json.encode(fitted))) > most_bytes:
        rows = min(rows - 1, rows * most_bytes // size) * 63 // 64  # something is around them
        fitted = _cut(result, rows)
    return fitted


def _cut(result: TraceResult, rows: int) -> TraceResult:
    left = Counter(receiver.broker for receiver in result.receivers[rows:])
    cut = [(broker, f"{count} more receivers") for broker, count in left.items()]
    if len(result.route) > rows:
        cut.append((result.origin, f"{len(result.route) - rows} more steps of the route"))
    if len(result.missing) > rows:
        cut.append((result.origin, f"{len(result.missing) - rows} more brokers whose part is missing"))
    return msgspec.structs.replace(
        result,
        route=result.route[:rows],
        receivers=result.receivers[:rows],
        lost=result.lost[:rows],
        missing=(*result.missing[:rows], *cut[:rows]),
        verdict=PARTIAL if result.verdict == COMPLETE else result.verdict,
        explanation="; ".join([part for part in (result.explanation, *_sentences(cut)) if part]),
    )


def _sentences(missing: Sequence[tuple[str, str]]) -> list[str]:
    parts = [f"{broker}: {why}" for broker, why in missing[:MOST_NAMED]]
    return parts + ([f"and {len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else [])


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


def _gaps(findings: Mapping[int, Finding]) -> list[tuple[int, str]]:
    """(broker, why its part is missing) of those that answered. One that began later had nothing."""
    answered = sorted(findings.items())
    gaps = [(broker, finding.lost) for broker, finding in answered if finding.lost]
    gaps += [(broker, f"{finding.more} more receivers") for broker, finding in answered if finding.more]
    return gaps + [(broker, NO_RECORD) for broker, finding in answered if finding.forgotten]


def _way(identity: MessageId, chosen: Sequence[_Claim], findings: Mapping[int, Finding]) -> set[int]:
    """The brokers that the message may have come to, from those that surely had it and the one in the id."""
    had = {identity.broker} | {
        claim.broker for claim in chosen if claim.doubt < BELIEVED or claim is chosen[0]
    }
    way = set(had)
    queue = sorted(way)
    for broker in queue:
        finding = findings.get(broker)
        # Not from one that only claims a publication that is not believed.
        if finding is not None and (broker in had or finding.routed or not_whole(finding)):
            near = onward(finding) | {sighting.neighbour for sighting in finding.routed}
            queue += sorted(near - way)
            way |= near
    return way


def _claims(identity: MessageId, findings: Mapping[int, Finding]) -> list[_Claim]:
    claims: list[_Claim] = []
    for broker, finding in sorted(findings.items()):
        if finding.published is not None:
            claim = _Claim(broker, None, finding.published, origin=broker)
            # A message published elsewhere than its id says is rare; many were asked until one claimed it.
            if broker != identity.broker:
                claim.rate = claim.doubt = min(1.0, finding.published * len(findings))
            claims.append(claim)
        claims += [
            _Claim(broker, sighting.neighbour, sighting.fpp, origin=sighting.origin)
            for sighting in finding.routed
        ]
    return claims


def _weigh(
    identity: MessageId, claims: list[_Claim], findings: Mapping[int, Finding], received: Mapping[int, float]
) -> None:
    """Corroboration along the tree: each claim's doubt."""
    # Only who would know is believed to know nothing.
    whole = {
        broker
        for broker, finding in findings.items()
        if not (not_whole(finding) or identity.time_ms < finding.begins_ms)
    }
    claiming = {claim.broker for claim in claims}
    below: dict[int, list[_Claim]] = {}  # broker -> claims that name it as their source
    for claim in claims:
        if claim.source is not None:
            below.setdefault(claim.source, []).append(claim)
            claim.contradicted = claim.source in whole and claim.source not in claiming
            claim.disowned = claim.origin in whole and findings[claim.origin].published is None
    # Others have it from these, which do not know of it any more. Some neighbour passed it on to them.
    silent = below.keys() - claiming - whole
    support = _support(claims, below, findings, received)
    for claim in claims:
        supported = support[claim.broker].somebody
        if claim.source is None:
            claim.doubt = _all_false(claim, support[claim.broker], asked=1)
            continue
        # False claims of this kind to be expected among all who were asked, against true ones.
        false = _all_false(claim, support[claim.broker], asked=len(findings))
        if claim.disowned or (claim.contradicted and not supported):
            claim.doubt = 1.0
        else:
            ahead = (silent & onward(findings[claim.broker])) - {claim.source}
            led_on = any(other.broker != claim.broker for broker in ahead for other in below[broker])
            claim.doubt = _odds(false, TRUE_BRANCHES if supported or led_on else TRUE_DEAD_ENDS)


def _odds(false: float, true: float) -> float:
    return false / (false + true)


class _Support:
    """What speaks for the claims of a broker, there and below."""

    __slots__ = ("delivered", "least", "somebody")

    def __init__(self, finding: Finding, delivered: float) -> None:
        self.least: dict[int, float] = {}  # rate of the claims below, by origin
        self.delivered = delivered  # how likely all who are said to have got it are claimed falsely
        self.somebody = bool(finding.delivered) or not_whole(finding)  # whether anybody may have got it

    def lead(self, claim: _Claim) -> None:
        """A claim that leads from here further down."""
        self.least[claim.origin] = min(claim.rate, self.least.get(claim.origin, 1.0))

    def add(self, other: _Support) -> None:
        for origin, rate in other.least.items():
            self.least[origin] = min(rate, self.least.get(origin, 1.0))
        self.delivered *= other.delivered
        self.somebody = self.somebody or other.somebody


def _all_false(claim: _Claim, support: _Support, *, asked: int) -> float:
    """How likely a claim is false with all that speaks for it.

    Histories of one origin hold much the same ids and find them in the same places, so they are wrong about
    the same ones: together they are as likely wrong as the best of them. Those of another origin, and what
    was delivered, are independent.
    """
    own = min(claim.rate, support.least.get(claim.origin, 1.0))
    others = prod(rate for origin, rate in support.least.items() if origin != claim.origin)
    return min(1.0, asked * own * others) * support.delivered


def _support(
    claims: Sequence[_Claim],
    below: Mapping[int, list[_Claim]],
    findings: Mapping[int, Finding],
    received: Mapping[int, float],
) -> dict[int, _Support]:
    """By broker that claims the message. Every broker below counts once, by the claim that leads there first.

    Each is put together from those just below it, the leaves first. Above a broker that has the message from
    several, and in a ring, some would count twice so: from there the whole way down is walked.
    """
    own = {
        broker: _Support(findings[broker], received[broker]) for broker in {claim.broker for claim in claims}
    }
    leading: dict[int, list[int]] = {}  # broker -> where it has it from
    for claim in claims:
        if claim.source is not None:
            leading.setdefault(claim.broker, []).append(claim.source)
    waits = {broker: len(below.get(broker, ())) for broker in own}  # claims just below that are not done
    queue = sorted(broker for broker, count in waits.items() if not count)
    done = set(queue)
    for here in queue:
        for claim in below.get(here, ()):
            own[here].lead(claim)
            own[here].add(own[claim.broker])
        sources = leading.get(here, [])
        if len(sources) == 1 and sources[0] in waits:
            waits[sources[0]] -= 1
            if not waits[sources[0]]:
                queue.append(sources[0])
                done.add(sources[0])
    walked = {broker: _walked(broker, below, findings, received) for broker in own.keys() - done}
    return own | walked


def _walked(
    broker: int,
    below: Mapping[int, list[_Claim]],
    findings: Mapping[int, Finding],
    received: Mapping[int, float],
) -> _Support:
    support = _Support(findings[broker], received[broker])
    reached = {broker}
    queue = [broker]
    for here in queue:
        for claim in below.get(here, ()):
            if claim.broker not in reached:
                reached.add(claim.broker)
                queue.append(claim.broker)
                support.lead(claim)
                support.add(_Support(findings[claim.broker], received[claim.broker]))
    return support


def _rate_delivered(finding: Finding) -> float:
    """How likely some key of all that were tried claims somebody falsely, at most. More who are claimed say
    no more: one key of a set claims all its members."""
    rates = [receiver.fpp for receiver in finding.delivered]
    if not rates or min(rates) == 0:
        return 0.0 if rates else 1.0
    return min(1.0, max(rates) * _keys(finding)[1])


def _keys(finding: Finding) -> tuple[int, int]:
    """Those that claim receivers, and those that were tried. Brokers that do not tell have one for each."""
    if not finding.tried:
        return len(finding.delivered) + finding.more, finding.candidates
    return max(1, finding.hits), finding.tried


def _repeated(repeat: _Claim, claims: Sequence[_Claim], received: Mapping[int, float]) -> None:
    """The doubt of a second publication, and with it that of everything that came from there.

    Who got it speaks for it, where it came from there only. Routing histories do not: see `_all_false`.
    """
    false = repeat.rate
    from_there = [claim for claim in claims if claim.origin == repeat.origin]
    elsewhere = {claim.broker for claim in claims if claim.origin != repeat.origin}
    for broker in sorted({claim.broker for claim in from_there} - elsewhere):
        false *= received[broker]
    repeat.doubt = _odds(false, TRUE_REPEATS)
    for claim in from_there:
        claim.doubt = max(claim.doubt, repeat.doubt)


def _ordered(identity: MessageId, claims: list[_Claim], received: Mapping[int, float]) -> list[_Claim]:
    """The origins, then breadth first along the sources; then likewise below sources that claim nothing."""
    # The broker in the id is the first, if it is not unlikely to be one at all.
    placed = sorted(
        (claim for claim in claims if claim.source is None),
        key=lambda claim: (
            claim.broker != identity.broker or claim.doubt >= BELIEVED,
            claim.doubt,
            claim.broker,
        ),
    )
    for repeat in placed[1:]:
        _repeated(repeat, claims, received)
    # What two origins sent the same way went there.
    steps = {
        (claim.source, claim.broker): claim
        for claim in sorted(claims, key=lambda claim: claim.doubt, reverse=True)
        if claim.source is not None
    }
    rest = sorted(steps.values(), key=lambda claim: (claim.doubt, claim.broker, claim.source or 0))
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
    receivers: list[Delivered] = []
    passing = passed_on((claim.broker, claim.source) for claim in claims)
    believed = {claim.broker for claim in claims if claim.doubt < 1.0}
    for broker in dict.fromkeys(claim.broker for claim in claims):
        finding = findings[broker]
        hits, tried = _keys(finding)
        last = broker not in passing
        name = _name(broker, names)
        doubts: dict[tuple[float, int], float] = {}  # most have the same rate, and number of keys
        for receiver in finding.delivered:
            doubt = doubts.get((receiver.fpp, receiver.keys))
            if doubt is None:
                doubt = share(receiver.fpp, hits, tried, wanted=finding.wanted, last=last, keys=receiver.keys)
                doubt = doubts[receiver.fpp, receiver.keys] = doubt if broker in believed else 1.0
            receivers.append(Delivered(subscriber=receiver.subscriber, broker=name, doubt=doubt))
    return tuple(receivers)


def _with_repairs(
    receivers: tuple[Delivered, ...], findings: Mapping[int, Finding], names: Mapping[int, str]
) -> tuple[tuple[Delivered, ...], list[Loss]]:
    """Who got it as a repair, too. One that its broker sent the event itself has lost that on the way."""
    rows = {(receiver.broker, receiver.subscriber): receiver for receiver in receivers}
    lost: list[Loss] = []
    for broker, finding in sorted(findings.items()):
        name = _name(broker, names)
        hits, tried = len(finding.repaired), max(finding.candidates, len(finding.repaired))
        for receiver in finding.repaired:
            doubt = share(receiver.fpp, hits, tried, wanted=TRUE_LOSSES, last=False)
            if (name, receiver.subscriber) in rows:
                lost.append(Loss(source=name, target=receiver.subscriber, doubt=doubt))
            rows[name, receiver.subscriber] = Delivered(
                subscriber=receiver.subscriber, broker=name, doubt=doubt, repair=True
            )
    return tuple(rows.values()), lost


def _lost(
    identity: MessageId, chosen: Sequence[_Claim], findings: Mapping[int, Finding], names: Mapping[int, str]
) -> list[Loss]:
    """The links on which a best-effort event was lost: it was meant for a neighbour that would know of it."""
    came = {(claim.source, claim.broker) for claim in chosen}
    had = {claim.broker: claim.doubt for claim in reversed(chosen) if claim.doubt < BELIEVED}
    lost: list[Loss] = []
    for broker, doubt in had.items():
        for meant in findings[broker].sent:
            neighbour = findings.get(meant.neighbour)
            knows = neighbour is not None and not not_whole(neighbour)
            if neighbour is None or not knows or identity.time_ms < neighbour.begins_ms:
                continue
            if (broker, meant.neighbour) not in came:
                false = max(doubt, _odds(meant.fpp, TRUE_LOSSES))
                lost.append(
                    Loss(source=_name(broker, names), target=_name(meant.neighbour, names), doubt=false)
                )
    return sorted(lost, key=lambda loss: (loss.doubt, loss.source, loss.target))


def passed_on(steps: Iterable[tuple[T, T | None]]) -> set[T]:
    """Of (broker, source): those who need not have delivered it, since they took it or sent it on."""
    return {broker if source is None else source for broker, source in steps}


def common(true: int, wanted: float, *, last: bool) -> float:
    """How common it is that so many true keys claim a message, where there are `wanted` of them for each.

    Few are more common than many: one of them than T by the square of T; or there are about as many for every
    message, if they are more than one. That there is none is rare where the way ends.
    """
    if true:
        about = (1 - 1 / wanted) / (1 + 8 * (true - wanted) ** 2 / wanted) if wanted > 1 else 0.0
        return 1 / true**2 + about
    rare = TRUE_DEAD_ENDS / TRUE_BRANCHES
    return rare if last else min(1 / rare, max(rare, (1 - wanted) / max(wanted, rare)))


@lru_cache(maxsize=4096)
def share(rate: float, hits: int, tried: int, *, wanted: float, last: bool, keys: int = 1) -> float:
    """How likely the `keys` by which somebody is claimed are all false, where `hits` are claimed of `tried`.

    That F of h are false has C(N - h + F, F) f^F ways, and counts by how common h - F true ones are. Any F of
    the h are as likely as any other. `wanted` are the true keys for each message at about that time, and
    `last` says that the way ends there.
    """
    if rate <= 0.0 or rate >= 1.0:
        return float(rate > 0.0)
    if hits > MOST_WEIGHED:  # so many differ little from what is to be expected: h = T + (N - T) f
        return float(min(1.0, rate * (tried - hits) / (hits * (1 - rate))) ** keys)
    weight = 1.0
    total = common(hits, wanted, last=last)
    false = 0.0
    among = 1.0  # the chance that those `keys` are among F of the h
    for number in range(1, hits + 1):
        weight *= rate * (tried - hits + number) / number
        if weight > _LARGE:  # only what they are to each other counts
            weight, total, false = 1.0, total / weight, false / weight
        seen = weight * common(hits - number, wanted, last=last)
        total += seen
        if number < keys:
            continue
        among = 1 / comb(hits, keys) if number == keys else among * number / (number - keys)
        false += seen * among
        if weight < _NEGLIGIBLE * total:
            break
    return false / total


def _verdict(
    identity: MessageId,
    findings: Mapping[int, Finding],
    chosen: list[_Claim],
    missing: list[tuple[str, str]],
    stopped: str,
    names: Mapping[int, str],
) -> tuple[str, str]:
    home = findings.get(identity.broker)
    name = _name(identity.broker, names)
    before = home is not None and identity.time_ms < home.begins_ms
    parts = ([stopped] if stopped else []) + _sentences(missing)
    if chosen and chosen[0].source is None:
        return (PARTIAL, "; ".join(parts)) if parts else (COMPLETE, "")
    if not chosen:
        why = next((why for broker, why in missing if broker == name), "")
        nowhere = identity.broker >= OWN_IDS and home is None and not why  # no broker is in the id
        if home is None and not stopped and not nowhere:
            why = why or "cannot be reached"
            return UNREACHABLE, f"broker {name}, where the message was published, {why}"
        if before:
            return BEFORE_HISTORY, f"the history of broker {name} does not reach back to that time"
        if not parts:
            own = "; what brokers publish under $postroad is not tracked"
            said = own if of_a_broker(identity.publisher) else ""
            who = "no broker has a" if nowhere else f"broker {name} has no"
            return UNKNOWN, f"{who} record of such a message{said}"
    reason = ""
    if before:
        reason = f": the history of broker {name} does not reach back to that time"
    elif home is not None and not home.lost:
        reason = f": broker {name} has no record of it"
    return PARTIAL, "; ".join([f"the origin is not confirmed{reason}", *parts])


def told_apart(names: Mapping[int, str]) -> dict[int, str]:
    """What brokers are called in results: one whose name others have, too, by its name and number."""
    counts = Counter(names.values())
    return {broker: name if counts[name] == 1 else f"{name} ({broker:08x})" for broker, name in names.items()}


def _name(broker: int, names: Mapping[int, str]) -> str:
    return names.get(broker) or f"{broker:08x}"
