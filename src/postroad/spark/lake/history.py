"""What brokers publish about themselves, as rows of the lake (spec P4).

A broker may be damaged, or lie. What cannot be read of it is left out and named (`Unread`), and nothing else
suffers. To the lake it is a gap in what that broker told: a bulk trace does not call complete what it may
have been about, and the broker's map is told again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa

from postroad.errors import BugError, PeerError, StorageError, UsageError, shorten
from postroad.history.bulletins import (
    ATTACHMENTS,
    BEST_EFFORT,
    DELIVERIES,
    FILTERS,
    QUEUES,
    TOPOLOGY,
    Links,
    decode_best_effort,
    decode_deliveries,
    decode_queue_events,
    decode_topology,
    join_parts,
)
from postroad.ids import HISTORY
from postroad.spark.lake import rows
from postroad.spark.trace.topology import Place, tracking_settings
from postroad.tracking.attachment import GROUP, NEIGHBOUR
from postroad.tracking.attachment_log import FOREVER_US, Change, decode_changes
from postroad.tracking.groups import group_members
from postroad.tracking.keys import ENTRY, FORWARDED, LOG, ROUTED, SENT
from postroad.tracking.record import FilterMeta, decode_meta, decode_record, encode_description
from postroad.units import KIB, MIB

TABLES: Final = {
    "attachments": ATTACHMENTS,
    "topology": TOPOLOGY,
    "deliveries": DELIVERIES,
    "queue_events": QUEUES,
    "best_effort_links": BEST_EFFORT,
    "repairs": BEST_EFFORT,
}
_BULLETIN: Final = ("topic", "attributes", "payload", "pubend", "tick", "origin")
MAX_WAITING_BYTES: Final = 128 * MIB  # of the parts of one broker whose others may come,
_AROUND_BYTES: Final = KIB  # each with this
_MAX_SHOWN: Final = 200  # characters of why something is left out
_DIGITS: Final = 10  # of a broker's number, at most
_BEYOND: Final = 1 << 48  # the time of no message, and more than anybody counted
# What comes of nonsense: wrong types, values beyond a column's, contradictions.
NONSENSE: Final = (
    *(PeerError, StorageError, UsageError, msgspec.DecodeError),
    *(ArithmeticError, LookupError, TypeError, ValueError),
)

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Head(msgspec.Struct, frozen=True):
    """What the attributes of a bulletin say that is no filter."""

    broker: str
    name: str
    number: _Natural
    whole: bool = False


class Part(msgspec.Struct, frozen=True):
    """One of the parts of a stored filter."""

    broker: str
    name: str
    sequence: _Natural
    part: _Natural
    parts: Annotated[int, msgspec.Meta(ge=1)]
    payload: bytes
    tick: int = 0  # unless an older Postroad saved it
    group: int = 0  # likewise: of the filters that were published together, the time in their ids


class Unread(msgspec.Struct, frozen=True):
    """A bulletin that is left out."""

    pubend: str
    tick: int
    topic: str
    why: str

    @classmethod
    def of(cls, pubend: str, tick: int, topic: str, error: Exception) -> Unread:
        plain = "".join(letter if letter.isprintable() else " " for letter in str(error))
        return cls(pubend, tick, topic, shorten(plain, _MAX_SHOWN))

    @property
    def origin(self) -> str:
        return self.pubend[:8]


def complaints(unread: Iterable[Unread]) -> list[str]:
    """A line per broker."""
    by_origin: dict[str, list[Unread]] = {}
    for bulletin in unread:
        by_origin.setdefault(bulletin.origin, []).append(bulletin)
    return [
        f"broker {origin}: {len(of)} of its bulletins cannot be read and are left out; traces of that time"
        f" are partial. The first, {of[0].topic}: {of[0].why}"
        for origin, of in sorted(by_origin.items())
    ]


def values(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Attributes as they were published, from the map that `events` has."""
    return {
        name: next((value for value in typed.values() if value is not None), None)
        for name, typed in attributes.items()
    }


# ---- filters


def part_of(
    origin: str, attributes: Mapping[str, Any], payload: bytes, tick: int = 0, group: int = 0
) -> Part:
    """A bulletin of this broker; one of `NONSENSE` if it is none."""
    part = msgspec.convert({**attributes, "payload": payload, "tick": tick, "group": group}, Part)
    _check_author(origin, part.broker)
    if part.part >= part.parts:
        raise PeerError(f"part {part.part} of a stored filter that has {part.parts}")
    return part


def whole_filters(parts: Iterable[Part]) -> tuple[list[pa.Table], list[Part], list[Unread]]:
    """The rows of filters all of whose parts are there, parts whose others may come, and what is left out.

    A broker publishes filters in groups, one after the other, and only within a group in any order: what its
    disk refused comes again. So of what came before the last group nothing is to be waited for.
    """
    waiting: dict[tuple[str, int], dict[int, Part]] = {}
    last: dict[str, int] = {}  # by broker, the group that came last
    for part in parts:
        waiting.setdefault((part.broker, part.sequence), {})[part.part] = part
        last[part.broker] = part.group
    tables: list[pa.Table] = []
    rest: list[Part] = []
    unread: list[Unread] = []
    room = dict.fromkeys(last, MAX_WAITING_BYTES)
    for (broker, _), numbered in waiting.items():
        listed = [numbered[at] for at in sorted(numbered)]
        try:
            if len(listed) == listed[0].parts:
                tables.append(_filter(listed))
                continue
            room[broker] -= sum(len(part.payload) + _AROUND_BYTES for part in listed)
            if room[broker] < 0 or all(part.group != last[broker] for part in listed):
                raise PeerError(f"{len(listed)} of {listed[0].parts} parts of a stored filter")
            rest += listed
        except NONSENSE as error:
            tick = max(part.tick for part in listed)
            unread.append(Unread.of(f"{broker}-{HISTORY:08x}", tick, FILTERS, error))
            with suppress(*NONSENSE):  # if it tells of what times it is, which may be long before that tick
                tables.append(_description(listed))
    return tables, rest, unread


def _filter(parts: Sequence[Part]) -> pa.Table:
    record = join_parts([part.payload for part in parts])
    meta = decode_meta(record)
    _check_filter(meta, parts[0])
    _check_log(meta, record)
    return rows.filters(int(parts[0].broker, 16), parts[0].name, [(meta, record)])


def _description(parts: Sequence[Part]) -> pa.Table:
    """What the first part tells of a filter that lacks others. An earlier state, which it replaces, stays."""
    if parts[0].part:
        raise PeerError("not the first part")
    meta = decode_meta(join_parts([part.payload for part in parts]))
    _check_filter(meta, parts[0])
    description = msgspec.structs.replace(meta, replaces=None, names=())
    return rows.filters(
        int(parts[0].broker, 16), parts[0].name, [(description, encode_description(description))]
    )


def _check_filter(meta: FilterMeta, part: Part) -> None:
    """What fits its column, and yet cannot be added up with others, would fail every trace."""
    if meta.sequence != part.sequence:
        raise PeerError(f"the stored filter {meta.sequence} in place of {part.sequence}")
    possible = meta.m >= 0 and meta.count < _BEYOND
    if not possible or not all(lo_ms >= 0 and hi_ms < _BEYOND for lo_ms, hi_ms in meta.spans):
        raise PeerError("a stored filter of times or counts that cannot be")
    if not (_is_broker(meta.key.origin) and _is_broker(meta.key.neighbour)):
        raise PeerError("a stored filter of a broker that cannot be")


def _check_log(meta: FilterMeta, record: bytes) -> None:
    for name in meta.names:
        what, origin, who = name.split(" ", 2)
        if not _is_broker(int(origin)) or (what in (ROUTED, FORWARDED, SENT) and not _is_broker(int(who))):
            raise PeerError("an exact log of a broker that cannot be")
    if meta.key.kind == LOG:
        with suppress(StorageError):  # its description tells what is damaged
            if len(decode_record(record)[1]) % ENTRY.itemsize:
                raise PeerError("an exact log that has no whole number of entries")


# ---- the others


def bulletin_rows(table: str, bulletins: pa.Table) -> tuple[list[pa.Table], list[Unread]]:
    """From rows of `events` to those of a table; and what is left out."""
    tables: list[pa.Table] = []
    unread: list[Unread] = []
    for row in bulletins.select(_BULLETIN).to_pylist():
        try:
            tables.append(decoded(table, row["origin"], values(dict(row["attributes"])), row["payload"]))
        except NONSENSE as error:
            unread.append(Unread.of(row["pubend"], row["tick"], row["topic"], error))
    return tables, unread


def decoded(table: str, origin: str, attributes: Mapping[str, Any], payload: bytes) -> pa.Table:
    """The rows of a bulletin of this broker; one of `NONSENSE` if it is none."""
    head = msgspec.convert(attributes, _Head)
    _check_author(origin, head.broker)
    broker = int(origin, 16)
    match table:
        case "attachments":
            changes, size = decode_changes(payload)
            if size != len(payload) or not all(map(_can_be, changes)):
                raise PeerError("changes of attachments that are none")
            return rows.attachments(broker, head.name, head.number, changes, whole=head.whole)
        case "topology":
            state = decode_topology(payload)
            _check_links(origin, state)
            return rows.topology(head.number, state)
        case "deliveries":
            return rows.deliveries(broker, head.number, decode_deliveries(payload))
        case "queue_events":
            return rows.queue_events(broker, head.number, decode_queue_events(payload))
        case "best_effort_links":
            return rows.best_effort_links(broker, head.number, decode_best_effort(payload))
        case "repairs":
            return rows.repairs(broker, head.number, decode_best_effort(payload))
    raise BugError(f"no bulletins are rows of {table}")


def _check_author(origin: str, broker: str) -> None:
    """A broker speaks for itself alone."""
    if broker != origin:
        raise PeerError(f"it is said to be of broker {broker!r}")


def _can_be(change: Change) -> bool:
    if change.kind == GROUP:
        group_members(change.who)
    if max(change.at_us, change.until_us, change.noted_us) > FOREVER_US:
        return False
    return change.kind != NEIGHBOUR or (
        change.who.isdecimal() and len(change.who) <= _DIGITS and _is_broker(int(change.who))
    )


def _is_broker(number: int) -> bool:
    return 0 <= number < 1 << 32


def _check_links(origin: str, state: Links) -> None:
    _check_author(origin, state.broker)
    for link in state.links:
        if not _is_broker(int(link.broker, 16)):
            raise PeerError("a link to a broker that cannot be")
    tracking_settings([Place(state.name, {}, state.skew_us, state.jitter_us, state.routing)])
