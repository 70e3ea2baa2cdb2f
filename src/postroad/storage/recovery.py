"""What a start finds on disk: every segment scanned and proved, a torn tail told from damage (D12).

A crash can only tear the last commit: every commit is synced before the next one is written, and a segment
before the next one is created. So broken bytes in the last file with no further commit behind them are a
torn tail (never acknowledged, cut off); all others are damage to synced data (reported with their place,
stepped over, missing in reads).

What is not there any more cannot be scanned. So it is noted how far the log was synced: the mark, the newest
file and its size. A few bytes beside the log say so after every commit; they are not synced, so a killed
process leaves them as they were and a machine that stops may leave older ones. Metadata says so with each of
its commits and at every orderly end, and with it the last tick of every stream, the size of every file that
is full, and the last tick of every stream in that. A bit that flipped before the mark is damage and not taken
for a tear; a file that is shorter than noted, or gone although it holds what no chop released, is damage; and
ticks of a stream up to its noted one that neither a record nor a chop accounts for are lost.

Damage before the mark in metadata can have hit no later tick than the noted one. Behind that it may have hit
whatever stream has no record behind it: that stream is suspect, which is noted with the next mark and holds
as long as nothing is appended to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from google_crc32c import value as crc32c

from postroad.errors import StorageError
from postroad.seam.storage import MAX_TICK, LogStream
from postroad.storage.files import Files
from postroad.storage.segment import (
    HEADER,
    OVERHEAD,
    Scan,
    Segment,
    entries,
    parse_header,
    parse_name,
    scan,
)

Place = tuple[int, int]  # segment number, offset
Mark = tuple[str, int]  # name of a file, and how much of it was synced
BEFORE_ALL: Final = -(1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are no record. `torn`: the unfinished end of the last write, now cut off. `gone`: bytes that
    were synced and that the file, or the whole file, no longer has."""

    file: str
    offset: int
    length: int
    torn: bool
    stream: LogStream | None  # whose record it was, where that can still be told
    gone: bool = False

    def __str__(self) -> str:
        what = (
            "the torn end of an unfinished write was cut off"
            if self.torn
            else "records that were synced are gone"
            if self.gone
            else "damaged records are lost"
        )
        whose = "" if self.stream is None else f", stream {self.stream}"
        return f"{self.file}: {what}: {self.length} bytes at offset {self.offset}{whose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Ticks (start, end] of a stream had been synced, and no record of them is found."""

    stream: LogStream
    start: int
    end: int

    def __str__(self) -> str:
        since = "" if self.start == BEFORE_ALL else f"from {self.start + 1} "
        return f"stream {self.stream}: synced ticks {since}to {self.end} are gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """What is left of a stream after a restart.

    `suspect`: damage lies behind its last readable record, so acknowledged ticks above `last` may be among
    what was lost. Whoever appends next should leave a hole behind `last` instead of covering it.
    """

    last: int  # of its last record; its chop tick, or that of its last record as noted, where that is greater
    chopped: int | None
    records: int
    suspect: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    streams: Mapping[LogStream, StreamState]
    damage: tuple[Damage, ...]
    lost: tuple[Lost, ...]  # ends of streams; what is missing before a record shows in reads
    scanned_bytes: int


@dataclass(frozen=True, slots=True)
class FullFile:
    """What is noted of a file that nothing more is written to."""

    size: int
    lasts: Mapping[LogStream, int]  # stream -> the last tick that the file has of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What earlier processes noted of the log."""

    chops: Mapping[LogStream, int]
    lasts: Mapping[LogStream, int]  # of streams, when `saved` was
    suspects: Mapping[LogStream, int]  # the last ticks of streams that an earlier start found suspect
    saved: Mark | None  # in metadata
    synced: Mark | None  # that, or the note beside the log, whichever is further
    full: Mapping[str, FullFile]  # by name


@dataclass(slots=True)
class Found:
    """The segments with their indexes, and what is needed to judge the streams."""

    segments: list[Segment]
    damage: list[Damage]
    places: dict[LogStream, Place]  # behind each stream's last record
    lasts: dict[LogStream, int]
    records: dict[LogStream, int]


def find_segments(files: Files, notes: Notes) -> Found:
    """Scan every segment file in order."""
    synced = {name: file.size for name, file in notes.full.items()}
    if notes.synced is not None:
        synced[notes.synced[0]] = notes.synced[1]
    contents = Found([], [], {}, {}, {})
    names = [(parsed, name, size) for name, size in files.list() if (parsed := parse_name(name))]
    last_name = max(names)[1] if names else ""
    for (number, marker), name, size in sorted(names):
        segment = Segment(number, marker)
        records = scan(lambda at, count, name=name: files.read(name, at, count), size, marker)  # type: ignore[misc]
        newest = name == last_name
        floor = synced.get(name, 0)
        cut = _torn_at(records, size, floor) if newest else size
        if cut < size:
            records = _without_tail(records, cut)
            contents.damage.append(Damage(file=name, offset=cut, length=size - cut, torn=True, stream=None))
            files.cut(name, cut)
        if newest:
            files.sync(name)  # a killed process leaves bytes that only the page cache has
        segment.size = cut
        segment.harmed = bool(records.damage)
        _take(contents, segment, records, files)
        if cut < floor:
            segment.harmed = True
            contents.damage.append(_gone(name, cut, floor))
    return contents


def missing_mark(contents: Found, notes: Notes, lost: bool) -> Damage | None:
    """The marked file is not there, and not because it was reclaimed.

    It was the one being written to, and such a file is not reclaimed before there is a newer one. Where there
    is, what streams lost must tell.
    """
    synced = notes.synced
    if synced is None or any(segment.name == synced[0] for segment in contents.segments):
        return None
    newer = contents.segments and contents.segments[-1].number > number_of(synced[0])
    return _gone(synced[0], 0, synced[1]) if lost or not newer else None


def missing_files(contents: Found, notes: Notes) -> list[Damage]:
    """Files that were full and are not there, with what was neither chopped nor copied to another."""
    known = {segment.name for segment in contents.segments} | {damage.file for damage in contents.damage}
    return [
        _gone(name, 0, file.size)
        for name, file in sorted(notes.full.items())
        if name not in known
        and any(
            notes.chops.get(stream, BEFORE_ALL) < last and not _has(contents, stream, last)
            for stream, last in file.lasts.items()
        )
    ]


def _has(contents: Found, stream: LogStream, tick: int) -> bool:
    indexes = (segment.index[stream] for segment in contents.segments if stream in segment.index)
    return any(True for index in indexes for _ in index.stretches(tick - 1, tick))


def encode_mark(mark: Mark) -> bytes:
    """Always of the same length: it is written over the last one, on a full disk too."""
    text = f"{mark[0]} {mark[1]:020d} ".encode()
    return text + f"{crc32c(text):08x}\n".encode()


def decode_mark(data: bytes) -> Mark | None:
    """None if it is not what was written."""
    text, end = data[:-9], data[-9:]
    if not text or end != f"{crc32c(text):08x}\n".encode():
        return None
    name, size = text.decode().split()
    return name, int(size)


def number_of(name: str) -> int:
    parsed = parse_name(name)
    if parsed is None:
        raise StorageError(f"{name} is not the name of a file of the log")
    return parsed[0]


def _gone(name: str, begin: int, end: int) -> Damage:
    return Damage(file=name, offset=begin, length=end - begin, torn=False, stream=None, gone=True)


def _torn_at(records: Scan, size: int, floor: int) -> int:
    """Where the torn tail begins: at the first broken bytes behind the last record that opens a commit."""
    opening = np.flatnonzero(records.headers["opens"])
    begin = int(records.offsets[opening[-1]]) if len(opening) else -1
    return next((start for start, _ in records.damage if start > begin and start >= floor), size)


def _without_tail(records: Scan, cut: int) -> Scan:
    keep = records.offsets < cut
    damage = [(start, end) for start, end in records.damage if start < cut]
    return Scan(records.offsets[keep], records.headers[keep], damage)


def _take(contents: Found, segment: Segment, records: Scan, files: Files) -> None:
    before = dict(contents.lasts)
    for stream, entry in entries(records, lambda stream: before.get(stream, BEFORE_ALL)):
        segment.add(stream, entry)
        contents.lasts[stream] = entry.last
        contents.records[stream] = contents.records.get(stream, 0) + entry.records
        contents.places[stream] = (segment.number, entry.end)
    for start, end in records.damage:
        header = files.read(segment.name, start, HEADER.size)
        whose = _whose(header, end - start, records, start, before)
        contents.damage.append(
            Damage(file=segment.name, offset=start, length=end - start, torn=False, stream=whose)
        )
    contents.segments.append(segment)


def _whose(
    header: bytes, length: int, records: Scan, start: int, before: Mapping[LogStream, int]
) -> LogStream | None:
    """The stream of one damaged record, believed only if it continues that stream to the tick."""
    if len(header) < HEADER.size:
        return None
    stream, data_length, first, _ = parse_header(header)
    if stream is None or data_length + OVERHEAD != length:
        return None
    earlier = records.of(stream) & (records.offsets < start)
    previous = records.headers["last"][earlier]
    last = int(previous[-1]) if len(previous) else before.get(stream)
    return stream if last == first else None


def lost_ends(contents: Found, notes: Notes) -> list[Lost]:
    """What streams lack up to their last ticks as noted."""
    lost = []
    for stream, end in sorted(notes.lasts.items()):
        start = max(contents.lasts.get(stream, BEFORE_ALL), notes.chops.get(stream, BEFORE_ALL))
        if start < end:
            lost.append(Lost(stream=stream, start=start, end=end))
    return lost


def judge(contents: Found, notes: Notes) -> Mapping[LogStream, StreamState]:
    """The state of every stream that has records, was chopped or is noted, and is not over."""
    saved = notes.saved
    marked = saved if saved and any(segment.name == saved[0] for segment in contents.segments) else None
    hits = [
        ((number_of(damage.file), damage.offset), damage.stream)
        for damage in contents.damage
        if not damage.torn and not (marked and _before(damage, marked))
    ]
    states = {}
    for stream in sorted(contents.lasts.keys() | notes.chops.keys() | notes.lasts.keys()):
        place = contents.places.get(stream, (-1, -1))
        chopped = notes.chops.get(stream)
        if chopped == MAX_TICK:
            continue
        ends = (contents.lasts.get(stream), chopped, notes.lasts.get(stream))
        last = max(value for value in ends if value is not None)
        states[stream] = StreamState(
            last=last,
            chopped=chopped,
            records=contents.records.get(stream, 0),
            suspect=notes.suspects.get(stream) == last
            or any(at >= place and whose in (None, stream) for at, whose in hits),
        )
    return states


def _before(damage: Damage, mark: Mark) -> bool:
    """Whatever it hit was synced when the mark was noted."""
    if damage.file == mark[0]:
        return not damage.gone and damage.offset + damage.length <= mark[1]
    return number_of(damage.file) < number_of(mark[0])
