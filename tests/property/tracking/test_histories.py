"""T3, T4, T8, T9, T10, T11: never a false negative, whatever happens, restarts and crashes included."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.ids import MessageId
from postroad.seam.tracking import DropFilters, NotKept, ReplaceAttachments, StoreFilter, TrackingEffect
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import ANY_ORIGIN, Finding, TraceItem, TraceQuestion
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

ME: Final = 7
START_US: Final = 1_700_000_000_000_000
PERSIST_US: Final = 2 * SECOND_US
SUBSCRIBERS: Final = ("ann", "bob", "cy", "di", "ed", "flo")
NEIGHBOURS: Final = (11, 12, 13)


class Disk:
    """What a store keeps, in memory."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.log = b""

    def apply(self, effects: list[TrackingEffect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreFilter):
                self.records[effect.sequence] = effect.record
                self.records.pop(effect.replaces or 0, None)
            elif isinstance(effect, DropFilters):
                self.log += effect.record
                for sequence in effect.sequences:
                    self.records.pop(sequence, None)
            else:
                whole = isinstance(effect, ReplaceAttachments)
                self.log = effect.record if whole else self.log + effect.record

    def start(self, config: TrackingConfig, now_us: int) -> Tracking:
        metas = [decode_meta(record) for record in self.records.values()]
        changes, whole = decode_changes(self.log)
        assert whole == len(self.log)
        return make_tracking(config, me=ME, stored=metas, changes=changes, now_us=now_us)


def look_up(tracking: Tracking, disk: Disk, identity: bytes, origin: int = ANY_ORIGIN) -> Finding:
    question = TraceQuestion(items=(TraceItem(id=identity, origin=origin),))
    records: dict[int, bytes] = {}
    for _ in range(10):
        answer, wanted = tracking.answer(question, records)
        if not wanted:
            assert one_by_one(tracking, disk, question) == answer.findings[0]
            return answer.findings[0]
        records |= {sequence: disk.records.get(sequence, b"") for sequence in wanted}
    pytest.fail("a question that never has enough")


def one_by_one(tracking: Tracking, disk: Disk, question: TraceQuestion) -> Finding:
    """Each record is read by itself and let go."""
    reading = Reading()
    answer, wanted = tracking.answer(question, {}, reading)
    while wanted:
        records = {wanted[0]: disk.records.get(wanted[0], b"")}
        answer, wanted = tracking.answer(question, records, reading)
    return answer.findings[0]


actions = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 20), st.integers(-300, 300)),
    st.tuples(st.just("route"), st.sampled_from(NEIGHBOURS), st.integers(1, 20), st.integers(-300, 300)),
    st.tuples(st.just("late"), st.sampled_from(NEIGHBOURS), st.integers(1, 3), st.integers(1, 10**7)),
    st.tuples(st.just("pause"), st.integers(1, 3000)),
    st.tuples(st.just("attach"), st.sampled_from(SUBSCRIBERS)),
    st.tuples(st.just("everybody")),
    st.tuples(st.just("detach"), st.sampled_from(SUBSCRIBERS)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("crash")),
    st.tuples(st.just("refuse"), st.integers(1, 4)),
    st.tuples(
        st.just("change"),
        st.sampled_from(("bloom", "exact")),
        st.sampled_from(("all", "neighbours", "set")),
        st.sampled_from(("origin", "subscriber")),
    ),
)
configs = st.builds(
    TrackingConfig,
    strategy=st.sampled_from(("bloom", "bloom", "exact")),
    bits=st.just(16 * 50),
    capacity=st.just(50),
    hashes=st.just(7),
    least_capacity=st.sampled_from((1, 10, 50)),
    persist_us=st.just(PERSIST_US),
    adaptive=st.booleans(),
    retain=st.booleans(),
    routing=st.sampled_from(("all", "neighbours", "set")),
    deliveries=st.sampled_from(("origin", "subscriber")),
    compress=st.booleans(),
    log_bytes=st.just(500),
    cache_bytes=st.sampled_from((0, 500, 1 << 20)),
    max_histories=st.sampled_from((1, 3, 100)),
)


class Driven:
    """A broker's tracking, driven; remembers everything that happened, when, and whether it may be lost."""

    def __init__(self, config: TrackingConfig) -> None:
        self.config = config
        self.routing = config.routing
        self.changed = False  # the routing since the first start
        self.refuse = 0  # how often the disk will
        self.refused = False
        self.disk = Disk()
        self.now_us = START_US
        self.tracking = self.disk.start(config, self.now_us)
        self.attached: set[str] = set()
        self.serial = 0
        self.facts: list[tuple[int, bytes, int, int, frozenset[str], frozenset[int]]] = []
        for number in NEIGHBOURS:
            self.tracking.linked(number, self.now_us)

    def ids(self, broker: int, count: int, offset_ms: int) -> bytes:
        time_ms = max(0, self.now_us // MILLISECOND_US + offset_ms)
        made: list[bytes] = []
        for _ in range(count):
            self.serial += 1
            made.append(bytes(MessageId(1 + self.serial // 60_000, broker, time_ms, self.serial % 60_000)))
        return b"".join(made)

    def happen(self, origin: int, source: int, ids: bytes) -> None:
        """Messages come in, go to some neighbours and to everybody attached."""
        if source:
            self.tracking.routed(origin, source, ids, self.now_us)
        else:
            self.tracking.published(ids, self.now_us)
        onward = NEIGHBOURS[: len(ids) // 16 % 4]
        if onward:
            self.tracking.forwarded(origin, onward, ids, self.now_us)
        receivers = sorted(self.attached)
        if receivers:
            self.tracking.delivered(origin, receivers, ids, self.now_us)
        for at in range(0, len(ids), 16):
            fact = (self.now_us, ids[at : at + 16], origin, source, frozenset(receivers), frozenset(onward))
            self.facts.append(fact)

    def step(self, action: tuple[object, ...]) -> None:
        match action:
            case ("publish", int(count), int(offset)):
                self.happen(ME, 0, self.ids(ME, count, offset))
            case ("route", int(source), int(count), int(offset)):
                self.happen(99, source, self.ids(99, count, offset))
            case ("late", int(source), int(count), int(age)):
                self.happen(99, source, self.ids(99, count, -age))
            case ("pause", int(ms)):
                self.pause(ms)
            case ("attach", str(who)):
                self.attached.add(who)
                self.tracking.attached(who, self.now_us)
            case ("everybody",):
                for who in SUBSCRIBERS:
                    self.step(("attach", who))
            case ("detach", str(who)):
                self.attached.discard(who)
                self.tracking.detached(who, self.now_us)
            case ("restart",) if not self.refuse:
                self.keep(self.tracking.close(self.now_us))
                self.restart()
            case ("change", str(strategy), str(routing), str(deliveries)):
                self.refuse = 0
                self.keep(self.tracking.close(self.now_us))
                self.config = replace(self.config, strategy=strategy, routing=routing, deliveries=deliveries)
                self.changed |= routing != self.routing
                self.restart()
            case ("refuse", int(count)):
                self.refuse += count
                self.refused = True
            case ("crash",) | ("restart",):  # what cannot be stored in the end is as if it had crashed
                # Whoever is not stored by now may be lost, but is no older than one interval.
                risky = [fact for fact in self.facts if fact[0] > self.now_us - PERSIST_US]
                self.facts = [fact for fact in self.facts if fact[0] <= self.now_us - PERSIST_US]
                self.restart()
                for fact in risky:
                    finding = look_up(self.tracking, self.disk, fact[1])
                    known = finding.published is not None or bool(finding.routed)
                    timely = abs(MessageId.from_bytes(fact[1]).time_ms * MILLISECOND_US - fact[0]) < 250_000
                    assert known or finding.lost or not timely
        self.tracking.check()
        self.tick()
        self.tracking.check()

    def tick(self) -> None:
        self.keep(self.tracking.tick(self.now_us))

    def keep(self, effects: list[TrackingEffect]) -> None:
        if self.refuse and effects:
            self.refuse -= 1
            self.tracking.not_kept(NotKept(effects=tuple(effects)), self.now_us)
        else:
            self.disk.apply(effects)

    def pause(self, ms: int) -> None:
        """A driver wakes up at each deadline."""
        until_us = self.now_us + ms * MILLISECOND_US
        while True:
            deadline = self.tracking.next_deadline()
            if deadline is None or deadline > until_us:
                break
            self.now_us = max(self.now_us, deadline)
            self.tick()
        self.now_us = until_us

    def restart(self) -> None:
        self.now_us += 5 * MILLISECOND_US
        self.tracking = self.disk.start(self.config, self.now_us)
        for number in NEIGHBOURS:
            self.tracking.linked(number, self.now_us)
        for who in sorted(self.attached):
            self.tracking.attached(who, self.now_us)

    def verify(self) -> None:
        for at_us, identity, origin, source, receivers, onward in self.facts:
            finding = look_up(self.tracking, self.disk, identity)
            timely = abs(MessageId.from_bytes(identity).time_ms * MILLISECOND_US - at_us) < 250_000
            # Of a disk that fails and a crash before it is back, only messages of their time are known of.
            if self.refused and (finding.lost or not timely):
                continue
            if source:
                assert (origin, source) in {(s.origin, s.neighbour) for s in finding.routed}
            else:
                assert finding.published is not None
            assert receivers <= {receiver.subscriber for receiver in finding.delivered}
            assert set(NEIGHBOURS) <= set(finding.neighbours)
            if finding.forwarded is None:
                assert self.config.routing == "all" or self.changed
            else:
                assert onward <= {forwarding.neighbour for forwarding in finding.forwarded}
            if all(receiver.fpp == 0 for receiver in finding.delivered):
                assert receivers == {receiver.subscriber for receiver in finding.delivered}


@given(configs, st.lists(actions, min_size=5, max_size=40))
@settings(max_examples=150, deadline=None)
def test_never_a_false_negative(config: TrackingConfig, steps: list[tuple[object, ...]]) -> None:
    """T3."""
    driven = Driven(config)
    for action in steps:
        driven.step(action)
    driven.verify()


def test_a_crash_costs_at_most_one_interval_and_is_said() -> None:
    """T3: after kill -9, what is older than Tp is there, and what may be lost is named as such."""
    driven = Driven(TrackingConfig(persist_us=PERSIST_US))
    driven.step(("publish", 5, 0))
    early = driven.facts[0][1]
    driven.step(("pause", 8000))
    driven.step(("publish", 5, 0))
    late = driven.facts[-1][1]
    driven.step(("pause", 500))
    driven.step(("crash",))
    found = look_up(driven.tracking, driven.disk, early)
    assert found.published is not None
    missed = look_up(driven.tracking, driven.disk, late)
    assert missed.published is None
    assert "died" in missed.lost
    driven.step(("pause", 10_000))
    driven.step(("publish", 1, 0))
    assert look_up(driven.tracking, driven.disk, driven.facts[-1][1]).lost == ""


def test_retention_says_where_history_begins() -> None:
    """Age and size: the oldest go first, and a question before that is told so."""
    config = TrackingConfig(
        persist_us=PERSIST_US, keep_us=3600 * SECOND_US, adaptive=False, bits=8000, capacity=500, hashes=11
    )
    driven = Driven(config)
    driven.step(("publish", 20, 0))
    first = driven.facts[0][1]
    driven.step(("pause", 5000))
    assert look_up(driven.tracking, driven.disk, first).published is not None
    driven.step(("pause", 2 * 3600 * 1000))
    driven.step(("publish", 20, 0))
    driven.step(("pause", 30_000))
    gone = look_up(driven.tracking, driven.disk, first)
    assert gone.published is None
    assert gone.begins_ms > MessageId.from_bytes(first).time_ms
    driven.step(("restart",))
    again = look_up(driven.tracking, driven.disk, first)
    assert again.begins_ms == gone.begins_ms
    small = Driven(
        TrackingConfig(
            persist_us=PERSIST_US, keep_bytes=10_000, adaptive=False, bits=8000, capacity=500, hashes=11
        )
    )
    for _ in range(60):
        small.step(("publish", 300, 0))
        small.step(("pause", 3000))
    small.step(("pause", 30_000))
    assert sum(map(len, small.disk.records.values())) <= 10_000
    assert len(small.disk.records) > 2


def test_what_cannot_be_read_is_said() -> None:
    driven = Driven(TrackingConfig(persist_us=PERSIST_US, cache_bytes=0, retain=False))
    driven.step(("publish", 5, 0))
    driven.step(("pause", 3000))
    driven.disk.records = {sequence: b"x" + record[1:] for sequence, record in driven.disk.records.items()}
    finding = look_up(driven.tracking, driven.disk, driven.facts[0][1])
    assert finding.published is None
    assert "could not be read" in finding.lost


def test_a_durable_subscriber_that_catches_up_is_found() -> None:
    """T9, T10: who was not attached at the message's time, but got it a day later."""
    for strategy in ("bloom", "exact"):
        driven = Driven(TrackingConfig(strategy=strategy, persist_us=PERSIST_US))
        driven.step(("pause", 100_000_000))
        driven.step(("attach", "ann"))
        driven.step(("late", 11, 3, 86_400_000))
        driven.step(("pause", 5000))
        driven.step(("detach", "ann"))
        driven.step(("restart",))
        driven.verify()
        finding = look_up(driven.tracking, driven.disk, driven.facts[0][1])
        assert [receiver.subscriber for receiver in finding.delivered] == ["ann"]
