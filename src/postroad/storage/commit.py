"""Group commit: whatever was asked for while the last sync ran is the next commit (D1, D11).

A commit is one write of at most `commit_bytes`, one sync of the log, then, if there are rows to save, one
commit of metadata: so a row never speaks of a record that is not on disk. Nothing waits on a timer.

When a write fails its commit fails as a whole, the partial tail is cut off and the log goes on: the next
commit simply tries again. On a full disk only the appends of a commit fail: saves, which release what fills
it, go on, if need be in the room of the log's ballast. When a *sync* fails the log takes no more appends
until a restart. The kernel may have dropped the dirty pages and marked them clean, so a second fsync would
report a success that covers nothing; only reading the disk afresh tells what is there.

After a failure, whatever was asked for before the core could hear of it fails too: it may build on what is
not in the log. After a full disk these are appends only; see `effects`. `GroupCommit` decides all this
without threads, one step at a time, so that the simulator can let virtual time pass between the steps;
`Storage` runs it on real files and threads.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from postroad.delays import Delays
from postroad.errors import BugError, PostroadError, StorageError
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    Chop,
    NoRoom,
    Read,
    Reader,
    Save,
    Saved,
    SaveFailed,
    StorageEffect,
    StorageInput,
)
from postroad.storage.files import Files, OsFiles
from postroad.storage.identity import DATABASE, LOG_FOLDER
from postroad.storage.log import SEGMENT_BYTES, Block, Chops, LogVolume, Row
from postroad.storage.metadata import Facts, Metadata
from postroad.storage.recovery import Recovery
from postroad.storage.segment import OVERHEAD
from postroad.units import MIB

COMMIT_BYTES: Final = 8 * MIB
LOOK_S: Final = 1.0  # how often a full disk is looked at, at most, for those who only ask

_log: Final = logging.getLogger(__name__)

Write = Append | Save
Change = tuple[str, list[Row]]


@dataclass(slots=True)
class Commit:
    """One group commit under way."""

    items: list[Write]
    size: int
    stale: list[Write]  # asked for before a failure was heard of
    block: Block | None = None
    full: NoRoom | None = None  # why its appends are not in the log
    error: PostroadError | None = None  # why nothing of it is
    chops: Chops = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)  # metadata to commit after the sync


class GroupCommit:
    """The steps of a commit: `begin`, sync of `commit.block`, `logged`, commit of `commit.changes`, `finish`.

    One commit at a time. `submit` and `take` belong to the core's thread, the steps to the committing one.
    """

    def __init__(self, volume: LogVolume, *, commit_bytes: int = COMMIT_BYTES) -> None:
        self.volume = volume
        self.broken: StorageError | None = None  # a sync failed: no appends until a restart
        self.commits = 0
        self._commit_bytes = commit_bytes
        self._lock = threading.Lock()
        self._queue: list[tuple[int, Write]] = []  # with the failures heard of when it was asked for
        self._taken: deque[tuple[int, Write]] = deque()  # from the queue, by the committing thread
        self._failures = 0
        self._saves_failed = 0  # the number of the last failure that saves must not build on
        self._failures_known = 0  # failures whose outcome can be taken
        self._heard = 0  # failures whose outcome was taken
        self._outcomes: list[StorageInput] = []

    # -- the core's side

    def submit(self, effects: Iterable[Append | Save | Chop]) -> None:
        with self._lock:
            for effect in effects:
                if isinstance(effect, Chop):
                    self.volume.chop(effect.stream, effect.tick)
                else:
                    self._queue.append((self._heard, effect))

    @property
    def waiting(self) -> bool:
        """Whether something was asked for that no commit has taken."""
        with self._lock:
            return bool(self._queue or self._taken)

    def take(self) -> list[StorageInput]:
        """Outcomes since the last call, to be handed to the core before its next effects are submitted."""
        with self._lock:
            taken, self._outcomes = self._outcomes, []
            self._heard = self._failures_known
            return taken

    # -- the steps

    def begin(self) -> Commit | None:
        """Write the next commit. None: nothing waits."""
        commit = self._next()
        appends = [item for item in commit.items if isinstance(item, Append)]
        commit.error = self.broken
        if appends and commit.error is None:
            try:
                commit.block = self.volume.write(appends)
            except NoRoom as error:
                commit.full = error
                self._failures += 1
            except PostroadError as error:
                commit.error = error
            except OSError as error:
                commit.error = self.broken = _final(error)
        if commit.error is not None and commit.items:
            self._fail()
        if commit.block is None:
            self._gather(commit)
            if not commit.items and not commit.stale and not commit.changes:
                return None
        return commit

    def logged(self, commit: Commit, error: OSError | None) -> None:
        """The sync of the commit's block came back."""
        if commit.block is None:
            return
        if error is None:
            self.volume.publish(commit.block)
        else:
            commit.error = self.broken = _final(error)
            self._fail()
            try:
                self.volume.withdraw(commit.block)
            except OSError as second:
                _log.error("cannot cut off what was not synced: %s", second)
        self._gather(commit)

    def finish(self, commit: Commit, error: PostroadError | None) -> None:
        """The commit of metadata came back, or there was none."""
        if error is None:
            self.volume.chops_saved(commit.chops)
            if commit.changes:
                self.volume.marks_saved()
        else:
            self.volume.chops_failed(commit.chops)
            if any(isinstance(item, Save) for item in commit.items):
                self._fail()
        if commit.block is not None and commit.error is None:
            self.volume.note_synced(commit.block)  # before anybody is told
        outcomes = [
            _failed(item, StorageError("an append or save before it failed")) for item in commit.stale
        ]
        for item in commit.items:
            reason = commit.error or (error if isinstance(item, Save) else commit.full)
            if reason is not None:
                outcomes.append(_failed(item, reason))
            else:
                outcomes.append(Appended(tag=item.tag) if isinstance(item, Append) else Saved(tag=item.tag))
        with self._lock:
            self.commits += 1
            self._outcomes += outcomes
            self._failures_known = self._failures

    def answer(self, outcome: StorageInput) -> None:
        with self._lock:
            self._outcomes.append(outcome)

    def _next(self) -> Commit:
        commit = Commit([], 0, [])
        with self._lock:  # not held for the loop below, which the core's thread would wait for
            self._taken.extend(self._queue)
            self._queue.clear()
        while self._taken and commit.size < self._commit_bytes:
            heard, effect = self._taken.popleft()
            commit.size += _weight(effect)
            failed = self._failures if isinstance(effect, Append) else self._saves_failed
            (commit.items if heard >= failed else commit.stale).append(effect)
        return commit

    def _fail(self) -> None:
        self._failures += 1
        self._saves_failed = self._failures

    def save(self, changes: list[Change], save: Callable[[list[Change]], None]) -> PostroadError | None:
        """Have metadata saved; where there is no room, in that of the ballast. The error if it cannot be."""
        try:
            try:
                save(changes)
            except NoRoom:
                if not self.volume.run_short():
                    raise
                save(changes)
        except PostroadError as error:
            return error
        return None

    def _gather(self, commit: Commit) -> None:
        if commit.error is None:
            commit.changes = [
                (item.table, list(item.rows)) for item in commit.items if isinstance(item, Save)
            ]
        commit.chops = self.volume.take_chops()
        if commit.chops:
            commit.changes += self.volume.chop_rows(commit.chops)
        if commit.changes or self.volume.marks_due:
            commit.changes += self.volume.marks()


def _weight(effect: Write) -> int:
    if isinstance(effect, Append):
        return len(effect.data) + OVERHEAD
    return sum(len(key) + len(value or b"") + OVERHEAD for key, value in effect.rows)


def _failed(effect: Write, error: PostroadError) -> StorageInput:
    kind = AppendFailed if isinstance(effect, Append) else SaveFailed
    return kind(tag=effect.tag, error=error)


def _final(error: OSError) -> StorageError:
    return StorageError(f"the log could not be synced ({error.strerror}); it takes no more until a restart")


def commit_once(group: GroupCommit, files: Files, facts: Facts) -> Commit | None:
    """All steps of one commit, waiting for the disk. None: nothing waits."""
    commit = group.begin()
    if commit is None:
        return None
    sync_error: OSError | None = None
    if commit.block is not None:
        try:
            files.sync(commit.block.segment.name)
        except OSError as error:
            sync_error = error
    group.logged(commit, sync_error)
    group.finish(commit, group.save(commit.changes, facts.commit) if commit.changes else None)
    return commit


class Storage:
    """The log and the metadata of a data folder, at work on two threads.

    The commit thread commits; the reading thread reads and, when nobody waits for a read, reclaims space.
    `wake` is called from either when `take` has something (call_soon_threadsafe of the driver's loop).
    """

    def __init__(
        self,
        folder: Path,
        *,
        wake: Callable[[], None],
        fsync: Literal["always", "never"] = "always",
        segment_bytes: int = SEGMENT_BYTES,
        commit_bytes: int = COMMIT_BYTES,
    ) -> None:
        self._wake = wake
        self._metadata = Metadata(folder / DATABASE, log=folder / LOG_FOLDER)
        try:
            self._files = OsFiles(folder / LOG_FOLDER, sync=fsync == "always")
        except OSError as error:
            self._metadata.close()
            raise StorageError(f"cannot use {folder / LOG_FOLDER}: {error.strerror}") from None
        try:
            self.volume = LogVolume(
                self._files,
                self._metadata,
                draw_marker=lambda: secrets.randbits(32),
                segment_bytes=segment_bytes,
            )
        except BaseException:
            self._files.close()
            self._metadata.close()
            raise
        self._metadata.stamp()
        self._group = GroupCommit(self.volume, commit_bytes=commit_bytes)
        self._commits = Delays(
            "log_commit_seconds", "One group commit: write, sync, metadata. Alarm: often above 0.1."
        )
        self._look_s = 0.0  # not before this
        self._looking = False  # for room, as soon as the commit thread can
        self._said_short = False
        self._say_short()
        self._reads: deque[Read] = deque()
        self._work = threading.Semaphore(0)  # something for the commit thread
        self._reading = threading.Semaphore(0)  # something for the reading thread
        self._closing = False
        self._crash: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"postroad-{name}", daemon=True)
            for name, loop in (("commit", self._commit_loop), ("read", self._read_loop))
        ]
        for thread in self._threads:
            thread.start()
        self._reading.release()  # there may be dead files
        self._work.release()  # and something to note of what was found

    @property
    def recovered(self) -> Recovery:
        return self.volume.recovered

    def shortage(self) -> str:
        """Why what can be left unwritten should be: the disk is full. That is looked at again as long as
        somebody asks. "" if it is not."""
        now_s = time.monotonic()
        if self.volume.short and now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._looking = True
            self._work.release()
        return self.volume.shortage

    def load(self, table: str, reader: Reader | None = None) -> dict[bytes, bytes]:
        """A table of metadata, before anything is performed; without what is damaged of it."""
        return self._metadata.load(table, reader)

    def damaged(self, table: str) -> tuple[bytes, ...]:
        """See `Metadata.damaged`. Before anything is performed."""
        return self._metadata.damaged(table)

    def refuse_damaged(self, table: str) -> None:
        self._metadata.refuse_damaged(table)

    def perform(self, effects: Iterable[StorageEffect]) -> None:
        writes: list[Append | Save | Chop] = []
        for effect in effects:
            if isinstance(effect, Read):
                self._reads.append(effect)
                self._reading.release()
            else:
                writes.append(effect)
        if writes:
            self._group.submit(writes)
            self._work.release()

    def take(self) -> list[StorageInput]:
        if self._crash is not None:
            raise BugError("a thread of the storage died; a restart recovers the log") from self._crash
        return self._group.take()

    def stats(self) -> dict[str, int]:
        return self.volume.stats() | {"log_commits_total": self._group.commits}

    def delays(self) -> list[Delays]:
        return [self._commits, self._files.syncs]

    def close(self) -> None:
        """Everything asked for is done and answered before this returns."""
        self._closing = True
        self._work.release()
        self._threads[0].join()
        self._reading.release()
        self._threads[1].join()
        if self._group.broken is None and self._crash is None:
            with suppress(StorageError):  # it only makes the next start surer of what it finds
                self._metadata.commit(self.volume.marks())
        self._files.close()
        self._metadata.close()

    # -- threads

    def _guard(self, loop: Callable[[], None]) -> None:
        """Nobody would hear of a thread that dies, and the core would wait for ever: `take` raises it."""
        try:
            loop()
        except Exception as error:
            self._crash = error
            self._wake()

    def _commit_loop(self) -> None:
        while True:
            self._work.acquire()
            while self._work.acquire(blocking=False):
                pass  # one pass takes all that was asked for
            closing = self._closing
            if self._looking:
                self._looking = False
                with suppress(NoRoom):
                    self.volume.look_for_room()
            while self._commit():
                pass
            if closing:
                return

    def _commit(self) -> bool:
        began_ns = time.perf_counter_ns()
        commit = commit_once(self._group, self._files, self._metadata)
        self._say_short()
        if commit is None:
            return False
        self._commits.observe((time.perf_counter_ns() - began_ns) // 1000)
        if commit.chops:
            self._reading.release()
        if commit.items or commit.stale:
            self._wake()
        # Chops that could not be saved wait for the next commit, they do not make one after another.
        return bool(commit.items or commit.stale)

    def _say_short(self) -> None:
        if self.volume.short == self._said_short:
            return
        self._said_short = self.volume.short
        if self._said_short:
            _log.warning(
                "%s: durable events are refused, acknowledgements and reads go on", self.volume.shortage
            )
        else:
            _log.warning("the disk has room again: durable events are taken")

    def _read_loop(self) -> None:
        while True:
            self._reading.acquire()
            if self._reads:
                done = self.volume.read(self._reads.popleft())
                self._say_damage()  # before a subscriber is told of a gap
                self._group.answer(done)
                self._wake()
                continue
            tidied = self.volume.tidy()
            self._say_damage()
            if tidied:
                self._reading.release()
                self._work.release()  # rows of streams that are over
            elif self._closing and not self._threads[0].is_alive():
                return

    def _say_damage(self) -> None:
        """As a start does."""
        while self.volume.damage:
            _log.warning("log: %s", self.volume.damage.popleft())
