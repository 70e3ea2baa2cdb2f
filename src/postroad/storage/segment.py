"""One file of the log: how a record looks, how a file is scanned, where in it a stream's records lie.

A record is 32 bytes of header (marker u32; kind of the stream 4 bits and length of the data 28 bits; id of
the stream u64, first i64, last i64; little-endian), the data as it came, and the crc32c of both as a trailer.
Records of the version before have no kind there (0): they are events, or filtering records where the id has
the bit of a plain pubend, which is never logged itself.

The crc begins with the residue of crc32c (what a crc over a message and its own crc always is) instead of
zero, so every record ends in the state in which the next one begins: one call over any run of whole records
proves all of them, at memory speed, and each record can still be proved alone.

The marker is drawn per file and kept in the file's name. Behind a damaged record the scan goes on at the
next place where a record with this marker proves itself; a payload cannot forge one without knowing the
marker. Its lowest bit is set on the first record of a commit: a commit is synced before the next one is
written, so damage with such a record behind it hit synced data, while what follows the last one may just
be a write that a crash tore.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from google_crc32c import extend
from numpy.typing import NDArray

from postroad.ids import VOLATILE
from postroad.seam.storage import LogStream, StreamKind
from postroad.units import KIB, MIB

RESIDUE: Final = 0x48674BC7
HEADER: Final = Struct("<IIQqq")
KIND_SHIFT: Final = 28
LENGTH_MASK: Final = (1 << KIND_SHIFT) - 1
PREFIX: Final = Struct("<II")
LENGTH: Final = Struct("<I")
LENGTH_AT: Final = 4
TRAILER_BYTES: Final = 4
OVERHEAD: Final = HEADER.size + TRAILER_BYTES
OPENS_COMMIT: Final = 1
MARKER_MASK: Final = 0xFFFFFFFF ^ OPENS_COMMIT
MAX_RECORD_BYTES: Final = 16 * MIB
SCAN_BYTES: Final = 4 * MIB
CAREFUL_BYTES: Final = 64 * KIB  # how much is read behind damage, where more damage is likely
EXTENT_SHIFT: Final = 17  # a stream's index has at most one entry per 128 KiB of file
NEAR_BYTES: Final = 64 * KIB  # reading on over others' records is cheaper than a read of its own

# A header as it is written, and the same bytes once they are proved and taken apart.
_WRITTEN: Final = np.dtype(
    [("marker", "<u4"), ("sizes", "<u4"), ("id", "<u8"), ("first", "<i8"), ("last", "<i8")]
)
_FIELDS: Final = np.dtype(
    {
        "names": ["kind", "opens", "length", "id", "first", "last"],
        "formats": ["u1", "?", "<u4", "<u8", "<i8", "<i8"],
        "offsets": [0, 1, 4, 8, 16, 24],
        "itemsize": _WRITTEN.itemsize,
    }
)
_LAST_KIND: Final = max(StreamKind)
Headers = NDArray[np.void]
Offsets = NDArray[np.int64]
ReadAt = Callable[[int, int], bytes]


def pack(marker: int, stream: LogStream, first: int, last: int, data: bytes) -> tuple[bytes, bytes, bytes]:
    kind, id = stream
    header = HEADER.pack(marker, kind << KIND_SHIFT | len(data), id, first, last)
    return header, data, extend(extend(RESIDUE, header), data).to_bytes(TRAILER_BYTES, "little")


def segment_name(number: int, marker: int) -> str:
    return f"{number:012d}-{marker:08x}.log"


def parse_name(name: str) -> tuple[int, int] | None:
    """Number and marker of a segment file, None for any other file."""
    number, marker = name[:12], name[13:21]
    if number.isdecimal() and _is_hex(marker) and name == segment_name(int(number), int(marker, 16)):
        return int(number), int(marker, 16)
    return None


def _is_hex(text: str) -> bool:
    return len(text) == 8 and all(character in "0123456789abcdef" for character in text)


def parse_header(header: bytes) -> tuple[LogStream | None, int, int, int]:
    """Stream (None: of a kind that there is not), length of the data, first and last tick."""
    _, sizes, id, first, last = HEADER.unpack(header)
    kind = sizes >> KIND_SHIFT
    length = sizes & LENGTH_MASK
    if not kind:
        return unversioned(id), length, first, last
    return LogStream(StreamKind(kind), id) if kind <= _LAST_KIND else None, length, first, last


def unversioned(id: int) -> LogStream:
    """The stream to which the version before gave this number."""
    return LogStream(StreamKind.FILTERING if id & VOLATILE else StreamKind.EVENTS, id & ~VOLATILE)


# -- scanning


@dataclass(slots=True)
class Scan:
    """The records of a stretch of file: where they begin, their headers; and what is not a record."""

    offsets: Offsets
    headers: Headers
    damage: list[tuple[int, int]]

    def of(self, stream: LogStream) -> NDArray[np.bool_]:
        """Which of the records are the stream's."""
        return np.asarray((self.headers["id"] == stream.id) & (self.headers["kind"] == stream.kind))

    def ends(self) -> Offsets:
        ends: Offsets = self.offsets + OVERHEAD + self.headers["length"]
        return ends


class Buffer:
    """Bytes already read, as something to scan."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, offset: int, size: int) -> bytes:
        if offset == 0 and size >= len(self.data):
            return self.data
        return self.data[offset : offset + size]


def scan(read: ReadAt, size: int, marker: int) -> Scan:
    """Find and prove every record in the first `size` bytes."""
    offsets: list[Offsets] = []
    headers: list[Headers] = []
    damage: list[tuple[int, int]] = []
    position, step = 0, SCAN_BYTES
    while position < size:
        buffer = read(position, min(step, size - position))
        step = min(step * 2, SCAN_BYTES)
        starts, taken, stop = _walk(buffer, marker)
        if stop and extend(RESIDUE, buffer if stop == len(buffer) else buffer[:stop]) != RESIDUE:
            starts, taken, stop = _prove_each(buffer, starts, taken)
        if not stop:
            stop = _proved_length(read, position, size, marker)
            if stop:  # larger than what was read
                starts = np.zeros(1, dtype=np.int64)
                taken = _taken_apart(_written(buffer, starts))
        if stop:
            offsets.append(starts + position)
            headers.append(taken)
            position += stop
        else:
            following = _next_record(read, position + 1, size, marker)
            damage.append((position, following))
            position, step = following, CAREFUL_BYTES
    if not offsets:
        return Scan(np.empty(0, dtype=np.int64), np.empty(0, dtype=_FIELDS), damage)
    return Scan(np.concatenate(offsets), np.concatenate(headers), damage)


def _walk(buffer: bytes, marker: int) -> tuple[Offsets, Headers, int]:
    """Whole records one behind the other, by length and marker; nothing is proved yet."""
    starts: list[int] = []
    position, last, unpack, add = 0, len(buffer) - OVERHEAD, LENGTH.unpack_from, starts.append
    while position <= last:  # the one loop over records in Python: nothing in it that can be done after it
        add(position)
        position += (unpack(buffer, position + LENGTH_AT)[0] & LENGTH_MASK) + OVERHEAD
    if position > len(buffer):
        position = starts.pop()
    places = np.array(starts, dtype=np.int64)
    written = _written(buffer, places)
    wrong = np.flatnonzero(
        ((written["marker"] & MARKER_MASK) != marker) | (written["sizes"] >> KIND_SHIFT > _LAST_KIND)
    )
    if len(wrong):
        return places[: wrong[0]], _taken_apart(written[: wrong[0]]), starts[wrong[0]]
    return places, _taken_apart(written), position


def _prove_each(buffer: bytes, places: Offsets, headers: Headers) -> tuple[Offsets, Headers, int]:
    """The records before the first that does not prove itself."""
    stop = 0
    for index, length in enumerate(headers["length"].tolist()):
        following = stop + OVERHEAD + length
        if extend(RESIDUE, buffer[stop:following]) != RESIDUE:
            return places[:index], headers[:index], stop
        stop = following
    return places, headers, stop


def _proved_length(read: ReadAt, position: int, size: int, marker: int) -> int:
    """The whole size of the record at this position, 0 if there is none."""
    prefix = read(position, PREFIX.size)
    if position + OVERHEAD > size or len(prefix) < PREFIX.size:
        return 0
    mark, sizes = PREFIX.unpack(prefix)
    length = sizes & LENGTH_MASK
    whole: int = OVERHEAD + length
    if mark & MARKER_MASK != marker or sizes >> KIND_SHIFT > _LAST_KIND or length > MAX_RECORD_BYTES:
        return 0
    if position + whole > size:
        return 0
    record = read(position, whole)
    return whole if len(record) == whole and extend(RESIDUE, record) == RESIDUE else 0


def _next_record(read: ReadAt, position: int, size: int, marker: int) -> int:
    """Where the next record lies that proves itself; `size` if none does."""
    constant = marker.to_bytes(4, "little")[1:]  # the first byte holds the commit bit
    while position < size:
        buffer = read(position, min(SCAN_BYTES, size - position))
        at = buffer.find(constant, 1)
        while at != -1:
            if _proved_length(read, position + at - 1, size, marker):
                return position + at - 1
            at = buffer.find(constant, at + 1)
        if len(buffer) <= PREFIX.size:
            break
        position += len(buffer) - len(constant)  # a marker may lie across the edge
    return size


def _written(buffer: bytes, places: Offsets) -> Headers:
    if not len(places):
        return np.empty(0, dtype=_WRITTEN)
    everywhere: Headers = np.ndarray(
        shape=len(buffer) - HEADER.size + 1, dtype=_WRITTEN, buffer=buffer, strides=(1,)
    )
    return everywhere[places]


def _taken_apart(written: Headers) -> Headers:
    """In place: the first eight bytes of each header get another meaning."""
    opens, sizes, ids = written["marker"] & OPENS_COMMIT, written["sizes"].copy(), written["id"]
    kinds = sizes >> KIND_SHIFT
    before = kinds == 0
    if before.any():
        filtering = before & (ids & VOLATILE != 0)
        kinds[before] = StreamKind.EVENTS
        kinds[filtering] = StreamKind.FILTERING
        ids[filtering] ^= VOLATILE
    headers = written.view(_FIELDS)
    headers["kind"], headers["opens"], headers["length"] = kinds, opens, sizes & LENGTH_MASK
    return headers


# -- the index of one file


class Entry(NamedTuple):
    """Some consecutive records of one stream in one stretch of file; others' may lie between them."""

    first: int
    last: int
    offset: int
    end: int
    own_bytes: int
    records: int


class StreamIndex:
    """Where in one file the records of one stream lie, sparsely, in tick order."""

    __slots__ = ("ends", "firsts", "lasts", "offsets", "own", "records")

    def __init__(self) -> None:
        self.firsts = array("q")
        self.lasts = array("q")
        self.offsets = array("I")
        self.ends = array("I")
        self.own = array("I")
        self.records = 0

    def add(self, entry: Entry) -> None:
        self.records += entry.records
        if self.offsets and self.offsets[-1] >> EXTENT_SHIFT == entry.offset >> EXTENT_SHIFT:
            self.lasts[-1] = entry.last
            self.ends[-1] = entry.end
            self.own[-1] += entry.own_bytes
            return
        self.firsts.append(entry.first)
        self.lasts.append(entry.last)
        self.offsets.append(entry.offset)
        self.ends.append(entry.end)
        self.own.append(entry.own_bytes)

    @property
    def last(self) -> int:
        return self.lasts[-1]

    def live_bytes(self, chopped: int) -> int:
        return sum(self.own[bisect_right(self.lasts, chopped) :])

    def stretches(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(offset, end) of the stretches that hold records overlapping (start, end]."""
        for index in range(bisect_right(self.lasts, start), len(self.lasts)):
            if self.firsts[index] >= end:
                return
            yield self.offsets[index], self.ends[index]


class Segment:
    """One file: its name, its size and who has records in it."""

    __slots__ = ("harmed", "index", "live", "live_bytes", "marker", "name", "number", "sealed", "size")

    def __init__(self, number: int, marker: int) -> None:
        self.number = number
        self.marker = marker
        self.name = segment_name(number, marker)
        self.size = 0
        self.sealed = False
        self.harmed = False  # holds damage, which is evidence: not rewritten
        self.index: dict[LogStream, StreamIndex] = {}
        self.live: dict[
            LogStream, int
        ] = {}  # stream -> bytes not chopped, about; none left: the file is dead
        self.live_bytes = 0

    def add(self, stream: LogStream, entry: Entry) -> None:
        index = self.index.get(stream)
        if index is None:
            index = self.index[stream] = StreamIndex()
        index.add(entry)
        self.live[stream] = self.live.get(stream, 0) + entry.own_bytes
        self.live_bytes += entry.own_bytes

    def chop(self, stream: LogStream, tick: int) -> None:
        """The stream's records up to this tick are dead."""
        self.live_bytes -= self.live.pop(stream)
        index = self.index[stream]
        if index.last > tick:
            self.live[stream] = index.live_bytes(tick)
            self.live_bytes += self.live[stream]


def entries(scanned: Scan, after: Callable[[LogStream], int]) -> Iterator[tuple[LogStream, Entry]]:
    """Index entries of what a scan found, stream by stream, without the records up to tick after(stream).

    Those are copies: a merge of files that a crash cut short leaves the same records in two of them.
    """
    ends = scanned.ends()
    kinds, ids = scanned.headers["kind"], scanned.headers["id"]
    order = np.lexsort((ids, kinds))
    edges = np.flatnonzero(np.diff(kinds[order]) | np.diff(ids[order])) + 1
    for part in np.split(order, edges) if len(order) else ():
        stream = LogStream(StreamKind(kinds[part[0]]), int(ids[part[0]]))
        part = part[_rising(scanned.headers["last"][part], after(stream))]
        blocks = scanned.offsets[part] >> EXTENT_SHIFT
        for run in np.split(part, np.flatnonzero(np.diff(blocks)) + 1) if len(part) else ():
            head, tail = run[0], run[-1]
            own = int((ends[run] - scanned.offsets[run]).sum())
            yield (
                stream,
                Entry(
                    first=int(scanned.headers["first"][head]),
                    last=int(scanned.headers["last"][tail]),
                    offset=int(scanned.offsets[head]),
                    end=int(ends[tail]),
                    own_bytes=own,
                    records=len(run),
                ),
            )


def _rising(lasts: NDArray[np.int64], after: int) -> NDArray[np.bool_]:
    """Which of the ticks are greater than all before them."""
    before = np.maximum.accumulate(np.concatenate(([after], lasts[:-1])))
    return np.asarray(lasts > before)


def join(stretches: Iterable[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Near stretches as one read, as long as it stays within `limit`."""
    joined: list[tuple[int, int]] = []
    for offset, end in stretches:
        if joined and offset <= joined[-1][1] + NEAR_BYTES and end - joined[-1][0] <= limit:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((offset, end))
    return joined
