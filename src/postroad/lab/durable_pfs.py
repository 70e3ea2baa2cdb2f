"""The PFS against logging each event once per subscriber, on the same log and a real disk (5.1.2).

800 events a second over four pubends, 100 subscribers that match a quarter of them each, 418 bytes an event.
Both are synced once for every second of the workload and keep its last five seconds. --seconds is the length
of the workload, 100 as in the paper, which is worked off as fast as it goes.

The paper's events come one by one, so a record stands for one event; a busy broker has batches, and eight
events in each are tried too. The log per subscriber gets the events of a batch in one record then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.compact import Numbers
from postroad.durable.subscriber.filtering import PersistentFiltering
from postroad.seam.storage import Append, Chop, LogStream, StreamKind
from postroad.seam.turn import Turn, Unanswered
from postroad.selectors import Group
from postroad.storage.commit import GroupCommit, commit_once
from postroad.storage.files import OsFiles
from postroad.storage.identity import DATABASE
from postroad.storage.log import LogVolume
from postroad.storage.metadata import Metadata
from postroad.units import MIB, SECOND_US

SECONDS: Final = 100.0
RATE, PUBENDS, TOPICS, SUBSCRIBERS = 800, 4, 4, 100
EVENT_BYTES: Final = 418
KEPT_S: Final = 5
BATCHES: Final = (1, 8)  # events of a pubend at a time
PAPER: Final = {"batch_1.pfs_ms": 11_088.0, "batch_1.times_faster": 5.0, "batch_1.times_less_data": 25.0}
NOTES: Final = (
    "The paper's time is for 100 s of workload on its machine; of the factors it says over 5 and 25.",
    "Bytes are what is written to the log, its headers included.",
)

Figures = dict[str, float]
Rows = npt.NDArray[np.uint32]


class _Disk:
    """The log of a broker, committed when asked."""

    def __init__(self, folder: Path) -> None:
        self._files = OsFiles(folder / "log", sync=True)
        self._facts = Metadata(folder / DATABASE)
        self._volume = LogVolume(self._files, self._facts, draw_marker=lambda: 1)
        self._group = GroupCommit(self._volume, commit_bytes=64 * MIB)
        self._unanswered = Unanswered()
        self.written = 0  # bytes

    def turn(self) -> Turn:
        return Turn(0, self._unanswered)

    def perform(self, turn: Turn) -> None:
        self._group.submit([effect for effect in turn.effects if isinstance(effect, Append | Chop)])

    def commit(self) -> None:
        """One sync, and whoever waits for it hears of it."""
        while (commit := commit_once(self._group, self._files, self._facts)) is not None:
            self.written += commit.size
            if not commit.items:
                break
        self._volume.tidy()
        turn = self.turn()
        for outcome in self._group.take():
            self._unanswered.answer(turn, outcome)
        self.perform(turn)

    def close(self) -> None:
        self._files.close()
        self._facts.close()


@contextmanager
def _disk() -> Iterator[_Disk]:
    with TemporaryDirectory(prefix="postroad-lab-") as folder:
        made = _Disk(Path(folder))
        try:
            yield made
        finally:
            made.close()


class Batch(NamedTuple):
    """Events of one pubend that come together, in every second of the workload alike."""

    pubend: int
    ticks: Numbers  # since the second began
    topics: list[tuple[int, Rows]]  # a topic and the rows about it


def second_of(size: int) -> list[Batch]:
    """What comes in a second; every fourth event of a pubend is about the same topic."""
    count = RATE // PUBENDS
    made = []
    for first in range(0, count, size):
        numbers = np.arange(first, min(first + size, count))
        ticks = ((numbers + 1) * (SECOND_US // count)).astype(np.int64)
        rows = [
            (topic, np.flatnonzero(numbers % TOPICS == topic).astype(np.uint32)) for topic in range(TOPICS)
        ]
        topics = [(topic, matches) for topic, matches in rows if len(matches)]
        made += [Batch(pubend, ticks, topics) for pubend in range(PUBENDS)]
    return made


def _ignore(*_args: object) -> None:
    """Nobody waits for it."""


def pfs(seconds: int, size: int) -> Figures:
    members = [list(range(topic + 1, SUBSCRIBERS + 1, TOPICS)) for topic in range(TOPICS)]
    batches = [
        (pubend, ticks, [Group(rows, members[topic]) for topic, rows in topics])
        for pubend, ticks, topics in second_of(size)
    ]
    with _disk() as disk:
        streams = [
            PersistentFiltering(number << 32, backlog=Backlog(), opened=_ignore, ready=_ignore)
            for number in range(1, PUBENDS + 1)
        ]
        began = time.perf_counter()
        for second in range(1, seconds + 1):
            base = second * SECOND_US
            turn = disk.turn()
            for pubend, ticks, groups in batches:
                stream, at = streams[pubend], ticks + base
                stream.write(turn, stream.heard, int(at[-1]), at, groups, then=_ignore)
            disk.perform(turn)
            disk.commit()
            turn = disk.turn()
            for stream in streams:
                stream.chop(turn, (second - KEPT_S) * SECOND_US)
            disk.perform(turn)
        return {"ms": (time.perf_counter() - began) * 1000, "bytes": float(disk.written)}


def event_logs(seconds: int, size: int) -> Figures:
    event = bytes(EVENT_BYTES)
    members = [range(topic + 1, SUBSCRIBERS + 1, TOPICS) for topic in range(TOPICS)]
    batches = [
        [(members[topic], event * len(rows)) for topic, rows in topics] for _, _, topics in second_of(size)
    ]
    with _disk() as disk:
        last = [0] * (SUBSCRIBERS + 1)
        began = time.perf_counter()
        for second in range(1, seconds + 1):
            end = second * SECOND_US
            turn = disk.turn()
            for batch in batches:
                end += 1
                for subscribers, data in batch:
                    for subscriber in subscribers:
                        turn.append(
                            LogStream(StreamKind.QUEUES, subscriber),
                            last[subscriber],
                            end,
                            data,
                            then=_ignore,
                        )
                        last[subscriber] = end
            disk.perform(turn)
            disk.commit()
            if second > KEPT_S:
                turn = disk.turn()
                for subscriber in range(1, SUBSCRIBERS + 1):
                    turn.chop(LogStream(StreamKind.QUEUES, subscriber), (second + 1 - KEPT_S) * SECOND_US)
                disk.perform(turn)
        return {"ms": (time.perf_counter() - began) * 1000, "bytes": float(disk.written)}


def run(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    length = max(1, round(seconds))
    measured: Figures = {"workload_s": float(length)}
    for size in BATCHES:
        tell(f"the PFS, batches of {size}")
        ours = pfs(length, size)
        tell(f"a log per subscriber, batches of {size}")
        theirs = event_logs(length, size)
        measured |= {
            f"batch_{size}.pfs_ms": ours["ms"],
            f"batch_{size}.event_log_ms": theirs["ms"],
            f"batch_{size}.times_faster": theirs["ms"] / ours["ms"],
            f"batch_{size}.pfs_bytes": ours["bytes"],
            f"batch_{size}.event_log_bytes": theirs["bytes"],
            f"batch_{size}.times_less_data": theirs["bytes"] / ours["bytes"],
        }
    if out is not None:
        from postroad.lab.durable_figures import draw_pfs

        draw_pfs(measured, PAPER, out)
    return measured, PAPER
