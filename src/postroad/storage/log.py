"""The Log Volume: one append log per broker, many log streams in it (section 4.2 of the durable paper, D6).

Records of all streams go to one file at a time, so a commit is one write and one sync whatever it holds. A
file that has grown to `segment_bytes` is sealed and the next one begins. Within a commit records are ordered
by stream, which keeps a stream's records close together for whoever reads them later.

A stream is chopped from its beginning as its ticks are released (D7). A file in which nobody has anything
left is removed, but only after the chops are on disk: a chop row is what remembers how far a stream got
once its records are gone. Files that are nearly dead are copied to a new one in their place and removed,
small neighbours together, so that a stream with few records pins little. A crash in the middle leaves the
same records twice, which the next start sees by their ticks. Order of files is order of ticks throughout.

On a full disk the log is `short`: it lets its ballast go, which leaves room for metadata and so for chops,
and takes no appends until the ballast is held again. The file being written to is finished then, since it
could not be reclaimed otherwise.

Threads: `write`, `publish`, `run_short`, `look_for_room` and `chops_saved` belong to the committing thread,
`tidy` to one thread, `read` and `chop` to anyone. The lock guards the index only, never a disk operation.
"""

from __future__ import annotations

import logging
import struct
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from postroad.errors import BugError, StorageError
from postroad.seam.storage import MAX_TICK, Append, LogStream, NoRoom, Read, ReadDone, StreamKind
from postroad.storage.files import FULL, Files
from postroad.storage.metadata import Facts
from postroad.storage.recovery import (
    BEFORE_ALL,
    Damage,
    Found,
    FullFile,
    Mark,
    Notes,
    Recovery,
    decode_mark,
    encode_mark,
    find_segments,
    judge,
    lost_ends,
    missing_files,
    missing_mark,
    number_of,
)
from postroad.storage.segment import (
    EXTENT_SHIFT,
    HEADER,
    MARKER_MASK,
    MAX_RECORD_BYTES,
    OPENS_COMMIT,
    OVERHEAD,
    Buffer,
    Entry,
    Segment,
    join,
    pack,
    scan,
)
from postroad.units import GIB, MIB

SEGMENT_BYTES: Final = 64 * MIB
MAX_SEGMENT_BYTES: Final = GIB  # offsets are 32 bits wide
READ_BYTES: Final = MIB  # per disk read
DEAD_SHARE: Final = 0.9  # a file deader than this is rewritten
MERGE_FILES: Final = 8  # as many small neighbours become one file
MAX_DAMAGE_REPORTS: Final = 100  # places that are told while running; the next start tells all
DISK_FULL: Final = "the disk is full"
BALLAST_BYTES: Final = 8 * MIB  # SQLite's journal takes 4 MiB before it starts over

CHOPS: Final = "log.chops"  # kind u8 and id u64 of a stream -> tick i64, big-endian
LASTS: Final = "log.lasts"  # the same: where streams ended at some time
SUSPECTS: Final = "log.suspects"  # the same, of those found suspect
FILES: Final = "log.files"  # name of a full file -> its size u64, and stream and last tick of all in it
STATE: Final = "log.state"
SYNCED: Final = b"synced"  # -> name of a file and how much of it was synced at some time

_KEY: Final = struct.Struct(">BQ")
_TICK: Final = struct.Struct(">q")
_SIZE: Final = struct.Struct(">Q")

_log: Final = logging.getLogger(__name__)

Chops = dict[LogStream, int | None]  # stream -> tick; None: forget the stream
Row = tuple[bytes, bytes | None]


@dataclass(slots=True)
class Stream:
    last: int = BEFORE_ALL  # of its last published record
    chopped: int = BEFORE_ALL  # reads see nothing up to here
    saved: int = BEFORE_ALL  # the same, as far as it is on disk
    segments: list[Segment] = field(default_factory=list)  # that hold live records, in order


@dataclass(frozen=True, slots=True)
class Block:
    """A commit's records as written: not readable before it is synced and published."""

    segment: Segment
    offset: int
    size: int
    entries: list[tuple[LogStream, Entry]]


class LogVolume:
    """An open log. Opening it recovers it; `recovered` says what was found."""

    def __init__(
        self,
        files: Files,
        facts: Facts,
        *,
        draw_marker: Callable[[], int],  # 32 random bits
        segment_bytes: int = SEGMENT_BYTES,
        ballast_bytes: int = BALLAST_BYTES,
    ) -> None:
        if not OVERHEAD <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise BugError(f"segments of {segment_bytes} bytes")
        self.files = files
        self.segment_bytes = segment_bytes
        self.damage: deque[Damage] = deque()  # found while running, each place once; to be taken and told
        self.shortage = ""  # why nothing is appended
        self._ballast_bytes = ballast_bytes
        self._draw_marker = draw_marker
        self._lock = threading.Lock()
        self._unsaved: Chops = {}  # not on disk yet
        self._moved: dict[LogStream, None] = {}  # streams whose last tick is not noted yet
        self._unnoted = False  # there is a stream of which no tick at all is noted
        self._suspects: list[Row] = []  # what is not noted yet
        self._files_changed: dict[str, bytes | None] = {}  # rows of full files that are not noted yet
        self._files_taken: dict[str, bytes | None] = {}  # those of them that are being saved
        self._gone: Mark | None = None  # what a start did not find
        self._dead: list[Segment] = []
        self._ended: dict[LogStream, None] = {}  # streams that are over; forgotten with their last file
        self._streams: dict[LogStream, Stream] = {}
        self.recovered = self._recover(facts)
        if self._segments and self._gone is None:
            self._note(self._segments[-1])
        # Places that were told. A torn end was cut off: what is written there later may be damaged again.
        self._harmed = {(damage.file, damage.offset) for damage in self.recovered.damage if not damage.torn}
        shortage = self._hold()
        if shortage:
            self.run_short(shortage)

    # -- opening and closing

    def _recover(self, facts: Facts) -> Recovery:
        try:
            notes = self._notes(facts)
            contents = find_segments(self.files, notes)
        except OSError as error:
            raise StorageError(f"cannot read the log: {error}") from error
        lost = lost_ends(contents, notes)
        missing = missing_mark(contents, notes, bool(lost))
        if missing is not None:
            contents.damage.append(missing)
        if notes.synced is not None and any(
            damage.gone and damage.file == notes.synced[0] for damage in contents.damage
        ):
            self._gone = notes.synced
        contents.damage += missing_files(contents, notes)
        self._take_segments(contents, notes)
        for name, last in (contents.lasts | {damage.stream: damage.end for damage in lost}).items():
            self._stream(name).last = last
            if notes.lasts.get(name) != last:
                self._moved[name] = None
                self._unnoted |= name not in notes.lasts
        for name, tick in notes.chops.items():
            self._stream(name).chopped = tick
            self.chops_saved({name: tick})
        scanned = sum(segment.size for segment in contents.segments)
        streams = judge(contents, notes)
        if facts.damaged(SUSPECTS):  # it may have been any stream's
            streams = {name: replace(state, suspect=True) for name, state in streams.items()}
        suspect = {name: state.last for name, state in streams.items() if state.suspect}
        self._suspects = [(key, None) for key in facts.damaged(SUSPECTS)]
        self._suspects += [(_key(name), None) for name in notes.suspects.keys() - suspect.keys()]
        self._suspects += [(_key(name), _tick(last)) for name, last in suspect.items()]
        return Recovery(
            streams=streams,
            damage=tuple(contents.damage),
            lost=tuple(lost),
            scanned_bytes=scanned,
        )

    def _notes(self, facts: Facts) -> Notes:
        """What earlier processes noted of the log."""
        chops, lasts, suspects = (_ticks(facts.load(table, _row)) for table in (CHOPS, LASTS, SUSPECTS))
        state = facts.load(STATE, _parse_mark)
        saved = _parse_mark(SYNCED, state[SYNCED]) if SYNCED in state else None
        files = facts.load(FILES, _parse_file)
        written = self.files.noted()
        beside = decode_mark(written)
        if written and beside is None:
            _log.warning("the note beside the log is damaged: how far it was synced is known less well")
        marks = [mark for mark in (saved, beside) if mark is not None]
        return Notes(
            chops=chops,
            lasts=lasts,
            suspects=suspects,
            saved=saved,
            synced=max(marks, key=lambda mark: (number_of(mark[0]), mark[1]), default=None),
            full={name.decode(): _parse_file(name, row) for name, row in files.items()},
        )

    def _take_segments(self, contents: Found, notes: Notes) -> None:
        self._segments = contents.segments
        for segment in contents.segments:
            segment.sealed = True
            for name in segment.index:
                self._stream(name).segments.append(segment)
        if contents.segments and not contents.segments[-1].harmed:
            contents.segments[-1].sealed = False
        self._dead += [
            segment
            for segment in contents.segments
            if segment.sealed and not segment.live and not segment.harmed
        ]
        # Those that were reclaimed need no row; those that are missed keep theirs, to be missed again.
        missed = {damage.file for damage in contents.damage}
        self._files_changed |= dict.fromkeys(
            notes.full.keys() - missed - {segment.name for segment in contents.segments}
        )
        self._files_changed |= {
            segment.name: _file_row(segment)
            for segment in contents.segments
            if segment.sealed and segment.name not in notes.full
        }

    def marks(self) -> list[tuple[str, list[Row]]]:
        """Rows that say how far the log is synced. They stay true: nothing synced is ever cut off.

        For the committing thread, which calls `marks_saved` when they are on disk.
        """
        active = self._segments[-1] if self._segments else None
        mark = (active.name, active.size) if active else None
        if self._gone and (active is None or active.number <= number_of(self._gone[0])):
            mark = self._gone  # those who lost something may not have heard of it before the next start
        lasts: list[Row] = [
            (_key(name), _tick(self._streams[name].last))
            for name in self._moved
            if self._streams[name].chopped < MAX_TICK
        ]
        state: list[Row] = [(SYNCED, f"{mark[0]} {mark[1]}".encode() if mark else None)]
        with self._lock:
            self._files_taken = dict(self._files_changed)
        files: list[Row] = [(name.encode(), row) for name, row in self._files_taken.items()]
        return [(STATE, state), (LASTS, lasts), (SUSPECTS, self._suspects), (FILES, files)]

    @property
    def marks_due(self) -> bool:
        """There is something that must not wait for others who save something: a file that is full, what a
        start found, a new stream. One that nobody knows cannot be missed."""
        return bool(self._files_changed or self._suspects or self._unnoted)

    def marks_saved(self) -> None:
        self._moved.clear()
        self._unnoted = False
        self._suspects = []
        with self._lock:
            for name, row in self._files_taken.items():
                if self._files_changed[name] is row:
                    del self._files_changed[name]
            self._files_taken = {}

    def note_synced(self, block: Block) -> None:
        """Note beside the log how far it is synced, now that the block is published. It costs no sync.

        For the committing thread, after `marks_saved`.
        """
        self._note(block.segment)

    def _note(self, segment: Segment) -> None:
        if self._suspects:
            return  # the note that made them so must stay until they are saved
        with suppress(OSError):  # it stays behind: the next start is less sure of what it finds
            self.files.note(encode_mark((segment.name, segment.size)))

    def _stream(self, name: LogStream) -> Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = Stream()
        return stream

    # -- writing: write, sync (the caller's), publish

    def write(self, appends: Sequence[Append]) -> Block:
        """Write records behind the last ones. On any error none of them is in the log.

        BugError: an append does not follow the stream's last record. StorageError: the disk refused, the
        log is as it was and may be tried again; NoRoom: it is full. OSError: the log could not be put back
        as it was.
        """
        self._check_order(appends)
        self.look_for_room()
        segment = self._writable(sum(len(append.data) + OVERHEAD for append in appends))
        ordered = sorted(appends, key=lambda append: append.stream)
        parts, rows, size = _pack_all(
            segment,
            segment.size,
            ((append.stream, append.first, append.last, append.data) for append in ordered),
        )
        try:
            self.files.write(segment.name, segment.size, parts)
        except OSError as error:
            self.files.cut(segment.name, segment.size)
            raise self._refused(f"cannot write {segment.name}", error) from error
        return Block(segment, segment.size, size, rows)

    def publish(self, block: Block) -> None:
        """The block is synced: its records are readable."""
        segment = block.segment
        with self._lock:
            segment.size = block.offset + block.size
            for name, entry in block.entries:
                stream = self._stream(name)
                if not stream.segments or stream.segments[-1] is not segment:
                    stream.segments.append(segment)
                segment.add(name, entry)
                self._unnoted |= stream.last == BEFORE_ALL
                stream.last = entry.last
                self._moved[name] = None

    def withdraw(self, block: Block) -> None:
        """The block could not be synced. What the page cache holds of it must not look durable later."""
        self.files.cut(block.segment.name, block.offset)

    def _check_order(self, appends: Sequence[Append]) -> None:
        heads: dict[LogStream, int] = {}
        for append in appends:
            stream = self._streams.get(append.stream)
            head = heads.get(append.stream, stream.last if stream else BEFORE_ALL)
            if not head <= append.first < append.last or (stream and stream.chopped == MAX_TICK):
                raise BugError(
                    f"({append.first}, {append.last}] cannot follow {head} in stream {append.stream}"
                )
            if len(append.data) > MAX_RECORD_BYTES:
                raise BugError(
                    f"a record of {len(append.data)} bytes, at most {MAX_RECORD_BYTES} are possible"
                )
            heads[append.stream] = append.last

    def _writable(self, size: int) -> Segment:
        active = self._segments[-1] if self._segments else None
        if active and not active.sealed and (not active.size or active.size + size <= self.segment_bytes):
            return active
        used = max(active.number if active else 0, number_of(self._gone[0]) if self._gone else 0)
        segment = Segment(used + 1, self._draw_marker() & MARKER_MASK)
        try:
            self.files.create(segment.name)
        except OSError as error:
            raise self._refused(f"cannot create {segment.name}", error) from error
        with self._lock:
            if active and not active.sealed:
                active.sealed = True
                self._files_changed[active.name] = _file_row(active)
                if not active.live:
                    self._dead.append(active)
            self._segments.append(segment)
        return segment

    # -- a full disk

    @property
    def short(self) -> bool:
        return bool(self.shortage)

    def run_short(self, why: str = DISK_FULL) -> bool:
        """There is no room. True: there is some now for what frees more, the ballast's."""
        if self.short:
            return False
        self.shortage = why
        self.files.let_go()
        self._finish_active()
        return True

    def _finish_active(self) -> None:
        if self._segments and self._segments[-1].size and not self._segments[-1].sealed:
            with suppress(StorageError):  # the next chop tries again
                self._writable(self.segment_bytes + 1)

    def _hold(self) -> str:
        """As much as the ballast must be free beside it, or it would be held and let go to and fro. Why it
        cannot be held."""
        try:
            self.files.hold(self._ballast_bytes, self._ballast_bytes)
        except OSError as error:
            if error.errno in FULL:
                return DISK_FULL
            return f"the ballast of {self._ballast_bytes >> 20} MiB cannot be made: {error.strerror}"
        return ""

    def look_for_room(self) -> None:
        """NoRoom: there still is none."""
        if not self.short:
            return
        self.shortage = self._hold()
        if self.short:
            need = 2 * self._ballast_bytes >> 20
            free = f" before {need} MiB are free" if self.shortage == DISK_FULL else ""
            raise NoRoom(f"{self.shortage}: nothing is appended to the log{free}")

    def _refused(self, what: str, error: OSError) -> StorageError:
        if error.errno not in FULL:
            return StorageError(f"{what}: {error.strerror}")
        self.run_short()
        return NoRoom(f"{what}: {error.strerror}")

    # -- chopping

    def chop(self, stream: LogStream, tick: int) -> None:
        with self._lock:
            known = self._stream(stream)
            if tick > known.chopped:
                known.chopped = self._unsaved[stream] = tick

    def take_chops(self) -> Chops:
        """What is to be saved with the next commit of metadata; then `chops_saved` or `chops_failed`."""
        with self._lock:
            taken, self._unsaved = self._unsaved, {}
            return taken

    def chops_failed(self, chops: Chops) -> None:
        with self._lock:
            self._unsaved = chops | self._unsaved

    def chops_saved(self, chops: Mapping[LogStream, int | None]) -> None:
        """The chops are on disk: what they cover may be reclaimed."""
        with self._lock:
            for name, tick in chops.items():
                if tick is None:
                    del self._streams[name]
                    continue
                stream = self._streams[name]
                stream.saved = tick
                done = bisect_right(stream.segments, tick, key=lambda candidate: candidate.index[name].last)
                for segment in stream.segments[: done + 1]:
                    segment.chop(name, tick)
                    if segment.sealed and not segment.live:
                        self._dead.append(segment)
                del stream.segments[:done]
                if tick == MAX_TICK:
                    self._ended[name] = None
        if self.short:
            self._finish_active()

    @staticmethod
    def chop_rows(chops: Chops) -> list[tuple[str, list[Row]]]:
        rows: list[Row] = [
            (_key(stream), None if tick is None else _tick(tick)) for stream, tick in chops.items()
        ]
        return [(CHOPS, rows), (LASTS, [row for row in rows if row[1] is None])]

    # -- reading

    def read(self, wanted: Read) -> ReadDone:
        """Disk errors and records that were chopped or removed meanwhile are missing, not errors."""
        with self._lock:
            stream = self._streams.get(wanted.stream) or Stream()
            chopped, known = stream.chopped, max(stream.last, stream.chopped)
        records: list[tuple[int, int, bytes]] = []
        budget, position = wanted.limit_bytes, max(wanted.start, min(chopped, wanted.end))
        more = False
        while not more and (plan := self._plan(wanted, position)):
            segment, stretches, last = plan
            try:
                for record in self._records(segment, stretches, wanted.stream, position, wanted.end):
                    if records and budget <= 0:
                        more = True
                        break
                    records.append(record)
                    budget -= len(record[2])
                    position = record[1]
                else:
                    position = max(position, last)
            except FileNotFoundError:
                if segment in self._segments:  # else it was removed or rewritten meanwhile: look again
                    self._report(segment, 0, segment.size, gone=True)
                    position = max(position, last)
        end = records[-1][1] if more else min(wanted.end, max(known, position))
        missing = _holes(records, wanted.start, min(chopped, wanted.end), end)
        return ReadDone(tag=wanted.tag, records=tuple(records), missing=tuple(missing), more=more)

    def _plan(self, wanted: Read, start: int) -> tuple[Segment, list[tuple[int, int]], int] | None:
        """The first file with records in (start, end], where in it they lie, and the last tick they reach."""
        name = wanted.stream
        with self._lock:
            stream = self._streams.get(name)
            if stream is None or max(start, stream.chopped) >= wanted.end:
                return None
            start = max(start, stream.chopped)
            at = bisect_right(stream.segments, start, key=lambda segment: segment.index[name].last)
            if at == len(stream.segments):
                return None
            index = stream.segments[at].index[name]
            stretches = join(index.stretches(start, wanted.end), min(READ_BYTES, wanted.limit_bytes))
            return (stream.segments[at], stretches, index.last) if stretches else None

    def _records(
        self, segment: Segment, stretches: Iterable[tuple[int, int]], stream: LogStream, start: int, end: int
    ) -> Iterator[tuple[int, int, bytes]]:
        for offset, stop in stretches:
            try:
                data = self.files.read(segment.name, offset, stop - offset)
            except FileNotFoundError:
                raise
            except OSError:
                self._report(segment, offset, stop - offset)
                continue
            scanned = scan(Buffer(data).read, stop - offset, segment.marker)
            for begin, beyond in scanned.damage:
                self._report(segment, offset + begin, beyond - begin)
            wanted = scanned.of(stream) & (scanned.headers["last"] > start) & (scanned.headers["first"] < end)
            own = scanned.headers[wanted]
            columns = (scanned.offsets[wanted] + HEADER.size, own["length"], own["first"], own["last"])
            for place, length, first, last in zip(*(column.tolist() for column in columns), strict=True):
                yield first, last, data[place : place + length]

    def _report(self, segment: Segment, offset: int, length: int, *, gone: bool = False) -> None:
        segment.harmed = True
        damage = Damage(file=segment.name, offset=offset, length=length, torn=False, stream=None, gone=gone)
        reported = len(self._harmed) - len(self.recovered.damage)
        if (damage.file, offset) not in self._harmed and reported < MAX_DAMAGE_REPORTS:
            self._harmed.add((damage.file, offset))
            self.damage.append(damage)

    # -- reclaiming space

    def tidy(self) -> bool:
        """Remove dead files, rewrite nearly dead ones. False: there was nothing to do."""
        with self._lock:
            dead, self._dead = self._dead, []
            self._segments = [segment for segment in self._segments if segment not in dead]
            self._files_changed |= {segment.name: None for segment in dead}
        self._remove(dead)
        run = self._thin_run()
        rewritten = bool(run) and self._rewrite(run)
        return bool(dead) or rewritten or self._forget_ended()

    def _remove(self, segments: Sequence[Segment]) -> None:
        if segments:
            with suppress(OSError):  # what cannot be removed now is found dead by the next start
                self.files.remove([segment.name for segment in segments])

    def _forget_ended(self) -> bool:
        """A stream that is over keeps its chop row as long as any file still holds a record of it."""
        with self._lock:
            gone = [
                stream
                for stream in self._ended
                if not any(stream in segment.index for segment in self._segments)
            ]
            for name in gone:
                del self._ended[name]
                self._unsaved[name] = None
            return bool(gone)

    def _thin_run(self) -> list[Segment]:
        """Neighbouring files worth rewriting as one."""
        with self._lock:
            sealed = [segment for segment in self._segments if segment.sealed and segment.live]
        for segment in sealed:
            if not segment.harmed and segment.live_bytes < (1 - DEAD_SHARE) * segment.size:
                return [segment]
        for at in range(len(sealed) - MERGE_FILES + 1):
            run = sealed[at : at + MERGE_FILES]
            if sum(segment.size for segment in run) <= self.segment_bytes // 2 and not any(
                segment.harmed for segment in run
            ):
                return run
        return []

    def _rewrite(self, run: list[Segment]) -> bool:
        """Copy what is alive to a new file that takes the place of the run. False: it could not be done."""
        new = Segment(run[0].number, self._draw_marker() & MARKER_MASK)
        try:
            parts, rows, new.size = _pack_all(new, 0, self._live_records(run))
            if any(segment.harmed for segment in run):
                return False
            self.files.install(new.name, parts)
        except OSError:
            return False
        new.sealed = True
        for name, entry in rows:
            new.add(name, entry)
        with self._lock:
            for name in {name for segment in run for name in segment.index}:
                self._move(name, run, new)
            at = self._segments.index(run[0])
            self._segments = [segment for segment in self._segments if segment not in run]
            self._segments.insert(at, new)
            self._dead = [segment for segment in self._dead if segment not in run]
            self._files_changed |= {segment.name: None for segment in run} | {new.name: _file_row(new)}
            if not new.live:
                self._dead.append(new)
        self._remove(run)
        return True

    def _live_records(self, run: list[Segment]) -> Iterator[tuple[LogStream, int, int, bytes]]:
        for segment in run:
            with self._lock:
                wanted = [
                    (
                        name,
                        self._streams[name].saved,
                        list(segment.index[name].stretches(saved, MAX_TICK)),
                    )
                    for name in sorted(segment.live)
                    if (saved := self._streams[name].saved) < MAX_TICK
                ]
            for name, saved, stretches in wanted:
                for first, last, data in self._records(
                    segment, join(stretches, READ_BYTES), name, saved, MAX_TICK
                ):
                    yield name, first, last, data

    def _move(self, name: LogStream, run: list[Segment], new: Segment) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        stream.segments = [segment for segment in stream.segments if segment not in run]
        if name in new.live:
            new.chop(name, stream.saved)  # it may have been chopped further meanwhile
        if name in new.live:
            at = bisect_right(stream.segments, new.number, key=lambda segment: segment.number)
            stream.segments.insert(at, new)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "log_segments": len(self._segments),
                "log_bytes": sum(segment.size for segment in self._segments),
                "log_live_bytes": sum(segment.live_bytes for segment in self._segments),
                "log_streams": len(self._streams),
                "log_short": int(self.short),
            }


def _pack_all(
    segment: Segment, begin: int, records: Iterable[tuple[LogStream, int, int, bytes]]
) -> tuple[list[bytes], list[tuple[LogStream, Entry]], int]:
    """Bytes, index entries and whole size of (stream, first, last, data) records written at `begin`."""
    parts: list[bytes] = []
    rows: list[tuple[LogStream, Entry]] = []
    opened: LogStream | None = None  # the stream of the entry being filled, and what is in that
    start_first, reached, count = 0, 0, 0
    start = offset = begin
    marker = segment.marker | OPENS_COMMIT
    for stream, first, last, data in records:
        if stream != opened or offset >> EXTENT_SHIFT != start >> EXTENT_SHIFT:
            if opened is not None:
                rows.append((opened, Entry(start_first, reached, start, offset, offset - start, count)))
            opened, start_first, start, count = stream, first, offset, 0
        parts += pack(marker, stream, first, last, data)
        marker = segment.marker
        offset += OVERHEAD + len(data)
        reached = last
        count += 1
    if opened is not None:
        rows.append((opened, Entry(start_first, reached, start, offset, offset - start, count)))
    return parts, rows, offset - begin


def _holes(
    records: Iterable[tuple[int, int, bytes]], start: int, chopped: int, end: int
) -> Iterator[tuple[int, int]]:
    """What of (start, end] no record covers; chopped ticks are never covered."""
    position = start
    for first, last, _ in records:
        if max(first, chopped) > position:
            yield position, max(first, chopped)
        position = max(position, last)
    if end > position:
        yield position, end


def _key(stream: LogStream) -> bytes:
    return _KEY.pack(*stream)


def _tick(tick: int) -> bytes:
    return _TICK.pack(tick)


def _row(key: bytes, value: bytes) -> tuple[LogStream, int]:
    kind, id = _KEY.unpack(key)
    return LogStream(StreamKind(kind), id), _TICK.unpack(value)[0]


def _ticks(rows: Mapping[bytes, bytes]) -> dict[LogStream, int]:
    return dict(_row(key, value) for key, value in rows.items())


def _file_row(segment: Segment) -> bytes:
    lasts = (_key(name) + _tick(index.last) for name, index in sorted(segment.index.items()))
    return b"".join((_SIZE.pack(segment.size), *lasts))


def _parse_file(name: bytes, row: bytes) -> FullFile:
    number_of(name.decode())
    wide = _KEY.size + _TICK.size
    lasts = [
        (row[at : at + _KEY.size], row[at + _KEY.size : at + wide])
        for at in range(_SIZE.size, len(row), wide)
    ]
    return FullFile(_SIZE.unpack_from(row)[0], dict(_row(*last) for last in lasts))


def _parse_mark(_key: bytes, mark: bytes) -> Mark:
    name, size = mark.decode().split(" ")
    number_of(name)
    return name, int(size)
