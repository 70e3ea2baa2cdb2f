"""Random networks with their truth, their live traces, and their records as the lake has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
from tests.worlds.tracking_networks import Network

from postroad.ids import MessageId
from postroad.seam.tracking import DropFilters, ReplaceAttachments, StoreFilter, TrackingEffect
from postroad.spark.lake import rows
from postroad.spark.trace.group import Stored
from postroad.spark.trace.views import BrokerView, NetworkView
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.query.messages import ANY_ORIGIN, TraceItem, TraceQuestion
from postroad.tracking.query.trace import Ask, Trace
from postroad.tracking.query.untracked import Untracked
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.record import FilterMeta, decode_meta, decode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

Truth = tuple[int, set[tuple[int, int]], set[tuple[str, int]]]  # origin, (broker, from), (subscriber, broker)


class World(Network):
    """A network whose subscribers come and go, whose brokers restart and die, and which is stored."""

    def __init__(self, seed: int, config: TrackingConfig, brokers: int, extra: int) -> None:
        self.config = config
        super().__init__(seed, config, brokers, extra)
        self.records: dict[int, dict[int, bytes]] = {broker: {} for broker in self.brokers}
        self.changes: dict[int, list[Change]] = {broker: [] for broker in self.brokers}
        self.away: set[str] = set()
        self.truth: dict[bytes, Truth] = {}
        self.untracked: dict[int, Untracked] = {}  # brokers that record nothing any more
        self.best_effort: set[bytes] = set()
        self.late: set[bytes] = set()  # older than the jitter when sent: a crash may lose these unnoticed
        self._tick()

    def _tick(self) -> None:
        for broker in self.brokers:
            self._keep(broker, self.tracking[broker].tick(self.now_us))

    def pass_time(self, us: int) -> None:
        self.now_us += us
        self._tick()

    @staticmethod
    def subscribers(broker: int) -> list[str]:
        return [f"s{broker}.{number}" for number in range(5)]

    def happen(self, messages: int, *, faults: bool = True, best_effort: float = 0.0) -> None:
        """`best_effort`: the share of messages that may be lost on links, and are repaired."""
        for _ in range(messages):
            roll = self.random.random()
            if roll < 0.06:
                self._come_and_go()
            elif faults and roll < 0.08:
                self._restart(self.random.choice(self.brokers))
            self.now_us += self.random.choice((1, 40, 900)) * MILLISECOND_US
            self._tick()
            if best_effort and self.random.random() < best_effort:
                self._send_best_effort()
            else:
                self._send()

    def _come_and_go(self) -> None:
        broker = self.random.choice(self.brokers)
        name = self.random.choice(self.subscribers(broker))
        if name in self.away:
            self.tracking[broker].attached(name, self.now_us)
        else:
            self.tracking[broker].detached(name, self.now_us)
        self.away ^= {name}

    def _restart(self, broker: int, *, crash: bool = True) -> None:
        if not crash:
            self._keep(broker, self.tracking[broker].close(self.now_us))
        self.now_us += SECOND_US
        fresh = self._opened(broker)
        for neighbour in sorted(self.links[broker]):
            fresh.linked(neighbour, self.now_us)
        for name in self.subscribers(broker):
            if name not in self.away:
                fresh.attached(name, self.now_us)
        self.tracking[broker] = fresh
        self._keep(broker, fresh.tick(self.now_us))

    def track_no_more(self, broker: int) -> None:
        """What its tracking is told from now on is neither stored nor answered."""
        self.untracked[broker] = Untracked()
        for neighbour in sorted(self.links[broker]):
            self.untracked[broker].linked(neighbour)
        self._restart(broker)

    def begin_again(self, **settings: Any) -> None:
        """Other settings, with which all brokers begin again."""
        self.config = replace(self.config, **settings)
        for broker in self.brokers:
            self._restart(broker, crash=False)

    def _opened(self, broker: int) -> Tracking:
        stored = [decode_meta(record) for _, record in sorted(self.records[broker].items())]
        return make_tracking(
            self.config, me=broker, stored=stored, changes=self.changes[broker], now_us=self.now_us
        )

    def _send(self) -> None:
        origin = self.random.choice(self.brokers)
        wanting = self.random.sample(self.brokers, self.random.randint(0, len(self.brokers)))
        elsewhere = self.random.choice(self.brokers) if self.random.random() < 0.05 else None
        few = self.random.random() < 0.5
        self.serial += 1
        late = 3_600_000 if self.random.random() < 0.02 else 0
        time_ms = self.now_us // MILLISECOND_US + self.random.randrange(-20, 20) - late
        identity = bytes(MessageId(5, elsewhere or origin, time_ms, self.serial % 65536))
        self.late |= {identity} if late else set()
        parents = self.parents(origin)
        edges: set[tuple[int, int]] = set()
        for target in wanting:
            here = target
            while here != origin:
                edges.add((here, parents[here]))
                here = parents[here]
        self.tracking[origin].published(identity, self.now_us)
        for broker in sorted({origin} | {broker for broker, _ in edges}):
            onward = sorted(child for child, parent in edges if parent == broker)
            if onward:
                self.tracking[broker].forwarded(origin, onward, identity, self.now_us)
        for broker, source in sorted(edges):
            self.tracking[broker].routed(origin, source, identity, self.now_us)
        got: set[tuple[str, int]] = set()
        for broker in wanting:
            there = [name for name in self.subscribers(broker) if name not in self.away]
            some = there[: self.random.randint(0, 2)] if few else there
            if some:
                self.tracking[broker].delivered(origin, some, identity, self.now_us)
                got |= {(name, broker) for name in some}
        self.truth[identity] = (origin, edges, got)

    def _send_best_effort(self) -> None:
        origin = self.random.choice(self.brokers)
        wanting = self.random.sample(self.brokers, self.random.randint(0, len(self.brokers)))
        self.serial += 1
        identity = bytes(MessageId(5, origin, self.now_us // MILLISECOND_US, self.serial % 65536))
        self.best_effort.add(identity)
        self.tracking[origin].published(identity, self.now_us)
        parents = self.parents(origin)
        came: set[tuple[int, int]] = set()
        got: set[tuple[str, int]] = set()
        reached, lost = {origin}, set()
        for target in wanting:
            way = [target]
            while way[-1] != origin:
                way.append(parents[way[-1]])
            for here, source in reversed(list(pairwise(way))):
                if source not in reached or here in reached | lost:
                    continue
                self.tracking[source].sent(origin, here, identity, self.now_us)
                if self.random.random() < 0.3:
                    lost.add(here)
                    continue
                self.tracking[source].forwarded(origin, [here], identity, self.now_us)
                self.tracking[here].routed(origin, source, identity, self.now_us)
                reached.add(here)
                came.add((here, source))
        for broker in wanting:
            there = [name for name in self.subscribers(broker) if name not in self.away][:2]
            if there and broker in reached:
                self.tracking[broker].delivered(origin, there, identity, self.now_us)
                got |= {(name, broker) for name in there}
            for name in there:
                if broker not in reached or self.random.random() < 0.3:
                    self.tracking[broker].repaired(name, identity, self.now_us)
                    got.add((name, broker))
        self.truth[identity] = (origin, came, got)

    def _keep(self, broker: int, effects: list[TrackingEffect]) -> None:
        for effect in effects if broker not in self.untracked else ():
            if isinstance(effect, StoreFilter):
                self.records[broker][effect.sequence] = effect.record
                if effect.replaces is not None:
                    self.records[broker].pop(effect.replaces, None)
            elif isinstance(effect, DropFilters):
                self.changes[broker] += decode_changes(effect.record)[0]
                for sequence in effect.sequences:
                    self.records[broker].pop(sequence, None)
            else:
                changes = decode_changes(effect.record)[0]
                whole = isinstance(effect, ReplaceAttachments)
                self.changes[broker] = changes if whole else self.changes[broker] + changes

    def stop(self) -> None:
        """Every broker ends in good order, so that everything is stored; and begins again."""
        self.now_us += 10 * SECOND_US
        for broker in self.brokers:
            self._keep(broker, self.tracking[broker].close(self.now_us))
            self.tracking[broker] = self._opened(broker)

    # ---- as the live network answers

    def live(self, *ids: bytes, names: Mapping[int, str] | None = None) -> list[TraceResult]:
        trace = Trace(ids, reachable=self.brokers, now_us=self.now_us)
        asks: deque[Ask] = deque(trace.start(self.now_us))
        while asks:
            ask = asks.popleft()
            answers = self.untracked.get(ask.broker) or self.tracking[ask.broker]
            answer = answers.answer(ask.question, self.records[ask.broker])[0]
            asks.extend(trace.answered(ask.broker, answer, self.now_us))
        return trace.results(names or {broker: f"b{broker}" for broker in self.brokers})

    def whole(self, identity: bytes) -> set[int]:
        """The brokers that surely know whether they had the message."""
        question = TraceQuestion(items=(TraceItem(id=identity, origin=ANY_ORIGIN),))
        answers = {
            broker: tracking.answer(question, self.records[broker])[0]
            for broker, tracking in self.tracking.items()
        }
        return {broker for broker, answer in answers.items() if not answer.findings[0].lost}

    # ---- as the lake has it

    def stored(self) -> list[Stored]:
        found = []
        for broker, records in self.records.items():
            for record in records.values():
                meta, body = decode_record(record)
                found.append(Stored(broker, meta, body))
        return found

    def view(self, landed: Mapping[int, int] | None = None) -> NetworkView:
        """`landed`: by broker, when the last record was stored that the lake has; without it, it has all."""
        return NetworkView(
            {
                broker: BrokerView.of(
                    broker,
                    f"b{broker}",
                    [self.told(broker)],
                    config=self.config,
                    stored_us=1 << 62 if landed is None else landed[broker],
                )
                for broker in self.brokers
            },
            self.config,
        )

    def last_stored_us(self, broker: int) -> int:
        return max((meta.stored_us for meta, _ in self._metas(broker)), default=0)

    def told(self, broker: int) -> list[Change]:
        landed = rows.attachments(broker, f"b{broker}", 1, self.changes[broker])
        return [rows.change(row) for row in landed.to_pylist()]

    def filter_rows(self) -> pa.Table:
        return pa.concat_tables(
            [rows.filters(broker, f"b{broker}", self._metas(broker)) for broker in self.brokers]
        )

    def _metas(self, broker: int) -> list[tuple[FilterMeta, bytes]]:
        return [(decode_meta(record), record) for record in self.records[broker].values()]

    def attachment_rows(self) -> pa.Table:
        """As of brokers that told their whole map when they first began, and all since."""
        told = []
        for broker in self.brokers:
            name, changes = f"b{broker}", self.changes[broker]
            told.append(rows.attachments(broker, name, 1, changes[:1], whole=True))
            told.append(rows.attachments(broker, name, 2, changes[1:]))
        return pa.concat_tables(told)
