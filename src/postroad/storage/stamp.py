"""Which database the log belongs to: a line in the log's folder, rewritten after every commit of metadata.

A database that was put back from a backup while the log went on would be believed: subscriptions made since
then would be gone without a word, tokens and boot numbers would go back, and numbers of subscriptions that
filtering records name would be given out again. So the database counts its commits, and the log's folder
notes the count. It is noted after the commit is on disk and is not synced itself: a crash can only leave it
behind the database, and only one that is ahead of it proves that the database is not the latest. The line
ends with its checksum: one of which a bit changed would refuse a database that is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google_crc32c import value as crc32c

STAMP: Final = "stamp"
# Earlier versions wrote it without its checksum.
_TEXT: Final = re.compile(rb"(([0-9a-f]{8}) ([0-9]{10}) ([0-9]{20}))(?: ([0-9a-f]{8}))?\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    broker: int
    boot: int
    commits: int

    def encode(self) -> bytes:
        """Always of the same length: it is written over the last one, on a full disk too."""
        text = f"{self.broker:08x} {self.boot:010d} {self.commits:020d}".encode()
        return text + f" {crc32c(text):08x}\n".encode()


def read_stamp(folder: Path) -> Stamp | None:
    """None where there is none that can be read."""
    try:
        line = _TEXT.fullmatch((folder / STAMP).read_bytes())
    except OSError:
        return None
    if line is None or (line[5] is not None and int(line[5], 16) != crc32c(line[1])):
        return None
    return Stamp(broker=int(line[2], 16), boot=int(line[3]), commits=int(line[4]))


class StampFile:
    """Used from one thread at a time. Where it cannot be written it stays behind, and proves nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STAMP
        self._file: int | None = None

    def write(self, stamp: Stamp) -> None:
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, stamp.encode(), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
