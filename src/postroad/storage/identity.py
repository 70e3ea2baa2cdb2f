"""The data folder and who its broker is.

A broker is its data folder: the number and node id drawn at its first start, the name it was given, the
count of its starts and its boot number live in `postroad.db`. A start counts before anything of it can be
seen outside (synchronous FULL), since the boot number tells this start's plain pubend, link state, interest
and release reports from those of earlier starts. Others take nothing that is older than what they have, so
it must not go back with a folder that is restored from a backup: it is the time of the start, or one more
than the last if the clock is behind that. A lock on the folder keeps two processes from being the same
broker; the kernel drops it with the process, so kill -9 leaves nothing to clean up.

The log and the database belong together: without it nobody could read the log, and a new broker would append
to another's. So a log beside a database that knows no broker is refused, and nothing is created or changed;
and so is a database that is not the latest that its log has seen (`stamp`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from postroad.errors import StorageError, UsageError
from postroad.ids import OWN_IDS, VOLATILE, Identity
from postroad.storage.database import (
    commits_of,
    get_broker,
    get_life,
    is_alien,
    open_database,
    put_broker,
    unreadable,
)
from postroad.storage.files import BALLAST
from postroad.storage.segment import parse_name
from postroad.storage.stamp import read_stamp
from postroad.storage.twin import heal

DATABASE: Final = "postroad.db"
LOG_FOLDER: Final = "log"
LOCK: Final = "lock"
NODE_BYTES: Final = 16
MAX_BOOT: Final = VOLATILE - 1
EPOCH_S: Final = 1_577_836_800  # boot numbers are seconds since the beginning of 2020
LAST_CLOCK: Final = MAX_BOOT - (1 << 24)  # a clock that is far ahead leaves so many starts to be counted

T = TypeVar("T")


class InUseError(UsageError):
    """Another broker has the folder."""


class DataFolder:
    """An open, locked data folder. `start()` is called once per process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"cannot use the data folder {path}: {error.strerror}; choose another with --data"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise InUseError(
                f"the data folder {path} is in use by another broker"
                + (f" (process {holder})" if holder else "")
                + "; give this one its own with --data"
            ) from None
        # Only for the message above: a full disk is told of by what needs the room.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            heal(path / DATABASE, path / LOG_FOLDER)
            if not (path / DATABASE).exists():
                self._refuse_old_log()
            self.database = self._with_room(lambda: open_database(path / DATABASE))
            try:
                self._refuse_other_database()
            except BaseException:
                self.database.close()
                raise
        except sqlite3.Error as error:
            os.close(self._lock)
            if is_alien(error):
                raise unreadable(path / DATABASE, error) from None
            raise StorageError(
                f"cannot write {path / DATABASE}: {error}; make room, or choose another folder with --data"
            ) from None
        except StorageError:
            os.close(self._lock)
            raise

    def start(self, name: str | None, *, clock: Callable[[], float] = time.time) -> Identity:
        """This start's identity; the boot number is on disk when this returns.

        A name given once is kept, so that a broker restarted without it is still called the same.
        """
        try:
            return self._with_room(lambda: self._count_start(name, int(clock()) - EPOCH_S))
        except sqlite3.Error as error:
            if is_alien(error):
                raise unreadable(self.path / DATABASE, error) from None
            raise StorageError(f"cannot write {self.path / DATABASE}: {error}") from None

    def _count_start(self, name: str | None, now_s: int) -> Identity:
        database = self.database
        with database:
            database.execute("BEGIN IMMEDIATE")
            row = get_broker(database, self.path / DATABASE)
            if row is None:
                self._refuse_old_log()
                number = 1 + secrets.randbelow(OWN_IDS - 1)
                row = (number, secrets.token_bytes(NODE_BYTES), f"broker-{number:08x}", 0, 0)
            number, node, name_before, before, starts = row
            identity = Identity(
                number=number,
                node=node,
                name=name or name_before,
                boot=max(before + 1, min(now_s, LAST_CLOCK)),
                starts=starts + 1,
                before=before,
                life=get_life(database, self.path / DATABASE),
            )
            if identity.boot > MAX_BOOT:
                raise StorageError(f"{self.path} has no boot number left; begin with a new data folder")
            put_broker(database, (number, node, identity.name, identity.boot, identity.starts))
        return identity

    def _with_room(self, work: Callable[[], T]) -> T:
        """On a full disk, in the room of the log's ballast."""
        try:
            return work()
        except sqlite3.OperationalError:
            ballast = self.path / LOG_FOLDER / BALLAST
            if not ballast.exists():
                raise
            ballast.unlink()
            return work()

    def _refuse_old_log(self) -> None:
        log = self.path / LOG_FOLDER
        if log.is_dir() and any(parse_name(file.name) for file in log.iterdir()):
            raise StorageError(
                f"{self.path / DATABASE} is lost, and {log} holds a log that belongs to it: put the database"
                f" back, or give the events up by moving {log} away"
            )

    def _refuse_other_database(self) -> None:
        """Another's database beside this log, or an older one of its own."""
        path, log = self.path / DATABASE, self.path / LOG_FOLDER
        stamp = read_stamp(log)
        row = get_broker(self.database, path)
        if stamp is None or row is None:
            return
        broker, boot = row[0], row[3]
        commits = commits_of(self.database)
        # A count that is damaged is told with the other rows; then the boot number alone must do.
        latest = boot > stamp.boot or (boot == stamp.boot and (commits is None or commits >= stamp.commits))
        if broker == stamp.broker and latest:
            return
        whose = "older than the log beside it" if broker == stamp.broker else "not that of the log beside it"
        raise StorageError(
            f"{path} is {whose}: put back the one that belongs to it, with its journal {DATABASE}-wal if"
            f" there is one, restore both from one backup, or give the events up by moving {log} away"
        )

    def close(self) -> None:
        self.database.close()
        os.close(self._lock)
