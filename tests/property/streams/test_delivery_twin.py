"""Delivery against a naive twin: every matching event arrives in order, or lies in a gap that is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.worlds.turns import Turns

from postroad.events import BatchBuilder, EventBatch, Value
from postroad.ids import MessageId
from postroad.seam.effects import Close, Effect, Note, Send
from postroad.selectors import Selector
from postroad.streams.delivery import Delivery
from postroad.streams.settings import DeliveryConfig
from postroad.wire.frames import DEFAULT_LIMITS, Ended, Kind, Subscribe, decode, frame_kind

PUBENDS = (1 << 32, 2 << 32, 2 << 32 | 5)
CONNECTIONS = (1, 2, 3)
BUFFER_BYTES = 600
TOTAL_BYTES = 2 * 1000  # half of it is for the queues
PLENTY = 1 << 30
TOPICS = ("a", "a/b", "c")
PATTERNS = ("", "#", "a/#", "a", "c", "+/b")
CONDITIONS = ("", "x = 1", "x > 1", "x IS NULL")

pubends = st.sampled_from(PUBENDS)
connections = st.sampled_from(CONNECTIONS)
rows = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(TOPICS), st.sampled_from((None, 1, 2, "1"))),
    min_size=1,
    max_size=5,
)


@dataclass
class Reader:
    """One subscription: what it should see, and what it saw."""

    connection: int
    number: int
    selector: Selector
    limit: int
    begins: dict[int, int]  # pubend -> first tick that is not for it
    expected: dict[int, list[int]] = field(default_factory=lambda: {pubend: [] for pubend in PUBENDS})
    lost_upstream: dict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: {pubend: [] for pubend in PUBENDS}
    )
    seen: dict[int, list[int]] = field(default_factory=lambda: {pubend: [] for pubend in PUBENDS})
    gaps: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {pubend: [] for pubend in PUBENDS})
    ends: dict[int, int] = field(default_factory=dict)

    def take(self, batch: EventBatch) -> None:
        assert batch.start >= self.ends.get(batch.pubend, batch.start), "spans only move forward"
        self.ends[batch.pubend] = batch.end
        if batch.lost:
            assert batch.start < batch.end
            self.gaps[batch.pubend].append((batch.start, batch.end))
            return
        ticks = batch.headers["tick"].tolist()
        assert ticks
        assert all(batch.start < tick <= batch.end for tick in ticks)
        self.seen[batch.pubend] += ticks

    def judge(self, *, complete: bool) -> int:
        """Check what was seen; the number of events that only a gap stands for."""
        missed = 0
        for pubend in PUBENDS:
            seen, gaps = self.seen[pubend], self.gaps[pubend]
            assert seen == sorted(set(seen))
            missing = [tick for tick in self.expected[pubend] if tick not in set(seen)]
            assert set(seen) <= set(self.expected[pubend])
            if not complete:
                continue
            assert all(any(start < tick <= end for start, end in gaps) for tick in missing)
            for start, end in gaps:
                reasons = [tick for tick in missing if start < tick <= end]
                reasons += [at for low, at in self.lost_upstream[pubend] if start <= low and at <= end]
                assert reasons, "no gap without a reason"
                assert not [tick for tick in seen if start < tick <= end]
            for low, high in self.lost_upstream[pubend]:
                assert any(start <= low and high <= end for start, end in gaps)
            missed += len(missing)
        return missed


class Delivering(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.credit = dict.fromkeys(CONNECTIONS, PLENTY)
        self.turns = Turns()
        self.core = Delivery(
            self.turns.board,
            config=DeliveryConfig(buffer_bytes=BUFFER_BYTES, total_bytes=TOTAL_BYTES),
            available=self.credit.__getitem__,
            spend=self.spend,
        )
        self.ends = dict.fromkeys(PUBENDS, 10)
        self.readers: dict[int, Reader] = {}  # by key
        self.ended: set[int] = set()  # connections told to close
        self.missed = 0

    def spend(self, connection: int, size: int) -> None:
        assert self.credit[connection] > 0
        self.credit[connection] -= size

    def take(self, effects: list[Effect]) -> None:
        by_place = {(reader.connection, reader.number): reader for reader in self.readers.values()}
        for effect in effects:
            if isinstance(effect, Close):
                self.ended.add(effect.connection)
                continue
            if isinstance(effect, Note):  # for the log: why it was closed
                continue
            assert isinstance(effect, Send)
            assert effect.connection not in self.ended
            if frame_kind(effect.data) == Kind.ENDED:
                assert isinstance(decode(effect.data), Ended)
                continue
            batch = EventBatch.parse(effect.data, DEFAULT_LIMITS, expect=Kind.DELIVERY)
            by_place[effect.connection, batch.channel].take(batch)

    @rule(
        connection=connections,
        number=st.integers(1, 3),
        topic=st.sampled_from(PATTERNS),
        where=st.sampled_from(CONDITIONS),
        overflow=st.sampled_from(("drop", "drop", "drop", "disconnect")),
        buffer=st.sampled_from((0, 1, 200, 400)),
        delays=st.tuples(*[st.none() | st.integers(-5, 12) for _ in PUBENDS]),
    )
    def subscribe(
        self,
        connection: int,
        number: int,
        topic: str,
        where: str,
        overflow: str,
        buffer: int,
        delays: tuple[int | None, ...],
    ) -> None:
        if self.core.count(connection) and any(
            (reader.connection, reader.number) == (connection, number) for reader in self.readers.values()
        ):
            return
        selector = Selector.parse(topic, where)
        asked = Subscribe(number=number, topic=topic, where=where, overflow=overflow, buffer=buffer)
        key = self.core.subscribe(connection, asked, selector, "")
        begins = {}
        for pubend, delay in zip(PUBENDS, delays, strict=True):
            if delay is not None:
                begins[pubend] = max(self.ends[pubend], self.ends[pubend] + delay)
                self.core.activate(key, pubend, self.ends[pubend] + delay)
        self.readers[key] = Reader(connection, number, selector, buffer or BUFFER_BYTES, begins)

    @rule(choice=st.integers(0, 100))
    def unsubscribe(self, choice: int) -> None:
        if self.readers:
            key = list(self.readers)[choice % len(self.readers)]
            reader = self.readers.pop(key)
            assert self.core.unsubscribe(reader.connection, reader.number) == key
            reader.judge(complete=False)

    @rule(connection=connections)
    def close(self, connection: int) -> None:
        keys = [key for key, reader in self.readers.items() if reader.connection == connection]
        assert self.core.closed(connection) == [self.readers[key].number for key in keys]
        for key in keys:
            assert self.core.unsubscribe(connection, self.readers[key].number) == key
            self.readers.pop(key).judge(complete=False)
        self.ended.discard(connection)
        self.credit[connection] = PLENTY

    @rule(pubend=pubends, rows=rows, silence=st.integers(0, 3))
    def deliver(self, pubend: int, rows: list[tuple[int, str, Value | None]], silence: int) -> None:
        start = tick = self.ends[pubend]
        pieces = []
        for step, topic, value in rows:
            attributes = {} if value is None else {"x": value}
            builder = BatchBuilder()
            builder.add(bytes(MessageId(1, 1, tick, 0)), topic, attributes, b"1234", DEFAULT_LIMITS)
            published = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
            piece_start, tick = tick, tick + step
            pieces.append(
                published.with_ticks(tick, kind=Kind.KNOWLEDGE, pubend=pubend, start=piece_start, channel=0)
            )
            for reader in self.readers.values():
                if tick > reader.begins.get(pubend, tick) and reader.selector.matches(topic, attributes):
                    reader.expected[pubend].append(tick)
        self.ends[pubend] = tick + silence
        batch = EventBatch.concatenate(pieces)
        self.take(self.turns.effects(self.core.deliver, pubend, start, tick + silence, batch))

    @rule(pubend=pubends, step=st.integers(1, 8))
    def silence(self, pubend: int, step: int) -> None:
        start = self.ends[pubend]
        self.ends[pubend] += step
        assert self.turns.effects(self.core.deliver, pubend, start, start + step, None) == []

    @rule(pubend=pubends, step=st.integers(1, 8))
    def lose(self, pubend: int, step: int) -> None:
        start, end = self.ends[pubend], self.ends[pubend] + step
        self.ends[pubend] = end
        for reader in self.readers.values():
            begin = max(start, reader.begins.get(pubend, end))
            if begin < end:
                reader.lost_upstream[pubend].append((begin, end))
        self.take(self.turns.effects(self.core.lost, pubend, start, end))

    @rule(connection=connections)
    def starve(self, connection: int) -> None:
        self.credit[connection] = 0

    @rule(connection=connections, size=st.sampled_from((1, 150, 300, 1000, PLENTY)))
    def give(self, connection: int, size: int) -> None:
        self.credit[connection] += size
        self.take(self.turns.effects(self.core.credit, connection))

    @invariant()
    def within_limits(self) -> None:
        if hasattr(self, "core"):
            self.core.check()
            for key, row in zip(self.readers, self.core.status(), strict=True):
                assert int(row["buffered_bytes"]) <= self.readers[key].limit

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for connection in CONNECTIONS:
            self.credit[connection] = PLENTY
            self.take(self.turns.effects(self.core.credit, connection))
        assert self.core.metrics()["delivery_buffered_bytes"] == 0
        for key, row in zip(self.readers, self.core.status(), strict=True):
            reader = self.readers[key]
            complete = reader.connection not in self.ended
            missed = reader.judge(complete=complete)
            assert row["delivered"] == sum(map(len, reader.seen.values()))
            assert row["gaps"] == sum(map(len, reader.gaps.values()))
            if complete:
                assert row["dropped"] == missed


Delivering.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDelivering = Delivering.TestCase
