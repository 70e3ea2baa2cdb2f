"""The trace of messages: a distributed query of the live network (spec T6, T12; paper 3.3).

The broker that is asked runs it. As in the paper, per message: Ka the brokers to ask, at first the one in the
id; Ke those asked; Kr those that say they routed it; Ks those that delivered it and Sr to whom. Each round
asks all of Ka at once, one question per broker with everything wanted of it, so a trace takes as many round
trips as the message took hops. A broker looks into its routing history first and into its delivery histories
only if that, or its publisher history, claims the message. The next Ka are the neighbours such a broker had
at that time: all, or those to which it recorded to have forwarded it (both optimisations of 3.3); and
whoever it says it got the message from. A broker that claims nothing ends that way, unless its record of that
time is not whole, because a process died with it or retention dropped it: it may have routed the message, so
all its neighbours are asked.

A publisher that loses its broker sends what was not accepted again at another, under the same ids, so more
than one broker may have published a message. When the way from the broker in the id is walked, all other
reachable brokers are asked whether they did; and for what they routed of it, too, if somebody on the way did
not answer. If any of them did, or the broker in the id has no record of it, does not answer, or its record of
that time is not whole, all reachable brokers are asked, for any origin.

Doubt (T12; the arithmetic is in `verdict`). A filter claims a message it never saw with a known rate f.
Histories of one origin hold the same ids, so that all of them together are as likely wrong as the best of
them; who got the message below speaks for a step by itself. A claim that names a neighbour whose record is
whole and who knows nothing of the message is contradicted: its doubt is 1, unless somebody below got it. A
claim below which nobody did is weighed against how rarely a message is sent where nobody wants it. Keys of
receivers, a set of them being one, share the false claims that are to be expected, given how many of those
tried are claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from postroad.errors import BugError, PeerError, UsageError, shorten
from postroad.ids import OWN_IDS, MessageId
from postroad.tracking.query.messages import (
    ANY_ORIGIN,
    MAX_CANDIDATES,
    MAX_ITEMS,
    MAX_NEIGHBOURS,
    MAX_REASON,
    MAX_RECEIVERS,
    MAX_SIGHTINGS,
    Finding,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.query.verdict import Missing, TraceResult, judge, onward, told_apart
from postroad.units import SECOND_US

NO_ANSWER: Final = "did not answer in time"
NOT_REACHABLE: Final = "cannot be reached"
NOT_JUDGED: Final = "answered with numbers that cannot be judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """So that a trace cannot overload the network."""

    fan_out: int = 64  # questions under way at once
    brokers: int = 1024  # asked in all
    rounds: int = 64
    answer_us: int = 2 * SECOND_US
    total_us: int = 10 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send this question to that broker, or answer it yourself; then call `answered` or `failed`."""

    broker: int
    question: TraceQuestion


class _Path:
    """The query state of one message."""

    __slots__ = (
        "everywhere",
        "explore",
        "explored",
        "failed",
        "findings",
        "id",
        "identity",
        "only_published",
        "walked",
    )

    def __init__(self, identity: MessageId) -> None:
        self.identity = identity
        self.id = bytes(identity)
        self.explore: set[int] = {identity.broker}  # Ka
        self.explored: set[int] = set()  # Ke
        self.findings: dict[int, Finding] = {}  # by broker that answered
        self.failed: dict[int, str] = {}  # broker -> why there is no answer
        self.walked = False  # from the broker in the id to where that ends: the others are asked
        self.only_published = False  # whether they published it, not whether they routed it
        self.everywhere = False  # all reachable brokers are asked, for any origin

    def item(self, broker: int) -> TraceItem:
        origin = self.identity.broker
        if self.everywhere:
            origin = ANY_ORIGIN
        elif self.only_published:
            origin = broker
        return TraceItem(id=self.id, origin=origin)

    def take(self, broker: int, finding: Finding) -> None:
        if self.only_published and finding.published is None and not finding.repaired:
            return
        self.findings[broker] = finding
        self.explore |= onward(finding)
        self.explore |= {sighting.neighbour for sighting in finding.routed}
        self.explore |= {meant.neighbour for meant in finding.sent}
        if self.everywhere:
            self.explore |= set(finding.neighbours)  # those that cannot be asked are missing
        self.explore -= self.explored

    def widen(self, others: Iterable[int], known: Iterable[int]) -> None:
        """Ask the others once the way from the broker in the id is walked; all `known` where that fails, or
        where there is none."""
        if self.everywhere:
            return
        if self._origin_missing or self._published_elsewhere or not (self.explore or self.explored):
            self.everywhere, self.only_published = True, False
            # Those asked before were asked for one origin only.
            self.explore = self.explore.union(known) - self.failed.keys()
            self.explored = set(self.failed)
        elif not self.explore and not self.walked:
            self.walked = True
            # Behind a broker that does not answer anybody may have it.
            self.only_published = not self.failed
            self.explore = set(others) - self.explored

    @property
    def _origin_missing(self) -> bool:
        """The broker in the id was asked and could not confirm the message."""
        origin = self.identity.broker
        if origin not in self.explored:
            return False
        finding = self.findings.get(origin)
        return finding is None or finding.published is None

    @property
    def _published_elsewhere(self) -> bool:
        return any(
            finding.published is not None
            for broker, finding in self.findings.items()
            if broker != self.identity.broker
        )


class Trace:
    """One query about some messages. It is done when `done`; then `results` says what it found."""

    def __init__(
        self,
        ids: Iterable[bytes],
        *,
        reachable: Iterable[int],
        known: Iterable[int] = (),
        limits: TraceLimits | None = None,
        trusted: bool = False,
        now_us: int,
    ) -> None:
        """`known` are brokers that may be away; `trusted`: answers are not a peer's, and of any size."""
        self._paths = [_Path(MessageId.from_bytes(identity)) for identity in dict.fromkeys(ids)]
        if not 1 <= len(self._paths) <= MAX_ITEMS:
            raise UsageError(
                f"a trace of {len(self._paths)} messages, 1 to {MAX_ITEMS} can be traced at once"
            )
        self._reachable = frozenset(reachable)
        self._known = self._reachable.union(known)
        for path in self._paths:
            if path.identity.broker >= OWN_IDS and path.identity.broker not in self._known:
                path.explore.clear()  # a program made the id, and no broker is in it
        self._limits = limits or TraceLimits()
        self._trusted = trusted
        self._end_us = now_us + self._limits.total_us
        self._rounds = 0
        self._asked: set[int] = set()
        self._queue: list[tuple[int, list[_Path]]] = []  # of this round, not asked yet
        self._waiting: dict[int, tuple[int, list[_Path]]] = {}  # broker -> (give up at, what was asked)
        self._stopped = ""  # why not everything was asked
        self.done = False

    def start(self, now_us: int) -> list[Ask]:
        if self._rounds:
            raise BugError("a trace begins once")
        return self._advance(now_us)

    def answered(self, broker: int, answer: TraceAnswer, now_us: int) -> list[Ask]:
        """An answer to a question that was not asked, or was given up, says nothing."""
        waiting = self._waiting.get(broker)
        if waiting is None:
            return []
        paths = waiting[1]
        if len(answer.findings) != len(paths):
            raise PeerError(f"a trace answer with {len(answer.findings)} findings for {len(paths)} messages")
        if not self._trusted:
            for finding in answer.findings:  # all of it, before any is believed
                _check(finding)
        del self._waiting[broker]
        for path, finding in zip(paths, answer.findings, strict=True):
            path.take(broker, finding)
        return self._advance(now_us)

    def failed(self, broker: int, why: str, now_us: int) -> list[Ask]:
        """The question could not be sent, or the broker went away."""
        waiting = self._waiting.pop(broker, None)
        for path in waiting[1] if waiting else ():
            path.failed[broker] = why
        return self._advance(now_us) if waiting else []

    def tick(self, now_us: int) -> list[Ask]:
        late = [broker for broker, (until_us, _) in self._waiting.items() if until_us <= now_us]
        for broker in late:
            for path in self._waiting.pop(broker)[1]:
                path.failed[broker] = NO_ANSWER
        return self._advance(now_us) if late or now_us >= self._end_us else []

    def next_deadline(self) -> int | None:
        if self.done:
            return None
        return min([self._end_us, *(until_us for until_us, _ in self._waiting.values())])

    def _advance(self, now_us: int) -> list[Ask]:
        """Ask what can be asked now; at the end of a round begin the next."""
        if self.done:
            return []
        if now_us >= self._end_us:
            self._stop("the time for the trace is over")
            return []
        asks: list[Ask] = []
        while True:
            while self._queue and len(self._waiting) < self._limits.fan_out:
                broker, paths = self._queue.pop(0)
                until_us = min(now_us + self._limits.answer_us, self._end_us)
                self._waiting[broker] = (until_us, paths)
                self._asked.add(broker)
                items = tuple(path.item(broker) for path in paths)
                question = TraceQuestion(items=items, receivers=MAX_RECEIVERS)
                asks.append(Ask(broker=broker, question=question))
            if self._queue or self._waiting:
                return asks
            if not self._next_round():
                self.done = True
                return asks

    def _next_round(self) -> bool:
        """Fill the queue with one question per broker; False when there is nothing left to ask."""
        wanted: dict[int, list[_Path]] = {}
        room = self._limits.brokers - len(self._asked)
        others = self._asked.union(sorted(self._reachable - self._asked)[:room])
        while not wanted:
            for path in self._paths:
                path.widen(others, self._known)
            if not any(path.explore for path in self._paths):
                return False
            for path in self._paths:
                for broker in sorted(path.explore):
                    path.explored.add(broker)
                    if broker in self._reachable:
                        wanted.setdefault(broker, []).append(path)
                    else:
                        path.failed[broker] = NOT_REACHABLE
                path.explore = set()
        self._rounds += 1
        if self._rounds > self._limits.rounds:
            self._stop(f"more than {self._limits.rounds} rounds of questions")
            return False
        self._queue = sorted(wanted.items())
        new = [broker for broker, _ in self._queue if broker not in self._asked]
        if len(new) > room:
            self._stopped = f"more than {self._limits.brokers} brokers to ask"
            left = set(new[room:])
            self._queue = [(broker, paths) for broker, paths in self._queue if broker not in left]
        return bool(self._queue)

    def _stop(self, why: str) -> None:
        self._stopped = why
        for broker, (_, paths) in self._waiting.items():
            for path in paths:
                path.failed[broker] = NO_ANSWER
        self._waiting.clear()
        self._queue.clear()
        self.done = True

    def results(self, names: Mapping[int, str]) -> list[TraceResult]:
        """One per message, in the order asked. `names` of brokers; those without one go by their number."""
        if not self.done:
            raise BugError("a trace that is under way has no results")
        called = told_apart(names)
        return [self._judged(path, called) for path in self._paths]

    def _judged(self, path: _Path, called: Mapping[int, str]) -> TraceResult:
        failed = [Missing(broker=broker, why=why) for broker, why in sorted(path.failed.items())]
        try:
            return judge(path.identity, path.findings, failed=failed, stopped=self._stopped, names=called)
        except (ArithmeticError, ValueError):  # a peer's numbers are not to end a broker, whatever they are
            failed += [Missing(broker=broker, why=NOT_JUDGED) for broker in sorted(path.findings)]
            return judge(path.identity, {}, failed=failed, stopped=self._stopped, names=called)


def _check(finding: Finding) -> None:
    """A peer's numbers are not to be trusted with arithmetic, nor its lists with time, nor its texts with a
    terminal."""
    rates = [finding.published or 0.0]
    rates += [sighting.fpp for sighting in finding.routed]
    rates += [receiver.fpp for receiver in finding.delivered]
    rates += [forwarding.fpp for forwarding in (*(finding.forwarded or ()), *finding.sent)]
    rates += [receiver.fpp for receiver in finding.repaired]
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        wrong = next(rate for rate in rates if not 0.0 <= rate <= 1.0)
        raise PeerError(f"a trace answer with a probability of {wrong}; it is between 0 and 1")
    for part, count, most in (
        ("sightings", len(finding.routed), MAX_SIGHTINGS),
        ("receivers", len(finding.delivered), MAX_RECEIVERS),
        ("neighbours", len(finding.neighbours), MAX_NEIGHBOURS),
        ("forwardings", len(finding.forwarded or ()), MAX_NEIGHBOURS),
        ("neighbours that it was meant for", len(finding.sent), MAX_NEIGHBOURS),
        ("repairs", len(finding.repaired), MAX_RECEIVERS),
    ):
        if count > most:
            raise PeerError(f"a trace answer with {count} {part}; at most {most} are allowed")
    claimed = len(finding.delivered) + finding.more
    possible = claimed <= finding.candidates <= MAX_CANDIDATES and 0.0 <= finding.wanted <= MAX_CANDIDATES
    if finding.more < 0 or not possible:
        raise PeerError(
            f"a trace answer with {len(finding.delivered)} receivers and {finding.more} more of"
            f" {finding.candidates} candidates, {finding.wanted} wanted; none is negative, receivers are"
            f" candidates, and at most {MAX_CANDIDATES} are"
        )
    most = max(finding.hits, 1)
    sound = all(0 < receiver.keys <= most for receiver in finding.delivered)
    if not sound or not 0 <= finding.hits <= finding.tried <= MAX_CANDIDATES:
        keys = max((receiver.keys for receiver in finding.delivered), default=0)
        raise PeerError(
            f"a trace answer with {keys} keys of a receiver, {finding.hits} hits and {finding.tried} tried;"
            f" they increase in that order, to at most {MAX_CANDIDATES}"
        )
    if len(finding.lost) > MAX_REASON:
        raise PeerError(
            f"a trace answer with a reason of {len(finding.lost)} characters; at most {MAX_REASON} are"
            " allowed"
        )
    # Where names come in, they are checked for this.
    for text in (finding.lost, *(receiver.subscriber for receiver in finding.delivered)):
        if not text.isprintable():
            raise PeerError(f"a trace answer with text that cannot be printed: {shorten(text, 40)!r}")


def parse_ids(texts: Iterable[str]) -> list[bytes]:
    """Ids as people type them; UsageError names the one that is malformed."""
    return [bytes(MessageId.parse(text)) for text in texts]
