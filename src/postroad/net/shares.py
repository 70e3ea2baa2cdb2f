"""Shares of a turn: of what each connection sends a turn takes a little, and the rest waits in line.

Events are handled in the turn in which they come, all of them, up to a bound: what comes beyond waits, and so
does what asks for work, and what the same connection sends behind either. The bound is in bytes. Where the
core takes long for as many (somebody's conditions cost a lot), fewer of them are a turn.

A request may cost a thousand times its bytes, and a reply much more. So frames that ask for work wait in a
line per connection. A turn takes one from every line, one connection after the other, until its time is over:
whatever is asked for, it takes at most one frame longer than that. What frames leave to do at the end of a
turn is known only then: after a turn that took too long all the same, the next one takes fewer. A connection
whose line is long is not read from: what it sends beyond waits in its own socket. One that does not read its
replies is served nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from postroad.seam.inputs import Closed, Received
from postroad.units import KIB, MIB, MILLISECOND_US
from postroad.wire.frames import Kind

if TYPE_CHECKING:
    from postroad.net.server import Connection

ASKING: Final = frozenset(
    map(int, (Kind.REQUEST, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE, Kind.RECEIVE, Kind.UNRECEIVE))
)
LONG_LINE: Final = 256  # frames of a connection that wait before it is not read from
SHORT_LINE: Final = 64  # it is read from again
LINE_BYTES: Final = MIB  # of a connection's frames that wait before it is not read from
ASKING_US: Final = 2 * MILLISECOND_US  # a turn that took so long with asking frames takes no more of them
TURN_US: Final = 5 * MILLISECOND_US  # where all of a turn takes longer, the next one takes fewer
MAX_SHARE: Final = 128  # asking frames in one turn, of all connections together
TURN_BYTES: Final = MIB  # that a turn takes at most, of all connections together
LEAST_BYTES: Final = 16 * KIB  # that it takes at least
EVENTS_US: Final = 10 * MILLISECOND_US  # for which the core should have done with the events of a turn
FRAME_BYTES: Final = 4 * KIB  # that each frame counts for besides: small ones cost as much
PIECE_BYTES: Final = 64 * KIB  # that it takes of one connection before it looks at the next
UNREAD_BYTES: Final = MIB  # replies that wait for a peer to read them


class Shares:
    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lines: dict[Connection, deque[bytes]] = {}  # none is empty; the next to be served comes first
        self._bytes: dict[Connection, int] = {}  # of those lines
        self._paused: set[Connection] = set()  # of these, those that are not read from
        self._gone: set[Connection] = set()  # of these, those that are closed
        self._share = MAX_SHARE  # asking frames in the next turn
        self._turn_bytes = TURN_BYTES  # that the next turn takes
        self._come_bytes = 0  # for this turn, without what waits
        self._served_bytes = 0  # of what waited, in the last turn; 0 if some of that asked for work
        self.stalled = False  # all that wait have replies to read first
        self.taken: list[Received | Closed] = []  # in the last turn

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def frames(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting_bytes(self, connection: Connection) -> int:
        return self._bytes.get(connection, 0)

    def add(self, connection: Connection, frames: Sequence[bytes]) -> bool:
        """Whether these wait, since one of them asks for something, earlier ones wait or too much came."""
        line = self._lines.get(connection)
        if line is None:
            come_bytes = self._come_bytes + sum(map(len, frames)) + FRAME_BYTES * len(frames)
            if come_bytes <= self._turn_bytes and not any(frame[4] in ASKING for frame in frames):
                self._come_bytes = come_bytes
                return False
            line = self._lines[connection] = deque()
            self._bytes[connection] = 0
        line.extend(frames)
        self._bytes[connection] += sum(map(len, frames))
        is_long = len(line) > LONG_LINE or self._bytes[connection] > LINE_BYTES
        if is_long and connection not in self._paused:
            self._paused.add(connection)
            connection.transport.pause_reading()
        return True

    def begin_turn(self) -> int:
        """The bytes that came for this turn. What comes from now on is for the next one."""
        come_bytes, self._come_bytes = self._come_bytes, 0
        return come_bytes

    def take(self) -> Iterator[Received | Closed]:
        """What this turn handles of those that wait: whoever handles one asks for the next."""
        self.taken = []
        return self._serve(self.taken)

    def _serve(self, taken: list[Received | Closed]) -> Iterator[Received | Closed]:
        ready = deque(connection for connection in self._lines if self._is_ready(connection))
        self.stalled = bool(self._lines) and not ready
        end_ns = self._clock_ns() + ASKING_US * 1_000
        left, left_bytes = self._share, self._turn_bytes
        self._served_bytes = 0
        while ready and left and left_bytes > 0 and (not taken or self._clock_ns() < end_ns):
            connection = ready.popleft()
            for frame in self._take_from(connection, min(PIECE_BYTES, left_bytes)):
                left_bytes -= len(frame) + FRAME_BYTES
                taken.append(Received(connection=connection.number, frame=frame))
                yield taken[-1]
            left -= frame[4] in ASKING
            if connection not in self._lines:
                if connection in self._gone:
                    self._gone.discard(connection)
                    taken.append(Closed(connection=connection.number))
                    yield taken[-1]
            elif self._is_ready(connection):
                ready.append(connection)
        if left == self._share:
            self._served_bytes = self._turn_bytes - left_bytes

    def _is_ready(self, connection: Connection) -> bool:
        """Whoever does not read its replies may still say what asks for none: two brokers that wait for each
        other to read would wait for good."""
        is_asking = self._lines[connection][0][4] in ASKING
        return not is_asking or connection.transport.get_write_buffer_size() <= UNREAD_BYTES

    def _take_from(self, connection: Connection, most_bytes: int) -> list[bytes]:
        """A piece: one frame that asks for something, or all before the next that does, up to so many bytes.
        The connection is last in the order from now on."""
        line = self._lines.pop(connection)
        taken = [line.popleft()]
        weight = len(taken[0]) + FRAME_BYTES
        while line and weight < most_bytes and not (taken[0][4] in ASKING or line[0][4] in ASKING):
            taken.append(line.popleft())
            weight += len(taken[-1]) + FRAME_BYTES
        waiting_bytes = self._bytes.pop(connection) - sum(map(len, taken))
        if line:
            self._lines[connection] = line
            self._bytes[connection] = waiting_bytes
        is_short = len(line) <= SHORT_LINE and waiting_bytes <= LINE_BYTES // 2
        if is_short and connection in self._paused:
            self._paused.discard(connection)
            connection.transport.resume_reading()
        return taken

    def handled(self, size: int, microseconds: int) -> None:
        """The core took so long for events of so many bytes. Only a turn that was full shows that it may take
        more."""
        if microseconds > EVENTS_US:
            self._turn_bytes = min(self._turn_bytes, max(LEAST_BYTES, size * EVENTS_US // microseconds))
        elif 2 * size >= self._turn_bytes:
            self._turn_bytes = min(TURN_BYTES, 2 * self._turn_bytes)

    def took(self, microseconds: int, handled_us: int) -> None:
        """A turn with a share in it took so long, and the core of that."""
        if self._served_bytes:
            self.handled(self._served_bytes, handled_us)
        if microseconds > TURN_US:
            self._share = max(1, self._share // 2)
        else:
            self._share = min(MAX_SHARE, self._share + max(1, self._share // 4))

    def forget(self, connection: Connection) -> bool:
        """It is closed: what it asked for is not answered; what it said besides, such as an ACK, counts.
        Whether there is any of that: then its Closed comes behind it, in one of the next turns."""
        self._paused.discard(connection)
        self._bytes.pop(connection, None)
        said = deque(frame for frame in self._lines.pop(connection, ()) if frame[4] not in ASKING)
        if said:
            self._lines[connection] = said
            self._bytes[connection] = sum(map(len, said))
            self._gone.add(connection)
        return bool(said)
