"""The consolidated stream of one pubend: all subscribers that are not catching up (spec D4; paper, 4.1).

Knowledge comes once, contiguous and in order, up to the doubt horizon. It is matched once for all durable
subscriptions of this broker, connected or not; a filtering record is appended; whoever is not catching up
is sent its rows at once, without waiting for the disk. latestDelivered follows when the record is synced.

A crash may therefore find a subscriber ahead of latestDelivered. The same events come again then; each
subscriber has a tick at which it begins here, and gets nothing at or below it.

The newest segments are kept, with who matched what. A catchup stream that has reached them is given the
rest from memory in the same step in which its subscriber is counted in here: that is the switchover (D5).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.filtering import PersistentFiltering
from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Message
from postroad.errors import BugError, PostroadError
from postroad.events.batch import EventBatch
from postroad.ids import pubend_text
from postroad.seam.turn import Turn
from postroad.selectors import Group
from postroad.streams.knowledge import Segment
from postroad.units import MIB

DELIVERED: Final = "durable.delivered"
_U64: Final = struct.Struct(">Q")
RECENT_BYTES: Final = MIB  # of segments kept for switchover, beyond those that wait for the disk
RECENT_SEGMENTS: Final = 512  # and no more of them: each is a message to whoever switches over
PENDING_BYTES: Final = 32 * MIB  # of segments that wait for the disk; then catchup streams wait too


class _Recent(NamedTuple):
    start: int
    end: int
    batch: EventBatch | None
    groups: list[Group]
    lost: bool
    size: int


class Constream:
    """One pubend at one subscriber hosting broker. `stored`: the disk said what became of a record."""

    def __init__(
        self,
        pubend: int,
        *,
        filtering: PersistentFiltering,
        position: int,
        stored: Callable[[Turn], None],
    ) -> None:
        self.pubend = pubend
        self.filtering = filtering
        self._stored = stored
        self.live = position  # delivered to all non-catchup subscribers, perhaps not yet in the PFS
        self.latest_delivered = position  # latestDelivered(p): and in the PFS, on disk
        self._recent: deque[_Recent] = deque()  # contiguous, up to `live`
        self._recent_bytes = 0
        # Not yet durable: where it ends, and whether a record of it is on its way to disk.
        self._waiting: deque[tuple[int, bool]] = deque()
        self._members: dict[int, int] = {}  # non-catchup subscriber -> tick at which it begins here

    # ---- members: the non-catchup subscribers

    def join(self, subscriber: int, tick: int) -> None:
        """`subscriber` has everything up to `tick` and gets all after it from here."""
        if tick < self.live:
            raise BugError(f"subscriber {subscriber} would miss ({tick}, {self.live}]")
        self._members[subscriber] = tick

    def __contains__(self, subscriber: int) -> bool:
        return subscriber in self._members

    @property
    def members(self) -> Mapping[int, int]:
        return self._members

    # ---- knowledge

    def learn(
        self, turn: Turn, segment: Segment, groups: list[Group], room: Callable[[int], bool]
    ) -> tuple[list[Message], list[int]]:
        """The next segment and who matched it. Returns messages to members, and those who had no room for it.

        The latter are members no more: they have everything up to the segment's start (D9).
        """
        if segment.end <= self.live:
            return [], []
        if segment.start > self.live:
            raise BugError(f"{pubend_text(self.pubend)}: ({segment.start}, {segment.end}] leaves a gap")
        if segment.start < self.live:
            raise BugError(f"{pubend_text(self.pubend)}: cut the segment before it is matched")
        messages: list[Message] = []
        behind: list[int] = []
        batch, end = segment.batch, segment.end
        if segment.lost:
            self.filtering.hole(end)
            self._wait(end, recorded=False)
            messages, behind = self._lost(segment, room)
        else:
            ticks = None if batch is None else batch.headers["tick"].astype(np.int64)
            then = partial(self._on_record, end)
            recorded = self.filtering.write(turn, segment.start, end, ticks, groups, then=then)
            self._wait(end, recorded=recorded)
            if batch is not None:
                messages, behind = self._deliver(segment, batch, groups, room)
        self.live = end
        self._keep(segment, groups)
        self._settle()
        return messages, behind

    def _deliver(
        self, segment: Segment, batch: EventBatch, groups: list[Group], room: Callable[[int], bool]
    ) -> tuple[list[Message], list[int]]:
        messages: list[Message] = []
        behind: list[int] = []
        members, start = self._members, segment.start
        for rows, targets in groups:
            served: list[int] = []
            for subscriber in targets:
                tick = members.get(subscriber)
                if tick is None:
                    continue
                if not room(subscriber):
                    del members[subscriber]
                    behind.append(subscriber)
                elif tick <= start:
                    served.append(subscriber)
                else:
                    late = self._cut(batch, rows, tick)
                    if len(late):
                        messages.append(self._message((subscriber,), tick, segment.end, batch, late))
            if served:
                messages.append(self._message(tuple(served), start, segment.end, batch, rows))
        return messages, behind

    def _lost(self, segment: Segment, room: Callable[[int], bool]) -> tuple[list[Message], list[int]]:
        """L where a subscriber of this stream stands: it was released although it was not delivered here.

        That happens only to a broker that was retired and came back, or when a pubend's disk is damaged.
        """
        messages: list[Message] = []
        behind: list[int] = []
        for subscriber, tick in list(self._members.items()):
            if tick >= segment.end:
                continue
            if not room(subscriber):
                del self._members[subscriber]
                behind.append(subscriber)
                continue
            start = max(tick, segment.start)
            gap = DeliverGap(subscribers=(subscriber,), pubend=self.pubend, start=start, end=segment.end)
            messages.append(gap)
        return messages, behind

    def _message(
        self,
        subscribers: tuple[int, ...],
        start: int,
        end: int,
        batch: EventBatch,
        rows: npt.NDArray[np.uint32],
    ) -> Deliver:
        return Deliver(
            subscribers=subscribers, pubend=self.pubend, start=start, end=end, batch=batch, rows=rows
        )

    @staticmethod
    def _cut(batch: EventBatch, rows: npt.NDArray[np.uint32], tick: int) -> npt.NDArray[np.uint32]:
        """Those of `rows` above `tick`."""
        return rows[batch.headers["tick"][rows] > tick]

    # ---- durability

    def _wait(self, end: int, *, recorded: bool) -> None:
        """What needs no record is one with such before it: a disk may hang for long."""
        if not recorded and self._waiting and not self._waiting[-1][1]:
            self._waiting.pop()
        self._waiting.append((end, recorded))

    def _on_record(self, end: int, turn: Turn, error: PostroadError | None) -> None:
        """The filtering record that ends there is on disk. If not, all that are on their way failed: the PFS
        has a hole there, which is refiltered, and nothing waits for them."""
        if error is None:
            for at, (waiting, _) in enumerate(self._waiting):
                if waiting == end:
                    self._waiting[at] = (end, False)
                    break
        elif (end, True) in self._waiting:
            self._waiting = deque((waiting, False) for waiting, _ in self._waiting)
        self._settle()
        self._stored(turn)

    def _settle(self) -> None:
        while self._waiting and not self._waiting[0][1]:
            self.latest_delivered = self._waiting.popleft()[0]
        self._trim()

    # ---- switchover

    def _keep(self, segment: Segment, groups: list[Group]) -> None:
        size = segment.size
        self._recent.append(_Recent(segment.start, segment.end, segment.batch, groups, segment.lost, size))
        self._recent_bytes += size

    def _trim(self) -> None:
        while self._recent and (
            self._recent_bytes > PENDING_BYTES
            or (
                (self._recent_bytes > RECENT_BYTES or len(self._recent) > RECENT_SEGMENTS)
                and self._recent[0].end <= self.latest_delivered
            )
        ):
            self._recent_bytes -= self._recent.popleft().size

    @property
    def recent_start(self) -> int:
        """From here on a catchup stream can be given everything from memory."""
        return self._recent[0].start if self._recent else self.live

    def kept(self, subscriber: int, position: int) -> int:
        """Events for `subscriber` above `position` that are kept here."""
        events = 0
        for kept in self._recent:
            rows = None if kept.end <= position else _rows_of(kept.groups, subscriber)
            if rows is not None and kept.batch is not None:
                events += len(self._cut(kept.batch, rows, position))
        return events

    def switch(
        self, subscriber: int, position: int, room: Callable[[], bool], send: Callable[[Message], None]
    ) -> int:
        """Bring `subscriber`, who has everything up to `position`, up to `live` from memory and count it in.

        Returns the tick that it has then. If there was not room for all of it, it is not counted in and
        stays where it is: in catchup mode.
        """
        if position < self.recent_start:
            raise BugError(f"subscriber {subscriber} at {position} is behind what is kept")
        for kept in self._recent:
            if kept.end <= position:
                continue
            rows = _rows_of(kept.groups, subscriber)
            if rows is not None and kept.batch is not None and position > kept.start:
                rows = self._cut(kept.batch, rows, position)
            wanted = kept.lost or (rows is not None and len(rows) > 0)
            if wanted and not room():
                return position
            start = max(position, kept.start)
            if kept.lost:
                send(DeliverGap(subscribers=(subscriber,), pubend=self.pubend, start=start, end=kept.end))
            elif wanted and kept.batch is not None and rows is not None:
                send(self._message((subscriber,), start, kept.end, kept.batch, rows))
            position = kept.end
        self.join(subscriber, max(position, self.live))
        return position

    def forget(self, subscriber: int) -> None:
        self._members.pop(subscriber, None)

    # ---- inspection

    def status(self) -> dict[str, int | str]:
        return {
            "pubend": pubend_text(self.pubend),
            "live": self.live,
            "latest_delivered": self.latest_delivered,
            "members": len(self._members),
            "recent_bytes": self._recent_bytes,
            "records_waiting": len(self._waiting),
        }

    def check(self) -> None:
        if self.latest_delivered > self.live:
            raise BugError("constream: latestDelivered is beyond what was delivered")
        end = self.recent_start
        for kept in self._recent:
            if kept.start != end:
                raise BugError("constream: what is kept is not contiguous")
            end = kept.end
        if end != self.live or self._recent_bytes != sum(kept.size for kept in self._recent):
            raise BugError("constream: what is kept does not reach the present, or is miscounted")
        if (self._waiting[-1][0] if self._waiting else self.latest_delivered) != self.live:
            raise BugError("constream: what waits for the disk does not reach the present")


class Ledger:
    """latestDelivered of every pubend, as it is on disk."""

    __slots__ = ("_backlog", "moved", "saved")

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self.saved: dict[int, int] = {}  # pubend -> latestDelivered
        self.moved: dict[int, None] = {}  # pubends of which there may be more to save

    def recover(self, rows: Mapping[bytes, bytes]) -> None:
        for key, value in sorted(rows.items()):
            pubend, tick = read_delivered(key, value)
            self.saved[pubend] = tick

    def begin(self, pubend: int, tick: int) -> None:
        self.saved.setdefault(pubend, tick)
        self.moved[pubend] = None

    def save(self, turn: Turn, latest: Mapping[int, int]) -> None:
        """Save these, where they are news."""
        self.moved.clear()
        news = {pubend: tick for pubend, tick in latest.items() if tick > self.saved[pubend]}
        if news:
            rows = [(_U64.pack(pubend), _U64.pack(tick)) for pubend, tick in news.items()]
            turn.save(DELIVERED, rows, then=self._backlog.counted(partial(self._on_save, news)))

    def _on_save(self, news: Mapping[int, int], _turn: Turn, error: PostroadError | None) -> None:
        if error is None:
            self.saved.update(news)
        else:
            self.moved.update(dict.fromkeys(news))


def _rows_of(groups: list[Group], subscriber: int) -> npt.NDArray[np.uint32] | None:
    for rows, targets in groups:
        if subscriber in targets:
            return rows
    return None


def read_delivered(key: bytes, value: bytes) -> tuple[int, int]:
    """Pubend and latestDelivered."""
    return _U64.unpack(key)[0], _U64.unpack(value)[0]
