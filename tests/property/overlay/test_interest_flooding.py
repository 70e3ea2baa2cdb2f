"""Interest against its meaning: whatever the network does, all tables come to want what subscribers want."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from postroad.events import BatchBuilder, EventBatch, Value
from postroad.ids import MessageId, SubscriptionKey, SubscriptionKind
from postroad.overlay.interest import Interest
from postroad.selectors import Selector, covers
from postroad.selectors import cover_index as covering
from postroad.wire.frames import DEFAULT_LIMITS, InterestUpdate

BROKERS = (1, 2, 3, 4)
LINKS = {1: (2, 3), 2: (1, 3), 3: (1, 2, 4), 4: (3,)}
IN_FLIGHT = 300
STEPS = covering.COMPARISONS - 2  # so that no search for a coverer is cut short

PATTERNS = ("", "#", "a", "a/#", "a/+", "a/b", "+/b", "+/#", "a/b/c", "$s/x", "$s/#")
CONDITIONS = (
    "",
    "x = 1",
    "x = 1 AND y = 'k'",
    "y = 'k'",
    "x > 0",
    "x BETWEEN 1 AND 2",
    "x IN (1, 2)",
    "x = 1 OR x = 2",
    "x = 1 AND z OR x = 1 AND y = 'm'",
    "y LIKE 'k%'",
    "x IS NULL",
    "x + 1 = 2",
    "NOT z",
    "x > 3 AND x < 2",
)
TOPICS = ("a", "b", "a/b", "a/b/c", "q/b", "$s", "$s/x")
ATTRIBUTES: tuple[dict[str, Value], ...] = (
    {},
    {"x": 1},
    {"x": 1.0, "y": "k"},
    {"x": 2, "y": "km", "z": False},
    {"x": 1, "y": "m", "z": True},
    {"y": "k"},
    {"x": "1"},
)
EVENTS = [(topic, attributes) for topic in TOPICS for attributes in ATTRIBUTES]

selectors = st.builds(Selector.parse, st.sampled_from(PATTERNS), st.sampled_from(CONDITIONS))
brokers = st.sampled_from(BROKERS)


def _batch() -> EventBatch:
    builder = BatchBuilder()
    for row, (topic, attributes) in enumerate(EVENTS):
        builder.add(bytes(MessageId(1, 1, 1, row)), topic, attributes, b"", DEFAULT_LIMITS)
    return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)


@cache
def _rows(selector: Selector) -> frozenset[int]:
    return frozenset(row for row, event in enumerate(EVENTS) if selector.matches(*event))


def _matching(wanted: Iterable[Selector]) -> list[int]:
    return sorted(frozenset[int]().union(*map(_rows, wanted)))


class Flooding(RuleBasedStateMachine):
    """Brokers on a small graph whose links delay, reorder, repeat and lose updates."""

    @initialize()
    def start(self) -> None:
        self.batch = _batch()
        self.boots = dict.fromkeys(BROKERS, 1)
        self.cores = {number: Interest(number, 1) for number in BROKERS}
        self.subscriptions: dict[int, dict[SubscriptionKey, Selector]] = {number: {} for number in BROKERS}
        self.in_flight: list[tuple[int, int, InterestUpdate]] = []  # from, to, what
        self.last_id = 0

    def flood(self, sender: int, update: InterestUpdate, *, but: int = 0) -> None:
        self.in_flight += [(sender, to, update) for to in LINKS[sender] if to != but]
        del self.in_flight[:-IN_FLIGHT]

    def receive(self, sender: int, to: int, update: InterestUpdate) -> None:
        news, missing = self.cores[to].accept(update)
        if news:
            self.flood(to, update, but=sender)
        if missing:
            self.in_flight += [(sender, to, part) for part in self.cores[sender].full(update.owner)]

    @rule(broker=brokers, selector=selectors)
    def subscribe(self, broker: int, selector: Selector) -> None:
        self.last_id += 1
        key = SubscriptionKey(SubscriptionKind.PLAIN, self.last_id)
        self.subscriptions[broker][key] = selector
        for update in self.cores[broker].subscribe(key, selector):
            self.flood(broker, update)

    @rule(broker=brokers, choice=st.integers(0, 1 << 16))
    def unsubscribe(self, broker: int, choice: int) -> None:
        subscriptions = self.subscriptions[broker]
        if subscriptions:
            key = list(subscriptions)[choice % len(subscriptions)]
            del subscriptions[key]
            for update in self.cores[broker].unsubscribe(key):
                self.flood(broker, update)

    @rule(choices=st.lists(st.tuples(st.integers(0, 1 << 16), st.booleans()), max_size=12))
    def deliver(self, choices: list[tuple[int, bool]]) -> None:
        for choice, repeat in choices:
            if self.in_flight:
                at = choice % len(self.in_flight)
                self.receive(*(self.in_flight[at] if repeat else self.in_flight.pop(at)))

    @rule(choice=st.integers(0, 1 << 16))
    def lose(self, choice: int) -> None:
        if self.in_flight:
            self.in_flight.pop(choice % len(self.in_flight))

    @rule(broker=brokers)
    def restart(self, broker: int) -> None:
        self.boots[broker] += 1
        self.cores[broker] = Interest(broker, self.boots[broker])
        self.subscriptions[broker] = {}

    @rule(broker=brokers, other=brokers)
    def forget(self, broker: int, other: int) -> None:
        self.cores[broker].forget(other)

    @invariant()
    def own_tables_are_maximal_and_mean_the_same(self) -> None:
        if not hasattr(self, "cores"):
            return
        for number, core in self.cores.items():
            core.check()
            entries = [entry for part in core.full(number) for entry in part.added]
            table = [Selector.parse(entry.topic, entry.where) for entry in entries]
            assert _matching(table) == _matching(self.subscriptions[number].values())
            # What can never match is covered by everything, and then it does not matter by what.
            assert not [
                (wide, narrow)
                for wide in table
                for narrow in table
                if wide != narrow and narrow.boxes and covers(wide, narrow)
            ]

    def teardown(self) -> None:
        if not hasattr(self, "cores"):
            return
        while self.in_flight:
            self.receive(*self.in_flight.pop(0))
        # A link that comes up again compares digests, which mends whatever was lost.
        for _ in BROKERS:
            for sender, neighbours in LINKS.items():
                for to in neighbours:
                    for owner in self.cores[to].wanted(self.cores[sender].digest()):
                        for part in self.cores[sender].full(owner):
                            self.cores[to].accept(part)
        versions = {number: core.own_version for number, core in self.cores.items()}
        for number, core in self.cores.items():
            core.check()
            assert core.digest() == versions
            found = {target: rows.tolist() for rows, targets in core.match(self.batch) for target in targets}
            expected = {
                owner: rows
                for owner, held in self.subscriptions.items()
                if owner != number and (rows := _matching(held.values()))
            }
            assert found == expected


Flooding.TestCase.settings = settings(max_examples=60, stateful_step_count=STEPS, deadline=None)
TestFlooding = Flooding.TestCase
