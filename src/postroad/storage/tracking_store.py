"""Tracking records on disk: the driver's side of `effects` (spec T3).

DATA/tracking holds three kinds of files. `full-N-A.flt` are appended with filters that nothing will replace.
`part-N-A-B.flt` hold states of filters that are still filling, all those of one call in one file, so a file
dies when each of its filters has been stored again; a file mostly dead is rewritten. A and B are when the
first and the last of its records were stored, in us: of one that is damaged nothing else is known. Within a
file records are in order of time. `attachments.log` is the attachment map's. Every record checks itself
(`record`). A record is durable before what it replaces goes: files are synced, then older ones removed. After
kill -9 what was handed to `apply` is there; after a power cut, too; whatever was torn is cut off or skipped,
and said.

That retention drops something is durable before it does. On a full disk that takes a few bytes first, as does
what is `pressing`, so `spare` holds room for them, and nothing else is written until it is held again.

All methods block on the disk: call them from a thread, one call at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from postroad.errors import StorageError
from postroad.seam.tracking import (
    DropFilters,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.tracking.attachment_log import (
    DISK,
    Change,
    Promise,
    encode_changes,
    lost_since,
    salvaged_changes,
    widest,
)
from postroad.tracking.record import MAGIC, PREFIX_BYTES, FilterMeta, decode_meta, record_extent
from postroad.units import KIB, MIB

FOLDER: Final = "tracking"
MAX_FULL_BYTES: Final = 16 * MIB  # then the next file begins
# For all that is pressing, less than half of it, and hundreds of drops; the first of them free far more.
SPARE_BYTES: Final = 64 * KIB
_ATTACHMENTS: Final = "attachments.log"
_SPARE: Final = "spare"
_FULL: Final = "full"
# A copy that somebody made, or something else, is none of these.
_OURS: Final = re.compile(r"(full|part)-[0-9]+(-[0-9]+)*\.(flt|tmp)|attachments\.(log|tmp)|spare")
MOST_NAMED: Final = 8  # files in a line of the log


@dataclass(slots=True)
class _File:
    path: Path
    since_us: int  # its first record was stored then or later
    until_us: int  # its last one then or before, unless it is appended to
    size: int = 0
    live: int = 0  # bytes of records that were neither replaced nor dropped
    sequences: set[int] = field(default_factory=set)  # of those


@dataclass(slots=True)
class Loaded:
    """What was found at the start."""

    filters: list[FilterMeta]
    sizes: dict[int, int]  # bytes of their records, by sequence
    changes: list[Change]
    problems: list[str]  # one line each, for the log


class TrackingStore:
    def __init__(self, data: Path, *, sync: bool = True) -> None:
        self._folder = data / FOLDER
        self._sync = sync
        self._files: dict[str, _File] = {}
        self._where: dict[int, tuple[str, int, int]] = {}  # sequence -> file, offset, length
        self._next = 1  # number of the next file
        self._full: str | None = None  # the one that is appended to
        self._log_bytes = 0  # of the attachment map's log, behind which is appended
        self._unsaid = b""  # changes that the next ones follow, there was no room for them at the start
        self._spared = False  # whether the spare is held

    # ---- start

    def load(self) -> Loaded:
        """Read the index of everything stored, and remove what a crash left half done.

        Of damaged filters it is noted which times they may have had. A disk that does not take that now is no
        reason not to start: what is wrong stays where it is until it does.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            loaded = Loaded(filters=[], sizes={}, changes=[], problems=[])
            spare = self._folder / _SPARE
            self._spared = spare.exists() and spare.stat().st_size == SPARE_BYTES
            metas: dict[int, FilterMeta] = {}
            holes: list[tuple[int, int]] = []
            strangers: list[str] = []
            for path in sorted(self._folder.iterdir()):
                if not path.is_file() or not _OURS.fullmatch(path.name):
                    strangers.append(path.name)
                elif path.suffix == ".tmp":
                    path.unlink()
                elif path.suffix == ".flt":
                    holes += self._load_file(path, metas, loaded.problems)
            if strangers:
                more = f" and {len(strangers) - MOST_NAMED} more" if len(strangers) > MOST_NAMED else ""
                named = ", ".join(map(repr, strangers[:MOST_NAMED])) + more
                loaded.problems.append(f"{self._folder}: not Postroad's, and left alone: {named}")
            loaded.changes = self._load_changes(metas.values(), loaded.problems)
            self._note_lost(holes, metas.values(), loaded)
            for meta in list(metas.values()):
                if meta.replaces in metas:
                    # It was about to go when the process ended.
                    del metas[meta.replaces]
                    self._forget(meta.replaces)
            if not self._unsaid:
                self._clean()
            loaded.filters = [metas[sequence] for sequence in sorted(metas)]
            loaded.sizes = {sequence: self._where[sequence][2] for sequence in metas}
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be read: {error}") from error
        return loaded

    def _load_file(
        self, path: Path, metas: dict[int, FilterMeta], problems: list[str]
    ) -> list[tuple[int, int]]:
        """Returns from when to when something was stored that cannot be read."""
        about = path.stat()
        entry = self._known(path, about.st_mtime_ns // 1000)
        entry.size = about.st_size
        before_us = entry.since_us
        damaged = False  # since `before_us`
        holes: list[tuple[int, int]] = []
        with path.open("rb") as file:
            position = 0
            while position < entry.size:
                file.seek(position)
                try:
                    prefix = file.read(PREFIX_BYTES)
                    meta_bytes, body_bytes = record_extent(prefix)
                    meta = decode_meta(prefix + file.read(meta_bytes))
                    length = PREFIX_BYTES + meta_bytes + body_bytes
                    if position + length > entry.size:
                        raise StorageError("cut off in the middle of a record")
                except StorageError as error:
                    file.seek(position + 1)
                    ahead = file.read().find(MAGIC)
                    skipped = entry.size - position if ahead < 0 else ahead + 1
                    problems.append(f"{path}: {error} at byte {position}; skipped {skipped} bytes")
                    position += skipped
                    damaged = True
                    continue
                if damaged:
                    holes.append((before_us, meta.stored_us))
                    damaged = False
                before_us = meta.stored_us
                metas[meta.sequence] = meta
                self._place(meta.sequence, path.name, position, length)
                position += length
        if damaged:
            holes.append((before_us, entry.until_us))
        return holes

    def _known(self, path: Path, written_us: int) -> _File:
        """A file found at the start. One whose name does not say when its records were stored is of any time
        before it was written."""
        _, number, *bounds = path.stem.split("-")
        self._next = max(self._next, int(number) + 1)
        since_us, until_us, *_ = [*map(int, bounds), 0, 0]
        entry = self._files[path.name] = _File(path, since_us=since_us, until_us=until_us or written_us)
        return entry

    def _note_lost(
        self, holes: list[tuple[int, int]], stored: Collection[FilterMeta], loaded: Loaded
    ) -> None:
        """Once for each damage, which stays in its file."""
        changes = loaded.changes
        news: list[Change] = []
        known = [
            (change.at_us, change.until_us)
            for change in changes
            if change.what == "lost" and change.kind == DISK
        ]
        reach_us = widest(changes).filter_us
        for stored_us, until_us in holes:
            at_us = max(0, stored_us - reach_us)
            if not any(start <= at_us and until_us <= end for start, end in known):
                news.append(Change(what="lost", kind=DISK, at_us=at_us, until_us=until_us))
        if news:
            news += lost_since(changes, stored, min(change.at_us for change in news))
            changes += news
            record = encode_changes(news)
            try:
                self._say(record)
            except OSError as error:
                self._unsaid = record
                loaded.problems.append(
                    f"{self._folder / _ATTACHMENTS}: what is lost cannot be noted: {error}"
                )

    def _load_changes(self, stored: Collection[FilterMeta], problems: list[str]) -> list[Change]:
        path = self._folder / _ATTACHMENTS
        if not path.exists():
            return []
        data = path.read_bytes()
        last_stored_us = max((meta.stored_us for meta in stored), default=0)
        changes, damage = salvaged_changes(data, last_stored_us=last_stored_us)
        problems += [f"{path}: {problem}" for problem in damage]
        if damage:
            since_us = min(change.at_us for change in changes if change.what == "damaged")
            changes += lost_since(changes, stored, since_us)
            # How far retention had come may be gone, too: not as far as what is still there.
            starts = [change for change in changes if change.what == "start"]
            promised = widest(starts)
            oldest_us = min((meta.stored_us for meta in stored), default=0)
            if starts and starts[0].at_us < oldest_us - promised.filter_us:
                changes.append(Change(what="begin", at_us=oldest_us + promised.skew_us))
        self._log_bytes = len(data)
        record = encode_changes(changes)
        if record != data:
            try:
                self._replace_changes([record])
            except OSError as error:
                # What is appended follows what is wrong, so that the next process meets it as well.
                problems.append(f"{path}: cannot be written anew: {error}")
        return changes

    def untracked(self, now_us: int) -> None:
        """In place of `load`: this process does not track. To the next that does it is one that died at once,
        so that nobody takes its time for one in which nothing happened."""
        try:
            loaded = self.load()
            said = (change for change in reversed(loaded.changes) if change.what in ("start", "stop"))
            last = next(said, Change(what="stop", at_us=0))
            if last.what == "stop":
                sequence = max((meta.sequence for meta in loaded.filters), default=0)
                started = Change(
                    what="start", at_us=now_us, until_us=last.until_us, promise=Promise(), sequence=sequence
                )
                self._say(encode_changes([started]))
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be used: {error}") from error

    # ---- work

    def apply(self, effects: Iterable[TrackingEffect]) -> None:
        """Everything of one call becomes durable with few syncs per file; what frees room comes first."""
        full: list[StoreFilter] = []
        part: list[StoreFilter] = []
        replaced: list[int] = []
        changes: list[StoreAttachments | ReplaceAttachments] = []
        last: list[StoreAttachments] = []
        drops: list[DropFilters] = []
        pressing: list[StoreAttachments] = []
        for effect in effects:
            if isinstance(effect, StoreFilter):
                (full if effect.final else part).append(effect)
                if effect.replaces is not None:
                    replaced.append(effect.replaces)
            elif isinstance(effect, DropFilters):
                drops.append(effect)
            elif isinstance(effect, ReplaceAttachments):
                changes.append(effect)
            elif effect.last:
                last.append(effect)
            else:
                (pressing if effect.pressing else changes).append(effect)
        try:
            if pressing or drops:
                self._say(b"".join([note.record for note in pressing] + [drop.record for drop in drops]))
                self._drop(drops)
            if not (changes or full or part or last):
                return
            self._hold_spare()
            for change in changes:
                if isinstance(change, ReplaceAttachments):
                    self._replace_changes(change.parts)
                else:
                    self._append_changes(change.record)
            self._append_full(full)
            if part:
                stored_us = [decode_meta(effect.record).stored_us for effect in part]
                records = [(effect.sequence, effect.record) for effect in part]
                self._write_part(records, min(stored_us), max(stored_us))
            for effect in last:
                self._append_changes(effect.record)
            for sequence in replaced:
                self._forget(sequence)
            self._clean()
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be written: {error}") from error

    def _say(self, record: bytes) -> None:
        """Append these changes, if need be where room is spared for them."""
        try:
            self._append_changes(record)
        except OSError:
            if not self._spared:
                raise
            (self._folder / _SPARE).unlink(missing_ok=True)
            self._spared = False
            self._append_changes(record)

    def _drop(self, drops: Sequence[DropFilters]) -> None:
        for effect in drops:
            for sequence in effect.sequences:
                self._forget(sequence)
        self._remove_dead()

    def _hold_spare(self) -> None:
        """OSError: there is no room for it, so there is none for anything."""
        if self._spared:
            return
        path = self._folder / _SPARE
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._spared = True

    def _append_full(self, effects: Sequence[StoreFilter]) -> None:
        if not effects:
            return
        if self._full is None or self._files[self._full].size >= MAX_FULL_BYTES:
            self._full = self._new(_FULL, decode_meta(effects[0].record).stored_us).path.name
        entry = self._files[self._full]
        self._append(entry.path, entry.size, [effect.record for effect in effects])
        for effect in effects:
            self._place(effect.sequence, self._full, entry.size, len(effect.record))
            entry.size += len(effect.record)

    def _write_part(self, records: Sequence[tuple[int, bytes]], since_us: int, until_us: int) -> None:
        entry = self._new("part", since_us, until_us)
        self._install(entry.path, [record for _, record in records])
        for sequence, record in records:
            self._place(sequence, entry.path.name, entry.size, len(record))
            entry.size += len(record)

    def _append_changes(self, record: bytes) -> None:
        record = self._unsaid + record
        self._append(self._folder / _ATTACHMENTS, self._log_bytes, [record])
        self._log_bytes += len(record)
        self._unsaid = b""

    def _replace_changes(self, parts: Iterable[bytes]) -> None:
        path = self._folder / _ATTACHMENTS
        # Part by part: while one is written, other threads go on.
        self._install(path, parts)
        self._log_bytes = path.stat().st_size
        self._unsaid = b""  # they are the whole map

    # Nothing is left of what could not be written: it would take what room becomes free.

    def _append(self, path: Path, size: int, parts: Iterable[bytes]) -> None:
        """Behind the first `size` bytes, which is all that is whole."""
        try:
            with path.open("ab") as file:
                file.truncate(size)
                file.writelines(parts)
                self._finish(file)
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise
        if not size:  # its name is new as well
            self._sync_folder()

    def _install(self, path: Path, parts: Iterable[bytes]) -> None:
        """In place of what was there."""
        aside = path.with_suffix(".tmp")
        try:
            with aside.open("wb") as file:
                file.writelines(parts)
                self._finish(file)
            aside.rename(path)
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        self._sync_folder()

    def read(self, sequences: Iterable[int]) -> dict[int, bytes]:
        """The records, whole; b"" for what cannot be read."""
        records: dict[int, bytes] = {}
        for sequence in sequences:
            name, position, length = self._where.get(sequence, ("", 0, 0))
            record = b""
            if name:
                try:
                    with self._files[name].path.open("rb") as file:
                        file.seek(position)
                        record = file.read(length)
                except OSError:
                    record = b""
            records[sequence] = record if len(record) == length else b""
        return records

    # ---- files

    def _new(self, kind: str, *stored_us: int) -> _File:
        path = self._folder / ("-".join([kind, f"{self._next:08d}", *map(str, stored_us)]) + ".flt")
        self._next += 1
        entry = self._files[path.name] = _File(path, since_us=stored_us[0], until_us=stored_us[-1])
        return entry

    def _place(self, sequence: int, name: str, position: int, length: int) -> None:
        if sequence in self._where:
            self._forget(sequence)
        self._where[sequence] = (name, position, length)
        entry = self._files[name]
        entry.live += length
        entry.sequences.add(sequence)

    def _forget(self, sequence: int) -> None:
        name, _, length = self._where.pop(sequence, ("", 0, 0))
        if name:
            entry = self._files[name]
            entry.live -= length
            entry.sequences.discard(sequence)

    def _clean(self) -> None:
        """Remove files without a live record; rewrite those of part-full filters that are mostly dead."""
        sparse = [
            entry for name, entry in sorted(self._files.items()) if name.startswith("part") and entry.live > 0
        ]
        sparse = [entry for entry in sparse if entry.live * 2 < entry.size]
        records = self.read(sorted(sequence for entry in sparse for sequence in entry.sequences))
        moved = [(sequence, record) for sequence, record in records.items() if record]
        if moved:
            since_us = min(entry.since_us for entry in sparse)
            until_us = max(entry.until_us for entry in sparse)
            with suppress(OSError):  # everything is stored: the next call tries again
                self._write_part(moved, since_us, until_us)
        self._remove_dead()

    def _remove_dead(self) -> None:
        for name in sorted(self._files):
            entry = self._files[name]
            if not entry.sequences:
                del self._files[name]
                entry.path.unlink(missing_ok=True)
                if name == self._full:
                    self._full = None

    def _finish(self, file: BinaryIO) -> None:
        file.flush()
        if self._sync:
            os.fdatasync(file.fileno())

    def _sync_folder(self) -> None:
        if not self._sync:
            return
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def size(self) -> int:
        """Bytes of all filter files."""
        return sum(entry.size for entry in self._files.values())
