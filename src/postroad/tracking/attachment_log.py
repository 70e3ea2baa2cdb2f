"""The log of the attachment map: its changes, as they are on disk and in the brokers' own history.

A change has its length and checksum before it. What is damaged is stepped over, and said: `damaged` stands in
its place, and what messages of other times may be lost with it is found from what is stored (`lost_since`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import google_crc32c
import msgspec

from postroad.tracking.moments import joined
from postroad.tracking.record import FilterMeta
from postroad.units import KIB, MILLISECOND_US, SECOND_US

DISK: Final = "disk"  # the kind of a `lost` that is no crash
SNAPSHOT: Final = "snapshot"
MAX_UNTIMELY: Final = 64  # spans of message times that one damage takes along
PART_BYTES: Final = 1 << 16  # of encoded changes, about a millisecond's work
MAX_CHANGE_BYTES: Final = 256 * KIB  # of one encoded change that others are told of
AROUND_BYTES: Final = 128  # of an encoded change without the name in it, at most, if it has no promise
FOREVER_US: Final = 1 << 62
_FRAME: Final = struct.Struct("<II")  # length and crc32c of a change
# `at_us` is when it happened. Detachments are no clock: the next process makes those of one that died.
BY_THE_CLOCK: Final = ("start", "stop", "attach", "damaged", "settled", "recorded", "seen")


class Promise(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a process goes by. Whoever judges what it left may have other settings."""

    persist_us: int = 0  # messages out of their time are said again to be handled after this
    lag_us: int = 0  # what was recorded so long before the last store is stored
    skew_us: int = 0
    jitter_us: int = 0
    filter_us: int = 0  # from the first key of a filter until it is stored for the last time, at most


# Of a process that did not say. How wide its map is to be read is taken from the settings now.
ASSUMED: Final = Promise(persist_us=60 * SECOND_US, lag_us=60 * SECOND_US, filter_us=7_200 * SECOND_US)


class Change(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One line of the map's log.

    what: attach or detach (who, at), late (who, message times from at to until, noted then), start and stop
    of the process (at; durable events since until may not be recorded, of processes before or, of a stop, of
    this one; 0 if all are. Of a start, noted is when the process before it stopped, 0 if that died, `kind`
    the setting `routing`, `promise` what else counts, `sequence` that of the last filter stored before it,
    and `who` SNAPSHOT if nothing starts and only the changes before it are one), lost (from at to until
    nothing is known; of DISK, noted then), begin (nothing older than at is kept), handled (message times from
    at to until, out of their time, noted then), damaged (changes from at on are missing), settled (what was
    recorded before at is stored), recorded (the durable events that the start says may not be are, since at),
    seen (the clock had shown at, in a snapshot).
    """

    what: str
    at_us: int
    kind: str = ""
    who: str = ""
    until_us: int = 0
    noted_us: int = 0
    promise: Promise | None = None
    sequence: int = 0


_CHANGES: Final = msgspec.msgpack.Decoder(Change)
_ENCODER: Final = msgspec.msgpack.Encoder()
# How an encoded change begins: an array of some fields, of which the first is one of these words.
_BODY: Final = re.compile(
    rb"[\x92-\x9f][\xa4-\xa8]"
    rb"(?:attach|detach|late|start|stop|lost|begin|handled|damaged|settled|recorded|seen)"
)


def encode_changes(changes: Iterable[Change]) -> bytes:
    return b"".join(encoded_parts(changes))


def encoded_parts(changes: Iterable[Change]) -> Iterator[bytes]:
    """Of about `PART_BYTES` each."""
    out = bytearray()
    for change in changes:
        body = _ENCODER.encode(change)
        out += _FRAME.pack(len(body), google_crc32c.value(body))
        out += body
        if len(out) >= PART_BYTES:
            yield bytes(out)
            out.clear()
    yield bytes(out)


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """These changes as `encoded_parts`, which are made each time they are gone through, in any thread."""

    changes: Iterable[Change]

    def __iter__(self) -> Iterator[bytes]:
        return encoded_parts(self.changes)


def decode_changes(data: bytes) -> tuple[list[Change], int]:
    """The changes of a log up to its end or the first that is torn; and how many bytes were whole."""
    changes: list[Change] = []
    position = 0
    while (placed := _change_at(data, position)) is not None:
        change, position = placed
        changes.append(change)
    return changes, position


def _change_at(data: bytes, position: int) -> tuple[Change, int] | None:
    """The change that begins there, and where it ends."""
    if position + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, position)
    body = data[position + _FRAME.size : position + _FRAME.size + length]
    if len(body) < length or int(google_crc32c.value(body)) != crc:
        return None
    try:
        return _CHANGES.decode(body), position + _FRAME.size + length
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def salvaged_changes(data: bytes, *, last_stored_us: int) -> tuple[list[Change], list[str]]:
    """All changes of a log that are whole, with `damaged` in place of others; and what was wrong, if so.

    A process that dies may tear the last change. It costs nothing that did not die with the process if no
    filter was stored after the change before: changes are synced first.
    """
    changes, position = decode_changes(data)
    problems: list[str] = []
    while position < len(data):
        for body in _BODY.finditer(data, position + _FRAME.size):
            begin = body.start() - _FRAME.size
            if _change_at(data, begin) is not None:
                problems.append(f"damaged at byte {position}; skipped {begin - position} bytes")
                break
        else:
            begin = len(data)
            problems.append(f"torn at byte {position} of {begin}; the rest is cut off")
        more, whole = decode_changes(data[begin:])
        before = (change.at_us for change in reversed(changes) if change.what in BY_THE_CLOCK)
        at_us = next(before, 0)
        if begin < len(data) or last_stored_us >= at_us:
            # It may have said that something before was lost.
            at_us = max(0, at_us - widest(changes).filter_us)
        changes.append(Change(what="damaged", at_us=at_us))
        changes += more
        position = begin + whole
    # A snapshot is not in order of time.
    ends = [at for at, change in enumerate(changes) if change.what == "start" and change.who == SNAPSHOT]
    for at, change in enumerate(changes[: max(ends, default=0)]):
        if change.what == "damaged":
            changes[at] = Change(what="damaged", at_us=0)
    return changes, problems


def widest(changes: Iterable[Change]) -> Promise:
    """What holds for every process of a log."""
    promise: Promise | None = None
    for change in changes:
        if change.what in ("start", "damaged"):
            promise = wider(promise, change.promise or ASSUMED)
    return promise or ASSUMED


def wider(first: Promise | None, second: Promise) -> Promise:
    if first is None:
        return second
    names = Promise.__struct_fields__
    return Promise(**{name: max(getattr(first, name), getattr(second, name)) for name in names})


def lost_since(changes: Iterable[Change], stored: Iterable[FilterMeta], since_us: int) -> list[Change]:
    """Of messages handled out of their time since then, something is lost: of which times they were."""
    spans = [
        (lo_ms * MILLISECOND_US, (hi_ms + 1) * MILLISECOND_US)
        for meta in stored
        if meta.stored_us >= since_us
        for lo_ms, hi_ms in meta.singles
    ]
    next_us: int | None = None  # the first change after it was made then
    for change in reversed(list(changes)):
        if change.what in BY_THE_CLOCK:
            next_us = change.at_us
        elif (change.what == "late" and (next_us is None or next_us >= since_us)) or (
            change.what == "handled" and change.noted_us >= since_us
        ):
            spans.append((change.at_us, change.until_us))
    return [
        Change(what="lost", kind=DISK, at_us=at_us, until_us=until_us)
        for at_us, until_us in joined(sorted(spans), MAX_UNTIMELY)
    ]


def tellable(changes: Iterable[Change], change_bytes: int) -> Iterator[Change]:
    """These changes, with `lost` in place of each whose name does not fit so many bytes: a reader that misses
    a set of receivers knows nothing of its time. The loss has no end where the changes have none."""
    since: dict[str, int] = {}  # such names that are attached
    for change in changes:
        if len(change.who.encode()) <= change_bytes - AROUND_BYTES:
            yield change
        elif change.what == "attach":
            since[change.who] = change.at_us
        elif change.what == "late":
            yield _untold(change.at_us, change.until_us, change.noted_us or change.until_us)
        elif change.who in since:
            yield _untold(since.pop(change.who), change.at_us, change.at_us)
    yield from (_untold(at_us, FOREVER_US, at_us) for at_us in since.values())


def _untold(start_us: int, end_us: int, noted_us: int) -> Change:
    # What is lost begins after its `at_us`, who is attached was so from it on.
    return Change(what="lost", kind=DISK, at_us=start_us - MILLISECOND_US, until_us=end_us, noted_us=noted_us)


def change_extents(data: bytes) -> list[int]:
    """Where each encoded change ends, so that they can be split."""
    ends: list[int] = []
    position = 0
    while position < len(data):
        position += _FRAME.size + int.from_bytes(data[position : position + 4], "little")
        ends.append(position)
    return ends
