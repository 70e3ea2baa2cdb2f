"""How a message is looked up: in memory and in what is stored, whichever strategy recorded it (spec T6, T11).

The strategy may have changed since the message was sent: what the exact log has is found by a broker that now
keeps filters, and the other way round. Where both know something, the log is right: its rates are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

from postroad.ids import ID_BYTES, MessageId
from postroad.tracking.attachment import GROUP, LOST, NEIGHBOUR, SUBSCRIBER, AttachmentMap, read_bounds
from postroad.tracking.attachment_log import MAX_CHANGE_BYTES, encoded_parts, tellable
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.groups import group_members
from postroad.tracking.keys import (
    DATAGRAM,
    DELIVERED,
    DELIVERY,
    ENTRY,
    FORWARDED,
    FORWARDING,
    LOG,
    NO_TAG,
    PUBLISH,
    PUBLISHED,
    REPAIR,
    REPAIRED,
    ROUTED,
    ROUTING,
    SENT,
    HistoryKey,
    group_tag,
    neighbour_tag,
    subscriber_tag,
    tagged,
)
from postroad.tracking.query.messages import (
    ANY_ORIGIN,
    MAX_CANDIDATES,
    MAX_NEIGHBOURS,
    MAX_RECEIVERS,
    MAX_SIGHTINGS,
    Finding,
    Forwarding,
    Receiver,
    Sighting,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.record import FilterMeta, filter_of
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.shelf import Shelf
from postroad.units import KIB, MIB, MILLISECOND_US

MAX_READS: Final = 1024  # stored records read for one question,
MAX_READ_BYTES: Final = 256 * MIB  # as long as those before have less than this,
FEW_READS: Final = 8  # or are fewer than this;
PORTION_BYTES: Final = 8 * MIB  # so much at a time, or one
MAX_SET_DEGREE: Final = 10  # neighbours whose 2^D sets are tried; with more, a trace asks all
_LOG: Final = HistoryKey(LOG)


class Claims(NamedTuple):
    """What a stored filter says of a message."""

    tags: bytes  # that were looked for
    claimed: bytes  # a byte for each, 1 if it claims it
    fpp: float


class Reading:
    """What the stored records that were read for a question told; they themselves are not kept."""

    __slots__ = ("_bytes", "_count", "_here", "claims", "entries", "failed", "sizes")

    def __init__(self) -> None:
        self.claims: dict[tuple[int, bytes], Claims] = {}  # by record and message
        self.entries: dict[tuple[int, bytes], list[tuple[str, int, str]]] = {}  # likewise, of the log
        self.sizes: dict[int, int] = {}  # bytes of the records that were missing so far
        self.failed: set[int] = set()  # records that could not be read
        self._here: frozenset[int] = frozenset()  # those that were given last
        self._count = self._bytes = 0  # of all that were

    def take(self, records: Mapping[int, bytes]) -> None:
        """With every message of the question; for another message, or other tags, they may come again."""
        for sequence in records.keys() - self._here:
            self._count += 1
            self._bytes += self.sizes.get(sequence, len(records[sequence]))
        self._here = frozenset(records)

    def portion(self, missing: Set[int]) -> tuple[int, ...]:
        """Those of them to read next."""
        sequences: list[int] = []
        size = 0
        for sequence in sorted(missing - self.failed):
            count = self._count + len(sequences)
            if count >= MAX_READS or (count >= FEW_READS and self._bytes + size >= MAX_READ_BYTES):
                break
            size += self.sizes[sequence]
            if sequences and size > PORTION_BYTES:
                break
            sequences.append(sequence)
        return tuple(sequences)


class Current(NamedTuple):
    """A filter of a history that is in memory."""

    filter: BloomFilter | None  # None: it is not in M(H, t)
    span_ms: int  # of message time in it
    ranged: bool  # as of `FilterMeta`
    stored: int | None  # the sequence of an earlier state of it


class Deliveries:
    """Who is claimed to have got a message, by how many keys; keys that were tried, and those that hit."""

    __slots__ = ("hits", "rates", "tried", "witnesses")

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}  # by receiver, the least of its keys
        self.witnesses: dict[str, int] = {}  # keys that claim it
        self.hits = 0
        self.tried = 0

    def test(self, tried: int, claimed: Sequence[Sequence[str]], rate: float) -> None:
        """Of so many keys, those claim it that stand for these. Where no filter is, none can."""
        self.tried += tried if rate else 0
        self.hits += len(claimed)
        for members in claimed:
            for who in members:
                self.rates[who] = min(rate, self.rates.get(who, 1.0))
                self.witnesses[who] = self.witnesses.get(who, 0) + 1

    def receivers(self) -> list[Receiver]:
        return [
            Receiver(subscriber=who, fpp=self.rates[who], keys=self.witnesses.get(who, 1))
            for who in sorted(self.rates)
        ]


class Keyed(NamedTuple):
    """Who may have got a message, each by one key: subscribers, then sets of them."""

    subscribers: list[str]
    groups: list[str]
    tags: bytes  # of both, in order

    def members(self, at: int) -> Sequence[str]:
        """Whom the key there stands for."""
        single = len(self.subscribers)
        return (self.subscribers[at],) if at < single else group_members(self.groups[at - single])


class Look:
    """One message looked up: the records read for it, and whether any could not be."""

    __slots__ = ("happened", "id", "reading", "records", "time_ms", "unread")

    def __init__(self, identity: bytes, records: Mapping[int, bytes], reading: Reading) -> None:
        self.id = identity
        self.time_ms = MessageId.from_bytes(identity).time_ms
        self.records = records
        self.reading = reading
        self.happened: dict[tuple[str, int, str], None] | None = None  # by the exact log, once it is searched
        self.unread: set[int] = set()  # stored, matching, and neither in `records` nor told before


class Lookup:
    """Answers questions from `_shelf`, `_map` and what a strategy has in memory."""

    def __init__(self, config: TrackingConfig, *, me: int, shelf: Shelf, attachments: AttachmentMap) -> None:
        self._config = config
        self._me = me
        self._shelf = shelf
        self._map = attachments
        self._skew_us, self._jitter_us = read_bounds(config, attachments)
        self.looked = 0  # keys, names and KiB gone through so far for questions
        self.change_bytes = MAX_CHANGE_BYTES
        self._keyed = Keyed([], [], b"")  # of the last message: most have the same

    # ---- what a strategy has in memory

    def _flush_before_question(self) -> None:
        """A chance to make what is in memory searchable."""

    def _just_stored(self, sequence: int) -> bytes | None:  # noqa: ARG002
        """The body of a record that the driver has not seen yet."""
        return None

    def _current(self, key: HistoryKey, time_ms: int) -> list[Current]:  # noqa: ARG002
        return []

    def _current_keys(self, kind: str) -> list[HistoryKey]:  # noqa: ARG002
        """The histories with a filter in memory."""
        return []

    def _current_log(self, time_ms: int) -> tuple[bytes, Sequence[str]] | None:  # noqa: ARG002
        """Entries in memory that may be of that time, and their happenings."""
        return None

    def _tag(self, subscriber: str) -> bytes:
        return subscriber_tag(subscriber)

    # ---- questions

    def answer(
        self, question: TraceQuestion, records: Mapping[int, bytes], reading: Reading | None = None
    ) -> tuple[TraceAnswer, tuple[int, ...]]:
        self._flush_before_question()
        reading = reading or Reading()
        reading.take(records)
        findings: list[Finding] = []
        unread: set[int] = set()
        for item in question.items:
            look = Look(item.id, records, reading)
            findings.append(self._find(look, item))
            unread |= look.unread
        return TraceAnswer(findings=tuple(findings)), reading.portion(unread)

    def attachment_parts(self, now_us: int) -> Iterator[bytes]:
        return encoded_parts(tellable(self._map.snapshot(now_us), self.change_bytes))

    def _find(self, look: Look, item: TraceItem) -> Finding:
        """What is known about one message, from memory and the records read so far."""
        time_ms = look.time_ms
        window = {"skew_us": self._skew_us, "delay_us": self._jitter_us}
        published = self._publication(look)
        sightings = self._sightings(look, item.origin)
        routed = sightings[:MAX_SIGHTINGS]
        # A message may be passed on long after its time, over a link that is new then and gone by now: to a
        # broker that comes back, or is rerouted, and catches up.
        linked = self._map.since(NEIGHBOUR, time_ms, skew_us=self._skew_us)
        neighbours = sorted(map(int, linked))
        # Routing history first: only who routed it, or took it from the publisher, can have passed it on.
        origins = {sighting.origin for sighting in routed}
        if published is not None:
            origins.add(self._me)
        forwarded: tuple[Forwarding, ...] | None = None
        deliveries = Deliveries()
        candidates: list[str] = []
        wanted = 0.5
        if origins:
            ordered = sorted(origins)
            forwarded = self._forwardings(look, ordered, neighbours)
            candidates = self._map.at(SUBSCRIBER, time_ms, **window)
            groups = self._map.at(GROUP, time_ms, **window)
            deliveries = self._deliveries(look, ordered, self._keys_of(candidates, groups))
            wanted = self._wanted(look, ordered)
        received = deliveries.receivers()
        repaired = self._repairs(look, window)
        lost = self._why_incomplete(look)
        if len(sightings) > MAX_SIGHTINGS:
            lost = lost or f"{len(sightings) - MAX_SIGHTINGS} more routing histories that claim the message"
        elif len(neighbours) > MAX_NEIGHBOURS and (lost or (origins and forwarded is None)):
            lost = lost or f"{len(neighbours) - MAX_NEIGHBOURS} more neighbours that may have it"
        return Finding(
            published=published,
            routed=tuple(routed),
            forwarded=forwarded,
            delivered=tuple(received[:MAX_RECEIVERS]),
            candidates=max(len(candidates), len(received), len(repaired)),
            more=max(0, len(received) - MAX_RECEIVERS, len(repaired) - MAX_RECEIVERS),
            neighbours=tuple(neighbours[:MAX_NEIGHBOURS]),
            begins_ms=(self._map.begins_us or 0) // MILLISECOND_US,
            forgotten=time_ms * MILLISECOND_US < (self._map.forgot_us or 0),
            lost=lost,
            hits=deliveries.hits,
            tried=min(max(deliveries.tried, deliveries.hits), MAX_CANDIDATES),
            wanted=wanted,
            sent=self._meant_for(look, sorted(origins)),
            repaired=tuple(repaired[:MAX_RECEIVERS]),
        )

    def _why_incomplete(self, look: Look) -> str:
        if look.unread:
            return f"stored filters that could not be read: {len(look.unread)}"
        slack = {"skew_us": self._skew_us, "delay_us": self._jitter_us}
        if self._map.lost_at(look.time_ms, **slack):
            return LOST
        return ""

    def _body(self, look: Look, meta: FilterMeta) -> bytes | None:
        """What a stored record holds; None, and noted, if it is not to be had."""
        body = self._shelf.body(meta, look.records)
        if body is None:
            body = self._just_stored(meta.sequence)
        if body is None:
            look.unread.add(meta.sequence)
            if meta.sequence in look.records:
                look.reading.failed.add(meta.sequence)
            look.reading.sizes[meta.sequence] = self._shelf.size(meta)
        return body

    # ---- in filters

    def _claims(self, look: Look, meta: FilterMeta, keys: bytes, tags: bytes) -> Claims | None:
        """What a stored filter says of these; None if it cannot be read."""
        place = (meta.sequence, look.id)
        claims = look.reading.claims.get(place)
        if claims is not None and claims.tags == tags:
            return claims
        bits = self._body(look, meta)
        if bits is None:
            return None
        stored = filter_of(meta, bits)
        self.looked += len(bits) // KIB + len(tags) // ID_BYTES
        claims = look.reading.claims[place] = Claims(tags, stored.contains(keys), stored.fpp)
        return claims

    def _stored(self, look: Look, key: HistoryKey, current: Sequence[Current]) -> list[FilterMeta]:
        """Those of M(H, t) that are stored, without earlier states of the current ones."""
        self.looked += self._shelf.wide(key)
        earlier = {state.stored for state in current}
        return [meta for meta in self._shelf.matching(key, look.time_ms) if meta.sequence not in earlier]

    def _test(self, look: Look, key: HistoryKey, tags: bytes = NO_TAG) -> tuple[list[int], float]:
        """Which of the tags some filter of M(H, t) claims for the message, as far as it can be read, and the
        rate at which it claims others: measured where it claims any, else 1, or 0 if there is no filter."""
        keys = tagged(look.id, tags)
        count = len(tags) // ID_BYTES
        current = self._current(key, look.time_ms)
        filters = [state.filter for state in current if state.filter is not None]
        stored = [self._claims(look, meta, keys, tags) for meta in self._stored(look, key, current)]
        read = [claims for claims in stored if claims is not None]
        self.looked += count * len(filters)
        claimed = 0  # a byte for each, 1 if so
        for bits in [*(each.contains(keys) for each in filters), *(claims.claimed for claims in read)]:
            claimed |= int.from_bytes(bits, "big")
        if not claimed:
            return [], float(bool(filters or read))
        rate = 0.0
        for fpp in [*(each.fpp for each in filters), *(claims.fpp for claims in read)]:
            rate += fpp * (1 - rate)  # keeps the digits of rates that 1 less the rate would lose
        return _positions(claimed.to_bytes(count, "big")), rate

    def _publication(self, look: Look) -> float | None:
        for _ in self._happened(look, PUBLISHED):
            return 0.0
        hits, rate = self._test(look, HistoryKey(PUBLISH))
        return rate if hits else None

    def _names(self, kind: str, origin: int) -> list[HistoryKey]:
        """The histories of that kind, in memory or stored; of any origin for ANY_ORIGIN."""
        keys = {*self._current_keys(kind), *self._shelf.keys(kind)}
        return sorted(key for key in keys if origin in (ANY_ORIGIN, key.origin))

    def _sightings(self, look: Look, origin: int) -> list[Sighting]:
        rates: dict[tuple[int, int], float] = {}  # by origin, and neighbour it came from
        for key in self._names(ROUTING, origin):
            hits, rate = self._test(look, key)
            if hits:
                rates[key.origin, key.neighbour] = rate
        for of, who in self._happened(look, ROUTED):
            if origin in (ANY_ORIGIN, of):
                rates[of, int(who)] = 0.0
        return [Sighting(origin=of, neighbour=source, fpp=rates[of, source]) for of, source in sorted(rates)]

    def _forwardings(
        self, look: Look, origins: list[int], neighbours: list[int]
    ) -> tuple[Forwarding, ...] | None:
        mode = self._config.routing
        # Where it was not recorded in this way ever since, nobody knows whom the record leaves out.
        if mode == "all" or self._map.routings_since(look.time_ms, skew_us=self._skew_us) != {mode}:
            return None
        if mode == "set" and len(neighbours) > MAX_SET_DEGREE:
            return None
        rates: dict[int, float] = {}  # neighbour -> the least rate that claims it
        if mode == "neighbours":
            for origin in origins:
                for key in self._names(FORWARDING, origin):
                    hits, rate = self._test(look, key)
                    if hits and key.neighbour:
                        rates[key.neighbour] = min(rate, rates.get(key.neighbour, 1.0))
        else:
            # The tags of all sets, the set of the bits of its index.
            values = [0]
            for neighbour in neighbours:
                tag = int.from_bytes(neighbour_tag(neighbour), "big")
                values += [value ^ tag for value in values]
            tags = b"".join([value.to_bytes(ID_BYTES, "big") for value in values[1:]])
            for origin in origins if tags else ():
                hits, rate = self._test(look, HistoryKey(FORWARDING, origin), tags)
                # One key was added and all sets were tried.
                rate = min(1.0, rate * (len(values) - 1))
                for bit, neighbour in enumerate(neighbours):
                    if any(at + 1 >> bit & 1 for at in hits):
                        rates[neighbour] = min(rate, rates.get(neighbour, 1.0))
        rates |= {int(who): 0.0 for of, who in self._happened(look, FORWARDED) if of in origins}
        if len(rates) > MAX_NEIGHBOURS:
            return None
        return tuple(Forwarding(neighbour=number, fpp=rates[number]) for number in sorted(rates))

    def _keys_of(self, subscribers: list[str], groups: list[str]) -> Keyed:
        self.looked += len(subscribers) + len(groups)
        if (self._keyed.subscribers, self._keyed.groups) != (subscribers, groups):
            tags = b"".join([*map(self._tag, subscribers), *map(group_tag, groups)])
            self._keyed = Keyed(subscribers, groups, tags)
        return self._keyed

    def _deliveries(self, look: Look, origins: list[int], keyed: Keyed) -> Deliveries:
        deliveries = Deliveries()
        for origin in origins:
            if keyed.tags:
                hits, rate = self._test(look, HistoryKey(DELIVERY, origin), keyed.tags)
                deliveries.test(len(keyed.tags) // ID_BYTES, [keyed.members(at) for at in hits], rate)
            # Both forms are read, whichever is written now: the setting may have changed since.
            names = {key.subscriber: key for key in self._names(DELIVERY, origin) if key.subscriber}
            for who in keyed.subscribers if names else ():
                if who in names:
                    hits, rate = self._test(look, names[who], self._tag(who))
                    deliveries.test(1, [(who,)] * len(hits), rate)
        deliveries.rates |= {who: 0.0 for of, who in self._happened(look, DELIVERED) if of in origins}
        return deliveries

    def _meant_for(self, look: Look, origins: list[int]) -> tuple[Forwarding, ...]:
        """The neighbours that a best-effort event was to go to."""
        rates: dict[int, float] = {}
        for origin in origins:
            for key in self._names(DATAGRAM, origin):
                hits, rate = self._test(look, key)
                if hits:
                    rates[key.neighbour] = min(rate, rates.get(key.neighbour, 1.0))
        rates |= {int(who): 0.0 for of, who in self._happened(look, SENT) if of in origins}
        return tuple(Forwarding(neighbour=at, fpp=rates[at]) for at in sorted(rates)[:MAX_NEIGHBOURS])

    def _repairs(self, look: Look, window: dict[str, int]) -> list[Receiver]:
        """Who got it as a repair; it need not have come to this broker."""
        deliveries = Deliveries()
        if self._names(REPAIR, ANY_ORIGIN):
            candidates = self._map.at(SUBSCRIBER, look.time_ms, **window)
            tags = b"".join(map(self._tag, candidates))
            self.looked += len(candidates)
            if tags:
                hits, rate = self._test(look, HistoryKey(REPAIR), tags)
                deliveries.test(len(candidates), [(candidates[at],) for at in hits], rate)
        deliveries.rates |= {who: 0.0 for _, who in self._happened(look, REPAIRED)}
        return deliveries.receivers()

    def _wanted(self, look: Look, origins: list[int]) -> float:
        """Keys of deliveries for each message of these origins that came, at about the time of this one."""
        came = got = 0.0
        for origin in origins:
            here = [HistoryKey(PUBLISH)] if origin == self._me else self._names(ROUTING, origin)
            came += sum(self._density(look, key) for key in here)
            got += sum(self._density(look, key) for key in self._names(DELIVERY, origin))
        return min(float(MAX_CANDIDATES), got / came) if came else 0.5

    def _density(self, look: Look, key: HistoryKey) -> float:
        """Keys for a millisecond of message time, in M(H, t)."""
        current = self._current(key, look.time_ms)
        counts = [(meta.count, meta.span_ms, meta.ranged) for meta in self._stored(look, key, current)]
        counts += [
            (state.filter.count, state.span_ms, state.ranged) for state in current if state.filter is not None
        ]
        # Ranges follow each other; what came at other times came beside that.
        beside = sum(count / span for count, span, ranged in counts if not ranged)
        spans = sum(span for _, span, ranged in counts if ranged)
        return beside + (sum(count for count, _, ranged in counts if ranged) / spans if spans else 0.0)

    # ---- in the exact log

    def _happened(self, look: Look, wanted: str) -> Iterator[tuple[int, str]]:
        """(origin, who) of every entry of that kind about the message, each once."""
        if look.happened is None:
            look.happened = dict.fromkeys(self._entries_of(look))
        return ((origin, who) for happening, origin, who in look.happened if happening == wanted)

    def _entries_of(self, look: Look) -> Iterator[tuple[str, int, str]]:
        current = self._current_log(look.time_ms)
        if current is not None:
            yield from _search(*current, look.id)
        for meta in self._shelf.matching(_LOG, look.time_ms):
            place = (meta.sequence, look.id)
            if place not in look.reading.entries:
                body = self._body(look, meta)
                if body is None:
                    continue
                self.looked += self._shelf.size(meta) // KIB
                look.reading.entries[place] = list(_search(body, meta.names, look.id))
            yield from look.reading.entries[place]


def _positions(claimed: bytes) -> list[int]:
    """Where it is 1."""
    positions: list[int] = []
    at = claimed.find(1)
    while at >= 0:
        positions.append(at)
        at = claimed.find(1, at + 1)
    return positions


def _search(body: bytes, names: Sequence[str], identity: bytes) -> Iterator[tuple[str, int, str]]:
    """What is said of that message: what happened, the origin, who."""
    at = body.find(identity)
    while at >= 0:
        if at % ENTRY.itemsize == 0:
            position = int.from_bytes(body[at + ID_BYTES : at + ENTRY.itemsize], "little")
            if position < len(names):
                happening, origin, who = names[position].split(" ", 2)
                yield happening, int(origin), who
            at += ENTRY.itemsize
        else:
            at += 1
        at = body.find(identity, at)
