"""Shared durable subscriptions in a world: consumers that divide the events of a name, and their judge.

A `Group` is one shared subscription as all its consumers know it. Beside what holds for every durable
subscriber (`durable`: known, match, tick, reject, gap, missed) it is judged by:

- `once`      an event goes to one consumer; to another only when the connection of the first has broken
- `repeated`  what a consumer was told is acknowledged on disk goes to nobody any more
- `order`     of one key and pubend, an event is given out only when those before it were acknowledged or are
              with the same consumer
- `gap`       also: what a consumer was told is acknowledged on disk lies in no gap

What was still under way on a connection that its broker had ended is not judged by what others were given
since: the broker had taken it back.

At the end every event, or a gap that it lies in, was acknowledged by somebody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from postroad.client import effects as fx
from postroad.errors import StorageError, UnavailableError
from postroad.events import EventBatch, Gap, Value
from postroad.ids import parse_pubend, pubend_text
from postroad.selectors import Selector
from postroad.sim.judge.durable import Records
from postroad.sim.judge.ledger import NEVER, Published
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.network import Connection, Network
from postroad.sim.machine.world import World
from postroad.sim.people.applications import Life, Worker
from postroad.units import SECOND_US
from postroad.wire.frames import Subscribe

DOUBT_US: Final = 10 * SECOND_US  # by then a consumer has heard that its broker ended it
Place = tuple[int, int]  # pubend and tick


@dataclass(slots=True)
class _Given:
    """An event that some consumer was given."""

    event: Published
    key: Value | None
    consumer: Consumer
    life: Life
    connection: Connection
    acknowledged: bool = False  # its consumer said so
    confirmed: bool = False  # and was told that it is on disk


@dataclass(slots=True)
class _Stream:
    """What a group was given of one pubend."""

    given: dict[int, _Given] = field(default_factory=dict)  # by tick
    gaps: dict[tuple[int, int], bool] = field(default_factory=dict)  # told -> acknowledged

    def in_gap(self, tick: int, *, acknowledged: bool = False) -> bool:
        return any(
            start < tick <= end and (said or not acknowledged) for (start, end), said in self.gaps.items()
        )


class Group:
    """A shared subscription, and everything that its consumers were given."""

    def __init__(
        self, world: World, records: Records, *, name: str, selector: Selector, key: str, slow: bool
    ) -> None:
        self.name = name
        self.selector = selector
        self.key = key
        self.slow = slow
        self.since_us = 0  # it begins after this time; 0: when it is created
        self.consumers: list[Consumer] = []
        self.began = False
        self.began_us = 0
        self.broker = self.home = ""
        self.connected_us = NEVER  # since when somebody is there, as far as they know
        self.hosts: dict[str, None] = {}
        self.absent: list[tuple[int, int]] = []  # its name is never deleted
        self.redelivered = 0
        self._world = world
        self._records = records
        self._begins: dict[
            int, int
        ] = {}  # pubend -> everything after this tick is for it, by its first token
        self._first: dict[int, int] = {}  # pubend -> the least tick that was given out
        self._streams: dict[int, _Stream] = {}

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.name, self.broker)

    # -- consumers

    def subscribed(self, broker: str, token: Mapping[int, int]) -> None:
        now_us = self._world.now_us
        if not any(consumer.attached for consumer in self.consumers):
            self.connected_us = now_us
        self.broker = broker
        if not self.began:
            self.began, self.began_us, self.home = True, now_us, broker
            self._begins.update(token)

    def forget_gaps(self) -> None:
        """A first consumer comes: what nobody acknowledged is told again, or what some memory has of it by
        now."""
        for stream in self._streams.values():
            stream.gaps = {gap: said for gap, said in stream.gaps.items() if said}

    def give(self, consumer: Consumer, life: Life, connection: Connection, batch: EventBatch) -> list[Place]:
        """A consumer was sent these events."""
        ticks = batch.headers["tick"].tolist()
        for event, tick in zip(batch.events(), ticks, strict=True):
            known = self._records.known(self, batch.pubend, bytes(event.id), tick)
            tags = (known.text, pubend_text(batch.pubend), *self.tags, consumer.name)
            if not self.selector.matches(known.topic, known.attributes):
                text = f"{self.name} got {known.text}, which {self.selector} does not match"
                raise Violation("match", text, tags)
            key = known.attributes.get(self.key) if self.key else None
            given = _Given(known, key, consumer, life, connection)
            self._give((batch.pubend, tick), given, tags)
            self._records.handed += 1
        return [(batch.pubend, tick) for tick in ticks]

    def _give(self, place: Place, given: _Given, tags: tuple[str, ...]) -> None:
        pubend, tick = place
        stream = self._streams.setdefault(pubend, _Stream())
        self._first[pubend] = min(tick, self._first.get(pubend, tick))
        text = f"{self.name}: {given.consumer.name} got {given.event.text} at tick {tick}"
        if not all(given.connection.open):  # its broker has ended it: others may have this by now
            stream.given.setdefault(tick, given)
            return
        if stream.in_gap(tick):
            raise Violation("gap", f"{text} inside a reported gap", tags)
        before = stream.given.get(tick)
        if before is not None:
            self.redelivered += 1
            if before.confirmed:
                raise Violation("repeated", f"{text}, which {before.consumer.name} has acknowledged", tags)
            if before.connection is given.connection:
                raise Violation("once", f"{text} twice on one connection", tags)
            self._doubt(before, f"{text}, which is with {before.consumer.name}", tags)
        if given.key is not None:
            for earlier, other in stream.given.items():
                is_open = not other.acknowledged and not stream.in_gap(earlier)
                if earlier >= tick or other.key != given.key or not is_open:
                    continue
                if other.connection is not given.connection:
                    where = f"{other.event.text} of that key is with {other.consumer.name}"
                    raise Violation("order", f"{text}, and {where}", tags)
        stream.given[tick] = given

    def _doubt(self, given: _Given, text: str, tags: tuple[str, ...]) -> None:
        """It is given to another although the connection of the first is whole; its subscription may be over,
        which it hears soon."""
        if not given.consumer.holds_on(given.life, given.connection):
            return

        def judge() -> None:
            if given.consumer.holds_on(given.life, given.connection):
                raise Violation("once", text, tags)

        self._world.after(DOUBT_US, judge)

    def acknowledge(self, life: Life, places: list[Place]) -> list[_Given]:
        """A consumer is done with these: those of them that are its own still."""
        given = [self._streams[pubend].given[tick] for pubend, tick in places]
        own = [event for event in given if event.life is life]
        for event in own:
            event.acknowledged = True
        return own

    def gap(self, pubend: int, start: int, end: int) -> None:
        self._records.judge_gap(self, pubend, start, end)
        stream = self._streams.setdefault(pubend, _Stream())
        for tick, given in stream.given.items():
            if start < tick <= end and given.confirmed:
                text = f"{self.name} was told of a gap ({start}, {end}] of {pubend_text(pubend)} with "
                text += f"{given.event.text} in it, which {given.consumer.name} has acknowledged"
                raise Violation("gap", text, (given.event.text, pubend_text(pubend), *self.tags))
        stream.gaps.setdefault((start, end), False)

    def pass_gap(self, gap: Gap) -> None:
        """A consumer has acknowledged it."""
        self._streams[int(parse_pubend(gap.pubend))].gaps[gap.start, gap.end] = True

    # -- the end

    def check(self, pubend: int, events: Mapping[bytes, int], rest_us: int) -> int:
        """How many events of this pubend it was owed; Violation if it has not got one."""
        stream, begins = self._streams.get(pubend, _Stream()), self.since_us or self._begins.get(pubend)
        if begins is None and pubend in self._first:
            begins = self._first[pubend] - 1
        owed = 0
        for id, tick in events.items():
            event = self._records.published(id)
            late = begins is None and event.accepted_us >= max(rest_us, self.began_us)
            if not late and (begins is None or tick <= begins):
                continue
            if not self.selector.matches(event.topic, event.attributes):
                continue
            owed += 1
            given = stream.given.get(tick)
            if stream.in_gap(tick, acknowledged=True) or (given is not None and given.acknowledged):
                continue
            if len(event.sent) > 1 and self._elsewhere(event, pubend):
                continue
            failure = "never got" if given is None else f"({given.consumer.name}) never acknowledged"
            text = f"{self.name} ({self.selector}, key {self.key!r}) at {self.broker} {failure} {event.text}"
            raise Violation("missed", f"{text}, tick {tick}", (event.text, pubend_text(pubend), *self.tags))
        return owed

    def _elsewhere(self, event: Published, pubend: int) -> bool:
        return any(
            given.event is event
            for other, stream in self._streams.items()
            if other != pubend
            for given in stream.given.values()
        )


class Consumer(Worker[list[Place] | Gap]):
    """One of those who divide the events of a group. It works at its own speed, acknowledges each event by
    itself, in order if the group has a key, with all gaps before it, and wants half of that confirmed."""

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        name: str,
        addresses: tuple[str, ...],
        group: Group,
        window: int,
        consume: int,
    ) -> None:
        super().__init__(world, network, name=name, addresses=addresses, window=window, consume=consume)
        self.group = group
        self.connected = False  # it was told that it has begun, and nothing else since
        self._done: list[Place] = []  # to be acknowledged
        self._gaps: list[Gap] = []  # likewise
        self._confirming: dict[int, list[_Given]] = {}  # by ticket
        group.consumers.append(self)

    def holds_on(self, life: Life, connection: Connection) -> bool:
        """It has what it was given on this connection."""
        whole = all(connection.open) and not connection.dead
        return whole and life is self.life and bool(self._number)

    @property
    def attached(self) -> bool:
        """It has begun, and its broker has it still: one that died without a word is missed later."""
        return self.connected and self.present

    @property
    def present(self) -> bool:
        """It has asked its broker, which has its connection still."""
        life = self.life
        if life is None or life.connection is None:
            return False
        number = life.connection
        return self.network.exists(number) and self.holds_on(life, self.network.connection(number))

    # -- one process

    def _forget(self) -> None:
        super()._forget()
        self.connected = False
        self._done.clear()
        self._gaps.clear()
        self._confirming.clear()

    def _up(self) -> None:
        self.group.hosts[self.broker] = None
        life, group = self.life, self.group
        if life is not None and not any(
            consumer.present for consumer in group.consumers if consumer is not self
        ):
            group.forget_gaps()
        if life is not None and not self._number:
            self._number, effects = life.core.subscribe(
                Subscribe(
                    number=0,
                    topic=group.selector.topic,
                    where=group.selector.where,
                    durable=group.name,
                    ack="manual",
                    since_us=group.since_us,
                    shared=True,
                    key=group.key,
                )
            )
            life.perform(effects)

    def _down(self) -> None:
        """What it has not acknowledged goes to others."""
        self.connected = False
        if self.life is not None:
            for _, size in self._queue:
                self.life.core.consumed(size)
        self._queue.clear()
        self._done.clear()
        self._gaps.clear()

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Began(token=token):
                self.world.note(self.name, f"joins {self.group.name} at {self.broker} after {dict(token)}")
                self.group.subscribed(self.broker, token)
                self.connected = True
            case fx.Delivered(batch=batch, size=size):
                self._given(batch, size)
            case fx.Missed(gap=gap, size=size):
                self._missed(gap, size)
            case fx.Acknowledged(ticket=ticket, error=error):
                for given in self._confirming.pop(ticket, []):
                    given.confirmed = given.confirmed or error is None
            case fx.Ended(error=error):
                expected = isinstance(error, UnavailableError | StorageError)
                self._end(self.group.name, error, expected=expected)
            case _:
                pass

    def _given(self, batch: EventBatch, size: int) -> None:
        life = self.life
        if life is None or life.connection is None:
            return
        places = self.group.give(self, life, self.network.connection(life.connection), batch)
        self._receive(places, size)

    def _missed(self, gap: Gap, size: int) -> None:
        self.group.gap(int(parse_pubend(gap.pubend)), gap.start, gap.end)
        self._receive(gap, size)

    # -- work

    def _consider(self, item: list[Place] | Gap) -> None:
        if isinstance(item, Gap):
            self._gaps.append(item)
        else:
            self._done += item

    def _perhaps_say(self) -> None:
        if len(self._done) >= 20 or self._chance.random() < 0.5:
            self._acknowledge(confirm=self._chance.random() < 0.5)

    def _say(self) -> None:
        self._acknowledge(confirm=True)

    def _acknowledge(self, *, confirm: bool) -> None:
        """All of it, or where the order does not matter a part."""
        life, done = self.life, self._done
        if life is None or not (done or self._gaps) or not self.broker:
            return
        if not self.group.key and not confirm and len(done) > 1:
            self._chance.shuffle(done)
            done, self._done = done[: len(done) // 2], done[len(done) // 2 :]
        else:
            self._done = []
        given = self.group.acknowledge(life, done)
        events: dict[int, tuple[int, ...]] = {}
        gaps, self._gaps = self._gaps, []
        for gap in gaps:
            self.group.pass_gap(gap)
        firsts = [(int(parse_pubend(gap.pubend)), gap.start + 1) for gap in gaps]
        for pubend, tick in (*firsts, *done):
            events[pubend] = (*events.get(pubend, ()), tick)
        ticket, effects = life.core.acknowledge(self._number, events=events, confirm=confirm)
        if confirm:
            self._confirming[ticket] = given
        life.perform(effects)
