"""Best effort of one client: what it publishes, what it repairs, and how both travel.

Repair uses what any client has, publishing and subscribing (paper 2.3). Its messages are best-effort events:

| topic | who says it | who hears it |
|---|---|---|
| $repair/summary/PUBLISHER | the publisher | all who repair |
| $repair/request/PUBLISHER | who misses something | the publisher |
| $repair/ask/PUBLISHER, attributes b0_7, b0_15, ... | who misses something | whose bits are among these |
| $repair/again, the same attributes | a cache | the same |
| $repair/for, an attribute for each receiver | a publisher or a cache | these receivers |

A PUBLISHER is the first 8 bytes of its ids, in hexadecimal. The attributes of a filter with too many ones
for an event are those of the same filter folded, b1_3 or b2_3. A publisher whose messages carry records hears
what is asked of others, too, to learn how much is lost.

In a scope (spec B10) all but the summaries are below $repair/@SCOPE, so that what is asked for in a scope is
heard and repaired by those in it alone, and access rules can hold who is in which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from postroad.client.repair.messages import (
    PREFIX_BYTES,
    Ask,
    Gone,
    Message,
    Repair,
    Request,
    Summary,
    decode,
    encode,
)
from postroad.client.repair.neighbours import Neighbours
from postroad.client.repair.publisher import Named, PublisherSide
from postroad.client.repair.receiver import Lost, Receiver
from postroad.client.repair.reporting import Reporting
from postroad.client.repair.rows import Row, row_bytes, with_record, without_records
from postroad.client.repair.settings import DEFAULTS, RepairSettings
from postroad.errors import BugError, PeerError, TooLargeError, UsageError
from postroad.events import EventBatch, Gap, Value
from postroad.events.batch import MAX_ROWS_BYTES, best_effort_frame, encode_row
from postroad.ids import COUNT_BITS, MessageId
from postroad.kernel.layout import EVENT_HEADER_BYTES, ID_BYTES
from postroad.selectors import Selector
from postroad.selectors.tags import WIDTH, event_bits, false_match, fold, positions, selector_masks
from postroad.units import MILLISECOND_US
from postroad.wire.datagrams import MAX_BEST_EFFORT_BYTES
from postroad.wire.frames import Limits, Repaired

ROOT: Final = "$repair"
FOLDS: Final = (WIDTH, 64, 32)  # widths of filters as attributes: the first that has few enough ones
MAX_BITS: Final = 56  # attributes of an ask; an event has at most 64
MAX_MASKS: Final = 8  # conjunctions of a subscription that are subscribed to as bits
USUAL_ONES: Final = 32  # of an event with two levels of topic and four attributes, about
WEAK: Final = 1e-4  # a subscription whose bits match more often than this without cause is told so
MAX_PREFIXES: Final = 4  # of its ids: of the broker of the moment, and of those before
MAX_PENDING: Final = 64  # rows that wait for the end of the turn; then they go


@dataclass(slots=True)
class _Repaired:
    """A subscription. Without repair it only drops what came before."""

    number: int
    selector: Selector
    receiver: Receiver
    neighbours: Neighbours | None
    own: tuple[int, ...]  # the subscriptions that its repair needs
    false_match: float = 1.0  # the chance that a message which does not match seems to


@dataclass(frozen=True, slots=True)
class _Published:
    """What was published under one prefix of ids."""

    side: PublisherSide
    requests: tuple[int, ...]  # subscriptions to what is asked for of it


@dataclass(frozen=True, slots=True)
class Item:
    """For a subscription: an event, or a gap."""

    number: int
    content: EventBatch | Gap


class Session:
    """`subscribe(topic, where)` makes a subscription of the client's own and returns its number,
    `unsubscribe` ends it. `draw(n)` gives a random number in 0..n-1."""

    def __init__(
        self,
        *,
        draw: Callable[[int], int],
        subscribe: Callable[[str, str], int],
        unsubscribe: Callable[[int], None],
    ) -> None:
        self.me = draw(1 << 64).to_bytes(PREFIX_BYTES, "big")
        self._draw = draw
        self._subscribe = subscribe
        self._unsubscribe = unsubscribe
        self._prefix = b""  # of this client's ids at the broker of the moment
        self._published: dict[bytes, _Published] = {}  # by prefix; earlier ones until their time is over
        self._shared: tuple[int, ...] = ()  # those that all repaired subscriptions need
        self._own: dict[int, int] = {}  # own subscriptions -> the one they serve, 0 for all
        self._repaired: dict[int, _Repaired] = {}
        self._pending: list[Row] = []  # to be sent at the end of the turn
        self._pending_repair: list[Row] = []  # likewise, repair's own: brokers track frames without them
        self._next_id: Callable[[], bytes] | None = None
        self._limits: Limits | None = None
        self.settings = DEFAULTS
        self.reporting = Reporting()
        self.unreadable = 0  # repair messages and records that were none
        self._refused = 0  # own subscriptions that a broker did not take

    def choose(self, settings: RepairSettings) -> None:
        """How this client takes part in repair, before it does."""
        if self.active:
            raise UsageError("how a client repairs is chosen before it publishes best effort or repairs")
        self.settings = settings

    @property
    def _root(self) -> str:
        return f"{ROOT}/@{self.settings.scope}" if self.settings.scope else ROOT

    @property
    def active(self) -> bool:
        """Whether this client publishes or repairs best-effort events, so that datagrams are of use to it."""
        return bool(self._published or self._own)

    @property
    def full(self) -> bool:
        return len(self._pending) >= MAX_PENDING

    def opened(self, prefix: bytes, limits: Limits, next_id: Callable[[], bytes]) -> None:
        """A broker welcomed us, with this prefix of our ids. With another one others take us for a new
        publisher, and what was published before is still summarised and served under its own."""
        self._limits, self._next_id = limits, next_id
        self._prefix = prefix
        for earlier in [earlier for earlier in self._published if not _may_bear(earlier, prefix)]:
            self._end_published(earlier)

    # --- publishing

    def publish(self, topic: str, payload: bytes, attributes: Mapping[str, Value], now_us: int) -> bytes:
        """Queue one event; its id."""
        if self._next_id is None or self._limits is None:
            raise UsageError("best effort needs a broker, and there is none")
        if topic.split("/", 1)[0] == ROOT:
            raise UsageError(f"topics below {ROOT} are for repair itself")
        publisher = self._publisher()
        identity = self._next_id()
        row = encode_row(identity, topic, attributes, payload, self._limits, tick=publisher.sequence + 1)
        if len(row[1]) > MAX_BEST_EFFORT_BYTES:
            raise TooLargeError(
                f"a best-effort event of {len(row[1])} bytes with its topic and attributes, the most is"
                f" {MAX_BEST_EFFORT_BYTES}: publish it in another mode"
            )
        entries = publisher.publish(event_bits(topic, attributes), b"".join(row), now_us)
        if entries:
            row = with_record(row, entries, MAX_ROWS_BYTES - len(row[0]) - len(row[1]))
        self._pending.append(row)
        return identity

    def refused(self, ids: bytes) -> int:
        """The broker did not take these events: how many."""
        if len(ids) % ID_BYTES:
            raise PeerError(f"{len(ids)} bytes of ids that were rejected")
        for at in range(0, len(ids), ID_BYTES):
            published = self._published.get(ids[at : at + PREFIX_BYTES])
            if published is not None:
                published.side.refused_by_broker(ids[at : at + ID_BYTES])
        return len(ids) // ID_BYTES

    def _publisher(self) -> PublisherSide:
        """That of the prefix of the moment."""
        published = self._published.get(self._prefix)
        if published is None:
            kinds = ("request", "ask") if self.settings.max_record else ("request",)
            topics = [f"{self._root}/{kind}/{self._prefix.hex()}" for kind in kinds]
            requests = tuple(self._subscribe(topic, "") for topic in topics)
            self._own |= dict.fromkeys(requests, 0)
            published = _Published(PublisherSide(self._prefix, self.settings), requests)
            self._published[self._prefix] = published
            if len(self._published) > MAX_PREFIXES:
                self._end_published(next(iter(self._published)))
        return published.side

    def _end_published(self, prefix: bytes) -> None:
        for number in self._published.pop(prefix).requests:
            del self._own[number]
            self._unsubscribe(number)

    def take(self) -> list[bytes]:
        """The frames to send now, each fit for a datagram."""
        frames = [*_frames(self._pending), *_frames(self._pending_repair)]
        self._pending.clear()
        self._pending_repair.clear()
        return frames

    def finish(self, now_us: int) -> bool:
        """This client is about to go: what it published is summarised now. Whether there was anything."""
        return bool([True for published in self._published.values() if published.side.finish(now_us)])

    # --- subscriptions

    def repair(self, number: int, topic: str, where: str, settings: RepairSettings, started_us: int) -> None:
        """From `started_us` on this subscription is repaired."""
        selector = Selector.parse(topic, where)
        masks = selector_masks(selector)
        if not self._shared:
            self._shared = (
                self._subscribe(f"{ROOT}/summary/+", ""),
                self._subscribe(f"{self._root}/for", f"r{self.me.hex()} IS NOT NULL"),
            )
            self._own |= dict.fromkeys(self._shared, 0)
        condition = _as_condition([mask.bits for mask in masks])
        own = (
            ()
            if condition is None
            else tuple(self._subscribe(f"{self._root}/{kind}", condition) for kind in ("ask/+", "again"))
        )
        self._own |= dict.fromkeys(own, number)
        receiver = Receiver(self.me, masks, settings, started_us)
        neighbours = Neighbours(self.me, settings, draw=self._draw)
        weakest = max((false_match(mask, USUAL_ONES) if mask.exact else 1.0 for mask in masks), default=0.0)
        self._repaired[number] = _Repaired(number, selector, receiver, neighbours, own, weakest)

    def end(self, number: int, *, refused: bool = False) -> None:
        """The subscription is over; `refused` by the broker."""
        self._refused += refused and number in self._own
        self.reporting.end(number)
        repaired = self._repaired.pop(number, None)
        if repaired is None:
            return
        last = not any(other.neighbours is not None for other in self._repaired.values())
        for own in (*repaired.own, *(self._shared if last else ())):
            if self._own.pop(own, None) is not None:
                self._unsubscribe(own)
        if last:
            self._shared = ()

    def is_own(self, number: int) -> bool:
        return number in self._own

    # --- what comes

    def received(self, batch: EventBatch, limits: Limits, now_us: int, skew_us: int) -> list[Item]:
        """A checked frame: what the application gets."""
        number = batch.channel
        if number in self._own:
            out: list[Item] = []
            for row in range(batch.count):
                try:
                    message = decode(batch.payload(row))
                    out += self._heard(number, batch.id(row), message, limits, now_us, skew_us)
                except PeerError:
                    self.unreadable += 1  # whoever may publish to these topics can say anything
            return out
        repaired = self._repaired.get(number)
        if repaired is None:
            repaired = self._repaired[number] = _Repaired(
                number, Selector.parse("#"), Receiver(self.me, (), DEFAULTS, 0), None, ()
            )
        if repaired.neighbours is not None:
            self.reporting.received(number, batch.count)
        batch, records = without_records(batch, limits)
        fresh: list[Any] = []
        for row, record in enumerate(records):
            prefix, sequence = batch.id(row)[:PREFIX_BYTES], batch.tick(row)
            if record:
                repaired.receiver.record(prefix, sequence, record, now_us)
            self.unreadable += record is None
            if repaired.neighbours is not None:
                sent_ms = MessageId.from_bytes(batch.id(row)).time_ms
                repaired.neighbours.received(prefix, now_us + skew_us - sent_ms * MILLISECOND_US)
                repaired.neighbours.forget(prefix, sequence, now_us)
                bits = event_bits(batch.topic(row), batch.attributes(row))
                repaired.neighbours.cache.put(prefix, sequence, row_bytes(batch, row), bits)
            fresh += repaired.receiver.message(prefix, sequence, (batch, row), now_us)
        whole = [(batch, row) for row in range(batch.count)]
        if len(fresh) == batch.count and all(map(_same, fresh, whole)):
            return [Item(number, batch)]
        return _items(number, fresh)

    def _heard(
        self, number: int, identity: bytes, message: Message, limits: Limits, now_us: int, skew_us: int
    ) -> list[Item]:
        serves = self._own[number]
        concerned = [self._repaired[serves]] if serves else list(self._repaired.values())
        out: list[Item] = []
        for published in self._published.values():
            if number in published.requests:
                if isinstance(message, Request):
                    published.side.request(message, now_us)
                elif isinstance(message, Ask):
                    published.side.missed(message.sequence)
                return []
        self.reporting.changed()
        for repaired in concerned:
            if repaired.neighbours is None:
                continue
            if isinstance(message, Summary):
                answer = number != self._shared[0]  # it was sent to this client by name
                items = repaired.receiver.summary(identity[:PREFIX_BYTES], message, now_us, answer=answer)
                out += _items(repaired.number, items)
            elif isinstance(message, Gone):
                repaired.receiver.gone(message, now_us)
            elif isinstance(message, Ask):
                if message.receiver != self.me:
                    asked = msgspec.structs.replace(message, sent_us=message.sent_us - skew_us)
                    repaired.neighbours.heard_ask(asked, now_us)
            elif isinstance(message, Repair):
                out += self._repair_came(repaired, message, limits, now_us)
        return out

    def _repair_came(self, repaired: _Repaired, repair: Repair, limits: Limits, now_us: int) -> list[Item]:
        """What a repair carries is checked like any frame. Its id and number must be those it is sent for,
        and its content that of the event as far as this is known: who may repair can make one up."""
        publisher, sequence, row = repair.publisher, repair.sequence, repair.row
        frame = best_effort_frame([(row[:EVENT_HEADER_BYTES], row[EVENT_HEADER_BYTES:])], channel=0)
        batch = EventBatch.parse(frame, limits)
        if batch.id(0)[:PREFIX_BYTES] != publisher or batch.tick(0) != sequence:
            raise PeerError("a repair with another message than it names")
        neighbours, receiver = repaired.neighbours, repaired.receiver
        if neighbours is None:
            return []
        topic, attributes = batch.topic(0), batch.attributes(0)
        bits, cached = event_bits(topic, attributes), neighbours.cache.get(publisher, sequence)
        missing = receiver.bits_of(publisher, sequence)
        if missing not in (None, bits) or (cached is not None and cached[0] != row):
            receiver.unsolicited += 1
            return []
        neighbours.heard_repair(publisher, sequence, now_us)
        if not repaired.selector.matches(topic, attributes):
            if missing is None:
                return []
            return _items(repaired.number, receiver.false_repair(publisher, sequence, now_us))
        wanted = receiver.may_miss(publisher, sequence)
        fresh = receiver.message(publisher, sequence, (batch, 0), now_us, repair=True)
        if wanted:
            neighbours.cache.put(publisher, sequence, row, bits)
            self.reporting.repaired(repaired.number, batch.id(0))
        return _items(repaired.number, fresh)

    # --- time

    def next_deadline(self) -> int | None:
        due = [published.side.next_deadline() for published in self._published.values()]
        for repaired in self._repaired.values():
            due.append(repaired.receiver.next_deadline())
            if repaired.neighbours is not None:
                due.append(repaired.neighbours.next_deadline())
        return min((due_us for due_us in due if due_us is not None), default=None)

    def tick(self, now_us: int, skew_us: int) -> list[Item]:
        """What is due is queued; what the application gets is returned."""
        out: list[Item] = []
        for prefix, published in list(self._published.items()):
            for named in published.side.tick(now_us):
                self._say(named, prefix)
            if prefix != self._prefix and published.side.over:
                self._end_published(prefix)
        for repaired in self._repaired.values():
            requests, items = repaired.receiver.tick(now_us)
            out += _items(repaired.number, items)
            if requests or items:
                self.reporting.changed()
            for publisher, request in requests:
                topic = f"{self._root}/request/{publisher.hex()}"
                self._event(topic, {}, encode(request), self._prefix)
            if repaired.neighbours is None:
                continue
            for item in items:
                if isinstance(item, Lost):
                    repaired.neighbours.give_up(item.publisher, item.start, item.end)
            for publisher, sequence, bits in repaired.receiver.take_content():
                repaired.neighbours.want(publisher, sequence, bits, now_us)
            for named in repaired.neighbours.tick(now_us, now_us + skew_us):
                self._say(named, self._prefix)
                self.reporting.changed()
        return out

    def _say(self, named: Named, prefix: bytes) -> None:
        """With an id of this prefix: receivers know by it whose summary one is."""
        message = named.message
        if isinstance(message, Summary):
            topic = f"{ROOT}/summary/{prefix.hex()}"
        elif isinstance(message, Ask):
            topic = f"{self._root}/ask/{message.publisher.hex()}"
        else:
            topic = f"{self._root}/again"
        if named.receivers:
            self._say_to(named.receivers, message, prefix)
        elif named.bits is None:
            self._say_in_parts(topic, {}, message, prefix)
        elif not self._event(topic, _as_attributes(named.bits), encode(message), prefix) and named.askers:
            # A part of the bits would match nobody.
            self._say_to(named.askers, message, prefix)

    def _say_to(self, receivers: tuple[bytes, ...], message: Message, prefix: bytes) -> None:
        """In as many events as it takes. What does not even fit one for one receiver is asked for in vain,
        and a Gap there."""
        attributes: dict[str, Value] = {f"r{receiver.hex()}": True for receiver in receivers}
        said = self._say_in_parts(f"{self._root}/for", attributes, message, prefix)
        if not said and len(receivers) > 1:
            middle = len(receivers) // 2
            self._say_to(receivers[:middle], message, prefix)
            self._say_to(receivers[middle:], message, prefix)

    def _say_in_parts(
        self, topic: str, attributes: dict[str, Value], message: Message, prefix: bytes
    ) -> bool:
        """Whether it was said: a summary in as many events as it takes."""
        if self._event(topic, attributes, encode(message), prefix):
            return True
        if not isinstance(message, Summary) or len(message.entries) < 2:
            return False
        for half in _halves(message):
            self._say_in_parts(topic, attributes, half, prefix)
        return True

    def _event(self, topic: str, attributes: dict[str, Value], payload: bytes, prefix: bytes) -> bool:
        """Whether it fits what a broker takes, and is queued."""
        if self._next_id is None or self._limits is None:
            return True
        identity = prefix + self._next_id()[PREFIX_BYTES:]
        row = encode_row(identity, topic, attributes, payload, self._limits, tick=1)
        fits = len(row[0]) + len(row[1]) <= MAX_ROWS_BYTES
        if fits:
            self._pending_repair.append(row)
        return fits

    def reports(self, now_us: int) -> list[Repaired]:
        """What is to be reported to the broker now."""
        repaired = [
            (repaired.number, repaired.receiver, repaired.neighbours)
            for repaired in self._repaired.values()
            if repaired.neighbours is not None
        ]
        return self.reporting.take(repaired, now_us)

    # --- inspection

    def figures(self, number: int) -> dict[str, float]:
        """What repair did for a subscription."""
        repaired = self._repaired.get(number)
        if repaired is None:
            return {}
        receiver, neighbours = repaired.receiver, repaired.neighbours
        delays = sorted(receiver.recovery_us)
        figures: dict[str, float] = {
            "permitted": float(not self._refused),
            "losses_detected": receiver.detected,
            "recovered": receiver.recovered,
            "missing": receiver.missing,
            "given_up": receiver.given_up,
            "duplicates_suppressed": receiver.duplicates,
            "false_repairs": receiver.false_repairs,
            "unsolicited_repairs": receiver.unsolicited,
            "requests_sent": receiver.requests,
            "recovery_ms_p50": delays[len(delays) // 2] / 1_000 if delays else 0.0,
            "recovery_ms_p99": delays[len(delays) * 99 // 100] / 1_000 if delays else 0.0,
        }
        if neighbours is not None:
            asked = neighbours.cache.hits + neighbours.cache.misses
            figures |= {
                "asks_sent": neighbours.asks,
                "repairs_sent": neighbours.repairs,
                "cache_messages": len(neighbours.cache),
                "cache_size": neighbours.cache.size,
                "cache_hit_ratio": neighbours.cache.hits / asked if asked else 1.0,
                "false_match": repaired.false_match,
                "told_apart": float(repaired.false_match <= WEAK),
            }
        return figures

    def check(self) -> None:
        for published in self._published.values():
            published.side.check()
        if len(self._published) > MAX_PREFIXES:
            raise BugError("more is kept of what was published before than there is room for")
        for repaired in self._repaired.values():
            repaired.receiver.check()
            if repaired.neighbours is not None:
                repaired.neighbours.check()


def _may_bear(earlier: bytes, prefix: bytes) -> bool:
    """Whether a client with this prefix may send ids of an earlier one: those that its broker gave out in
    this start are their owners' alone. A broker that knows its client gives it the number it had."""
    started, starts = (int.from_bytes(whose[:4], "big") >> COUNT_BITS for whose in (earlier, prefix))
    return earlier == prefix or earlier[4:] != prefix[4:] or started != starts


def _frames(rows: list[Row]) -> Iterator[bytes]:
    """Frames of these rows, each fit for a datagram, with ids of one publisher."""
    together: list[Row] = []
    size = 0
    for row in rows:
        row_size = len(row[0]) + len(row[1])
        other = together and together[0][0][:PREFIX_BYTES] != row[0][:PREFIX_BYTES]
        if other or (together and size + row_size > MAX_ROWS_BYTES):
            yield best_effort_frame(together, channel=0)
            together, size = [], 0
        together.append(row)
        size += row_size
    if together:
        yield best_effort_frame(together, channel=0)


def _halves(summary: Summary) -> tuple[Summary, Summary]:
    middle = len(summary.entries) // 2
    first = Summary(first=summary.first, entries=summary.entries[:middle], ages_ms=summary.ages_ms[:middle])
    second = Summary(
        first=summary.first + middle, entries=summary.entries[middle:], ages_ms=summary.ages_ms[middle:]
    )
    return first, second


def _same(item: Any, row: tuple[EventBatch, int]) -> bool:
    return isinstance(item, tuple) and item[0] is row[0] and item[1] == row[1]


def _items(number: int, contents: list[Any]) -> list[Item]:
    out: list[Item] = []
    for content in contents:
        if isinstance(content, Lost):
            text = f"{content.publisher[:4].hex()}-{content.publisher[4:].hex()}"
            out.append(Item(number, Gap(pubend=text, start=content.start, end=content.end)))
        elif content is not None:
            batch, row = content
            out.append(Item(number, batch if batch.count == 1 else batch.slice(row, row + 1)))
    return out


def _as_attributes(bits: int) -> dict[str, Value]:
    filters = [(level, positions(fold(bits, WIDTH, width))) for level, width in enumerate(FOLDS)]
    level, ones = next(((level, ones) for level, ones in filters if len(ones) <= MAX_BITS), filters[-1])
    return {f"b{level}_{at}": True for at in ones}


def _as_condition(masks: list[int]) -> str | None:
    """Asks for what matches one of these masks, at whichever width they are made (spec B5)."""
    parts: list[str] = []
    for bits in masks[:MAX_MASKS]:
        for level, width in enumerate(FOLDS):
            ones = positions(fold(bits, WIDTH, width))
            parts.append(" AND ".join(f"b{level}_{at} IS NOT NULL" for at in ones))
    if not masks:
        return None
    return "" if "" in parts else " OR ".join(f"({part})" for part in parts)
