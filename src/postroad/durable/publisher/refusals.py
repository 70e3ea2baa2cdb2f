"""Refusals of durable frames that their client may not have heard.

What a client was not told it sends again after a reconnect, with the same ids; and a pubend takes what is not
above the last id of a publisher for a repetition. If a later frame were logged meanwhile, the refused one
would then be acknowledged, and be in no log. So nothing that came after a refused frame is logged before its
client has shown that it heard the refusal: a PING follows the REJECTED, and connections keep order, so that
the PONG is the proof.

Until then later frames wait, and keep their credit. To refuse them as well would never end for a publisher
that always has frames on their way, since each of those refusals would have to be heard first, too.

These pings are numbered from 1 on, which no clock shows: those of `links` bear the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from postroad.errors import BugError
from postroad.seam.turn import Turn
from postroad.wire.frames import Ping, encode

Frame = TypeVar("Frame")


@dataclass(slots=True)
class _Hold(Generic[Frame]):
    ping: int  # the last one: its answer proves that every refusal was heard
    frames: deque[tuple[int, Frame]] = field(default_factory=deque)  # each with the ping that it waits for


class Refusals(Generic[Frame]):
    """Which connections have refusals that may not have been heard, and the frames that wait for that."""

    def __init__(self) -> None:
        self._holds: dict[int, _Hold[Frame]] = {}  # by connection
        self._due: dict[int, None] = {}  # of those: their last ping is still to be sent
        self._pings = 0

    def __len__(self) -> int:
        """Frames that wait."""
        return sum(len(hold.frames) for hold in self._holds.values())

    def refused(self, connection: int) -> None:
        """The broker has sent REJECTED: later frames of this connection wait until the client has read it."""
        if connection not in self._due:
            self._due[connection] = None
            self._pings += 1
            self._holds.setdefault(connection, _Hold(self._pings)).ping = self._pings

    def hold(self, connection: int, frame: Frame) -> bool:
        """Whether this frame, which has just come, has to wait; if so it does."""
        hold = self._holds.get(connection)
        if hold is None:
            return False
        hold.frames.append((hold.ping, frame))
        return True

    def hold_back(self, connection: int, frames: Iterable[Frame]) -> None:
        """These came before those that wait, and all of them after what was refused last.

        A connection without a hold is about to close: its client hears nothing, and sends them again.
        """
        hold = self._holds.get(connection)
        if hold is not None:
            waiting = [*frames, *(frame for _, frame in hold.frames)]
            hold.frames = deque((hold.ping, frame) for frame in waiting)

    def heard(self, connection: int, ping: int) -> list[Frame]:
        """A PONG, perhaps of a ping of ours: the frames that need not wait any more, in order."""
        hold = self._holds.get(connection)
        if hold is None or ping > hold.ping:
            return []
        frames: list[Frame] = []
        while hold.frames and hold.frames[0][0] <= ping:
            frames.append(hold.frames.popleft()[1])
        if ping == hold.ping and connection not in self._due:
            del self._holds[connection]
        return frames

    def closed(self, connection: int) -> None:
        """What waited is not published: its client heard nothing of it, and sends it again."""
        self._holds.pop(connection, None)
        self._due.pop(connection, None)

    def flush(self, turn: Turn) -> None:
        """The pings that are due, to be sent behind every REJECTED."""
        due, self._due = self._due, {}
        for connection in due:
            turn.send(connection, encode(Ping(time_us=self._holds[connection].ping)))

    def check(self) -> None:
        for hold in self._holds.values():
            pings = [ping for ping, _ in hold.frames]
            if pings != sorted(pings) or (pings and pings[-1] > hold.ping):
                raise BugError("durable frames wait for pings out of order")
