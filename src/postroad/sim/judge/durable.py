"""What durable subscribers were promised and what they got (spec D12), judged from outside.

A `Reader` is a durable subscription as its application knows it, over all its processes and brokers. It is
judged as events are handed to the application:

- `known`, `match`  as for plain subscriptions
- `once`, `order`   ticks of a pubend only increase. Who keeps its own token has what it committed exactly
                    once, for ever. If the broker keeps the token, a new process of the application may get
                    again what lies above the token it was told it goes on after, and nothing else
- `tick`            an event has the tick it was logged with
- `reject`          what a publisher was told is not in the log reaches nobody
- `gap`             a gap is reported only where ticks were released early or lost with a damaged disk

and at the end:

- `kept`            what was acknowledged to its publisher is in the log, or was released
- `copy`            one log in the whole network holds an event, once
- `missed`          a subscription has every matching event of every pubend after the tick it began at, or a
                    gap where it was
- `repeated`        what was acknowledged long ago does not come again
- `reclaimed`       storage is given back once everybody has everything, or all names are deleted
- `deleted`         a name that was deleted is at no broker
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from postroad.errors import DeletedError, MovedError, StorageError, UnavailableError
from postroad.events import EventBatch
from postroad.ids import MessageId, is_history, pubend_text
from postroad.seam.effects import Effect, Send
from postroad.seam.inputs import Input, Received
from postroad.seam.storage import (
    MAX_TICK,
    Append,
    Appended,
    AppendFailed,
    Chop,
    LogStream,
    Read,
    StreamKind,
)
from postroad.selectors import Selector
from postroad.sim.judge.ledger import NEVER, Ledger, Published
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.frames import BatchView, split
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import World
from postroad.units import GIB
from postroad.wire.frames import Kind, Reply, Request, decode

_NO_TICK: Final = -1


@dataclass(slots=True)
class _Got:
    """What a subscription has of one pubend."""

    ticks: dict[int, bytes] = field(default_factory=dict)  # tick -> event, in the order handed out
    gaps: list[tuple[int, int]] = field(default_factory=list)
    anew: list[tuple[int, int]] = field(default_factory=list)  # gaps of subscriptions that began anew
    kept_ticks: int = 0  # of `ticks`, those committed by who keeps its own token
    kept_gaps: int = 0  # of `gaps` likewise; where the broker keeps the token, those told to former processes

    def in_gap(self, tick: int, *, since: int = 0) -> bool:
        """In one of those from `since` on."""
        return any(start < tick <= end for start, end in self.gaps[since:])

    def forget_gaps(self, tick: int) -> None:
        """What was told to former processes after this tick is told again: what is lost, or what some memory
        has of it by now."""
        former = [(start, min(end, tick)) for start, end in self.gaps[: self.kept_gaps] if start < tick]
        self.gaps[: self.kept_gaps] = former
        self.kept_gaps = len(former)


class Subscribing(Protocol):
    """A durable subscription, of one subscriber or shared by several, as the world judges it."""

    name: str
    selector: Selector
    slow: bool
    since_us: int
    home: str
    began_us: int
    connected_us: int
    hosts: dict[str, None]
    absent: list[tuple[int, int]]

    @property
    def tags(self) -> tuple[str, ...]: ...


class Sharing(Subscribing, Protocol):
    """One that is shared (`sharing`)."""

    began: bool
    broker: str

    def check(self, pubend: int, events: Mapping[bytes, int], rest_us: int) -> int: ...


class Reader:
    """One durable subscription and all that its application was given."""

    def __init__(self, records: Records, *, name: str, selector: Selector, ack: str) -> None:
        self.name = name
        self.selector = selector
        self.ack = ack
        self.began = False
        self.began_us = 0
        self.connected_us = NEVER  # since when it is, as far as it knows
        self.slow = False
        self.since_us = 0  # it begins after this time; 0: when it is created
        self.broker = ""  # where it was told last that it had begun
        self.hosts: dict[str, None] = {}  # brokers that it ever asked
        self.home = ""  # the first where it began
        self.claim = ("", 0)  # the last broker where it began or went on, and when
        self.committed: dict[int, int] = {}  # the token that an application keeps
        self.begins: dict[int, int] = {}  # pubend -> everything after this tick is for it
        # From when to when its name may have been deleted: NEVER while it has not begun again since.
        self.absent: list[tuple[int, int]] = []
        # It may have begun anew: pubends of which its client may say that it missed something; 0: of others.
        self.anew: set[int] = set()
        # Its name may have been made at two brokers that had not heard of each other. When they meet, it goes
        # on with one of the two, which is not always the one that its client had last.
        self._made_twice = False
        self.repeats = 0
        self.got: dict[int, _Got] = {}
        self._records = records
        self._position: dict[int, int] = {}  # this process was given everything up to here
        self._fresh = True  # this process was not told yet where it goes on
        self._named: set[int] = set()  # pubends of the tokens that this process was told
        self.strict = False  # nothing may be repeated any more

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.name, self.broker)

    # -- the application's life

    def begin(self, now_us: int) -> None:
        del now_us
        self._position = dict(self.committed)
        self._fresh = True
        self._named.clear()

    def away(self) -> None:
        """It has no broker; what comes before its subscription is confirmed again is of that time."""
        self.connected_us = NEVER

    def end(self) -> None:
        """The process is gone, and with it what it had not committed."""
        self.away()
        for got in self.got.values():
            if self.ack:
                got.kept_gaps = len(got.gaps)
                continue
            for tick in list(got.ticks)[got.kept_ticks :]:
                del got.ticks[tick]
            del got.gaps[got.kept_gaps :]

    def commit(self, token: Mapping[int, int], now_us: int) -> None:
        """In one transaction with what it did; where the broker keeps the token, what it acknowledges."""
        del now_us
        if self.ack:
            return
        self.committed = dict(token)
        for got in self.got.values():
            got.kept_ticks, got.kept_gaps = len(got.ticks), len(got.gaps)

    @property
    def deleted(self) -> bool:
        """Its name was, and it may not have begun again since."""
        return bool(self.absent) and self.absent[-1][1] == NEVER

    def delete(self, now_us: int) -> None:
        """A broker that has its name has deleted it, if it gets that on its disk before it dies."""
        if not self.deleted:
            self.absent.append((now_us, NEVER))

    def subscribed(
        self,
        broker: str,
        token: Mapping[int, int],
        missing: tuple[str, ...],
        now_us: int,
        *,
        resumed: bool,
        opened_us: int,
    ) -> None:
        """`resumed`: its client had begun with it before, and says what it missed; `opened_us`: when its
        connection was opened."""
        del missing
        self.broker, self.connected_us = broker, now_us
        deleted = self.deleted
        if deleted:
            self.began_us, self.home = now_us, broker
            if opened_us > self.absent[-1][0]:  # else this may have been on its way before
                self.absent[-1] = (self.absent[-1][0], now_us)
        self._made_twice |= self._records.unheard_of(self, broker)
        if self.ack and (deleted or self._made_twice):
            # Its name is gone, or not known there: it may have begun anew (docs/explanation/simulator.md).
            known = {*self.begins, *self.got, *self._position, *self._named}
            owed_gaps = resumed and not self.since_us  # else it begins there again, and has missed nothing
            self.anew = {0, *known} if owed_gaps else set()
            if not owed_gaps:
                self.began = False
                self.begins.clear()
        if not self.began:
            self.began, self.began_us, self.home = True, now_us, broker
            self.begins.update(token)
        self.claim = (broker, now_us)
        self._named.update(token)
        if self._fresh and (self.ack or not self.committed):
            for pubend, tick in token.items():
                self._position[pubend] = max(tick, self._position.get(pubend, 0))
                if self.ack and pubend in self.got:
                    self.got[pubend].forget_gaps(tick)
            if not self.ack:
                self.committed = dict(token)  # an application stores the token it begins with
        self._fresh = False

    def may_end(self, error: Exception | None) -> bool:
        """What passes by itself; or another broker, of which this one had not heard, has the name; or it was
        deleted."""
        if isinstance(error, DeletedError):
            return self.deleted
        return isinstance(error, MovedError | UnavailableError | StorageError)

    # -- what it is given

    def events(self, batch: EventBatch) -> None:
        got = self.got.setdefault(batch.pubend, _Got())
        ticks = batch.headers["tick"].tolist()
        self.begins.setdefault(batch.pubend, min(batch.start, ticks[0] - 1))
        for event, tick in zip(batch.events(), ticks, strict=True):
            known = self._records.known(self, batch.pubend, bytes(event.id), tick)
            if (known.topic, known.attributes, known.payload) != (
                event.topic,
                dict(event.attributes),
                event.payload,
            ):
                raise Violation("known", f"{self.name} got {event.id} with other content", self._about(known))
            self._event(got, batch.pubend, known, tick)
        self._position[batch.pubend] = max(batch.end, self._position.get(batch.pubend, 0))

    def _event(self, got: _Got, pubend: int, event: Published, tick: int) -> None:
        tags = (pubend_text(pubend), *self._about(event))
        if not self.selector.matches(event.topic, event.attributes):
            text = f"{self.name} got {event.text}, which {self.selector} does not match"
            raise Violation("match", text, tags)
        before = self._position.get(pubend, 0)
        if tick <= before:
            text = f"{self.name} got {event.text} at tick {tick}, and had everything up to {before}"
            raise Violation("order", text, tags)
        if got.in_gap(tick, since=got.kept_gaps if self.ack else 0):
            text = f"{self.name} got {event.text} at tick {tick} inside a reported gap"
            raise Violation("gap", text, tags)
        if tick in got.ticks:
            self.repeats += 1
            if not self.ack or self.strict:
                rule = "repeated" if self.strict else "once"
                raise Violation(rule, f"{self.name} got {event.text} again", tags)
        elif len(event.sent) == 1 and any(event.id in other.ticks.values() for other in self._others(pubend)):
            raise Violation("once", f"{self.name} got {event.text} from two pubends", tags)
        got.ticks[tick] = event.id
        self._position[pubend] = tick
        self._records.handed += 1

    def _others(self, pubend: int) -> Iterable[_Got]:
        return (got for other, got in self.got.items() if other != pubend)

    def _about(self, event: Published) -> tuple[str, ...]:
        return (event.text, *self.tags)

    def gap(self, pubend: int, start: int, end: int) -> None:
        got = self.got.setdefault(pubend, _Got())
        if pubend in self.anew:
            self.anew.discard(pubend)
            got.anew.append((start, end))
        else:
            self._records.judge_gap(self, pubend, start, end)
            got.gaps.append((start, end))
        self.begins.setdefault(pubend, start)
        self._position[pubend] = max(end, self._position.get(pubend, 0))

    def gap_of_others(self) -> None:
        """Of pubends that its client had not heard of."""
        if 0 not in self.anew:
            raise Violation("gap", f"{self.name} began anew, and nothing explains it", self.tags)
        self.anew.discard(0)


class Records:
    """What brokers logged, and everything that is durable."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        processes: Mapping[str, Process],
        *,
        explains: Callable[[Subscribing, int, int, int], bool],
        unheard_of: Callable[[Reader, str], bool],
    ) -> None:
        """`explains(reader, pubend, start, end)`: the world knows a reason for a gap there.

        `unheard_of(reader, broker)`: this broker cannot know where the subscription is.
        """
        self.unheard_of = unheard_of
        self._world = world
        self._ledger = ledger
        self._processes = processes
        self._explains = explains
        self.readers: list[Reader] = []
        self.groups: list[Sharing] = []
        self.pubends: dict[int, str] = {}  # durable pubend -> its broker
        self.handed = 0
        self.gaps = 0
        self._chops: dict[int, list[tuple[int, int]]] = {}  # pubend -> (when, tick): all to it was released
        self._asked: dict[tuple[int, bytes], int] = {}  # (pubend, event) -> tick it was sent to the log with
        self._logged: dict[int, dict[bytes, int]] = {}  # pubend -> event -> tick: known to be in the log

    # -- what brokers do

    def ask(self, append: Append) -> list[bytes]:
        """A record is on its way to the log: the events in it."""
        kind, pubend = append.stream
        if kind is not StreamKind.EVENTS or is_history(pubend):
            return []
        view = BatchView(append.data)
        ids = view.ids()
        for id, tick in zip(ids, view.ticks(), strict=True):
            self._asked[pubend, id] = tick
        return ids

    def logged(self, pubend: int, ids: Iterable[bytes]) -> None:
        """A record is on disk."""
        logged = self._logged.setdefault(pubend, {})
        for id in ids:
            tick = self._asked[pubend, id]
            before = logged.setdefault(id, tick)
            event = self._ledger.events[id]
            if before != tick:
                text = f"{event.text} is in the log of {pubend_text(pubend)} at {before} and at {tick}"
                raise Violation("copy", text, (event.text, pubend_text(pubend)))
            if len(event.sent) == 1 and pubend not in event.sent:
                text = f"{event.text} is in the log of {pubend_text(pubend)}, where it was not sent"
                raise Violation("copy", text, (event.text, pubend_text(pubend)))

    def deleted(self, name: str) -> None:
        self._world.note("records", f"{name} is deleted")
        for reader in self.readers:
            if reader.name == name:
                reader.delete(self._world.now_us)

    def chop(self, chop: Chop) -> None:
        if chop.stream.kind is StreamKind.EVENTS:
            self._chops.setdefault(chop.stream.id, []).append((self._world.now_us, chop.tick))

    def released_at(self, pubend: int, tick: int) -> int | None:
        """When this tick was released; None: it was not."""
        return next((at for at, end in self._chops.get(pubend, ()) if end >= tick), None)

    # -- what subscribers get

    def published(self, id: bytes) -> Published:
        return self._ledger.events[id]

    def known(self, reader: Subscribing, pubend: int, id: bytes, tick: int) -> Published:
        event = self._ledger.events.get(id)
        text = str(MessageId.from_bytes(id))
        tags = (text, pubend_text(pubend), *reader.tags)
        if event is None:
            raise Violation("known", f"{reader.name} got {text}, which nobody published", tags)
        if pubend not in event.sent:
            where = pubend_text(pubend)
            raise Violation("known", f"{reader.name} got {text} from {where}, where it was not sent", tags)
        if event.rejected and len(event.sent) == 1:
            raise Violation("reject", f"{reader.name} got {text}, which was rejected", tags)
        asked = self._asked.get((pubend, id), _NO_TICK)
        if tick != asked:
            raise Violation("tick", f"{reader.name} got {text} at {tick}, it was logged at {asked}", tags)
        return event

    def judge_gap(self, reader: Subscribing, pubend: int, start: int, end: int) -> None:
        self.gaps += 1
        if not self._explains(reader, pubend, start, end):
            text = f"{reader.name} was told of a gap ({start}, {end}] of {pubend_text(pubend)}"
            raise Violation("gap", f"{text} that nothing explains", (pubend_text(pubend), *reader.tags))

    def wanted(self, event: Published, brokers: frozenset[str]) -> bool:
        """A durable subscription at one of these brokers wants this event, or did."""
        return any(
            not brokers.isdisjoint(reader.hosts) and reader.selector.matches(event.topic, event.attributes)
            for reader in (*self.readers, *self.groups)
        )

    # -- the end

    def check(self, reachable: Callable[[str, str], bool], rest_us: int) -> int:
        """Everything that must hold when all is quiet; how many events subscribers were owed."""
        universe = self.check_logs()
        owed = 0
        for reader in self.readers:
            for pubend, events in universe.items():
                if reader.began and reachable(self.pubends[pubend], reader.broker):
                    owed += self._check_reader(reader, pubend, events, rest_us)
        for group in self.groups:
            for pubend, events in universe.items():
                if group.began and reachable(self.pubends[pubend], group.broker):
                    owed += group.check(pubend, events, rest_us)
        return owed

    def check_logs(self) -> dict[int, dict[bytes, int]]:
        """Pubend -> event -> tick, of all that was ever kept; what must be is kept still."""
        universe: dict[int, dict[bytes, int]] = {}
        for pubend, name in self.pubends.items():
            process = self._processes[name]
            if process.running:
                universe[pubend] = self._check_log(pubend, process)
        self._check_accepted(universe)
        return universe

    def _check_log(self, pubend: int, process: Process) -> dict[bytes, int]:
        """Every event of a pubend, with its tick; those that were released among them."""
        if process.storage is None:
            return {}
        done = process.storage.volume.read(_all_of(pubend))
        chopped = done.missing[0][1] if done.missing and done.missing[0][0] == 0 else 0
        ticks: dict[bytes, int] = {}
        for _, _, data in done.records:
            view = BatchView(data)
            for id, tick in zip(view.ids(), view.ticks(), strict=True):
                if id in ticks:
                    event = self._ledger.events[id]
                    text = f"{event.text} is twice in the log of {pubend_text(pubend)}"
                    raise Violation("copy", text, (event.text, pubend_text(pubend)))
                ticks[id] = tick
        for (stream, id), tick in self._asked.items():
            if stream == pubend and tick <= chopped and self._ledger.events[id].accepted == pubend:
                ticks[id] = tick
        for id, tick in self._logged.get(pubend, {}).items():
            if tick <= chopped:
                ticks[id] = tick
            elif ticks.get(id) != tick:
                event = self._ledger.events[id]
                text = f"{event.text} was logged by {process.name} at {tick} and is no longer there"
                raise Violation("kept", text, (event.text, process.name, pubend_text(pubend)))
        return ticks

    def kept(self) -> Iterator[tuple[int, str, int]]:
        """Pubends that still have events: pubend, broker, the last event's tick."""
        for pubend, name in self.pubends.items():
            storage = self._processes[name].storage
            if storage is not None:
                records = storage.volume.read(_all_of(pubend)).records
                if records:
                    yield pubend, name, records[-1][1]

    def _check_accepted(self, universe: Mapping[int, Mapping[bytes, int]]) -> None:
        homes: dict[bytes, int] = {}
        for pubend, events in universe.items():
            for id in events:
                event = self._ledger.events[id]
                if id in homes and len(event.sent) == 1:
                    raise Violation("copy", f"{event.text} is in two logs", (event.text,))
                homes[id] = pubend
        for event in self._ledger.events.values():
            home = event.accepted
            if home in universe and home in self.pubends and event.id not in universe[home]:
                text = f"{event.text} was accepted by {self.pubends[home]} and is not in its log"
                raise Violation("kept", text, (event.text, self.pubends[home], pubend_text(home)))

    def _check_reader(self, reader: Reader, pubend: int, events: Mapping[bytes, int], rest_us: int) -> int:
        got, begins = reader.got.get(pubend, _Got()), reader.since_us or reader.begins.get(pubend)
        owed = 0
        for id, tick in events.items():
            event = self._ledger.events[id]
            late = begins is None and event.accepted_us >= max(rest_us, reader.began_us)
            if not late and (begins is None or tick <= begins):
                continue
            if not reader.selector.matches(event.topic, event.attributes):
                continue
            owed += 1
            if tick in got.ticks or got.in_gap(tick) or any(start < tick <= end for start, end in got.anew):
                continue
            if len(event.sent) > 1 and any(id in other.ticks.values() for other in reader.got.values()):
                continue
            text = (
                f"{reader.name} ({reader.selector}, ack {reader.ack!r}) at {reader.broker} never got "
                f"{event.text} on {event.topic}, tick {tick} of {pubend_text(pubend)}; begun after {begins}"
            )
            raise Violation("missed", text, (event.text, pubend_text(pubend), *reader.tags))
        return owed


class Watched:
    """A broker whose appends are written down, and what it deletes."""

    def __init__(self, core: Core, records: Records) -> None:
        self.core = core
        self._records = records
        self._under_way: dict[int, tuple[int, list[bytes]]] = {}  # tag -> pubend and events

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        for item in inputs:
            if isinstance(item, Appended):
                pubend, ids = self._under_way.pop(item.tag, (0, []))
                if ids:
                    self._records.logged(pubend, ids)
            elif isinstance(item, AppendFailed):
                self._under_way.pop(item.tag, None)
        effects = self.core.handle(inputs, now_us)
        for name in _deleted(inputs, effects):
            self._records.deleted(name)
        for effect in effects:
            if type(effect) is Append:
                self._under_way[effect.tag] = (effect.stream.id, self._records.ask(effect))
            elif type(effect) is Chop:
                self._records.chop(effect)
        return effects

    def next_deadline(self) -> int | None:
        return self.core.next_deadline()

    def check(self) -> None:
        self.core.check()

    def shutdown(self, now_us: int) -> Sequence[Effect]:
        return self.core.shutdown(now_us)

    def status(self, now_us: int) -> dict[str, object]:
        return self.core.status(now_us)

    def metrics(self) -> dict[str, int | float]:
        return self.core.metrics()


def _all_of(pubend: int) -> Read:
    stream = LogStream(StreamKind.EVENTS, pubend)
    return Read(stream=stream, start=0, end=MAX_TICK, limit_bytes=GIB, tag=0)


def _deleted(inputs: Sequence[Input], effects: Sequence[Effect]) -> list[str]:
    """Names that this turn deletes: it was asked to, and did not refuse."""
    asked: dict[tuple[int, int], str] = {}
    for item in inputs:
        if isinstance(item, Received) and item.frame[4] == Kind.REQUEST:
            request = decode(item.frame)
            if isinstance(request, Request) and request.what == "subs.delete":
                asked[item.connection, request.number] = request.arguments["name"]
    if not asked:
        return []
    for effect in effects:
        if isinstance(effect, Send):
            for reply in map(decode, (frame for frame in split(effect.data) if frame[4] == Kind.REPLY)):
                if isinstance(reply, Reply) and reply.code:
                    asked.pop((effect.connection, reply.number), None)
    return list(asked.values())
