"""Interest that neighbours sent and that is not taken in yet: a turn takes in so much work of it, no more.

A frame may hold thousands of conditions, each of which costs milliseconds. So updates wait in a line per
owner of a table, in the order in which they came; a turn looks at entries of the first line until it has done
its part, and the next turn goes on with the next line. What one owner's subscribers ask for therefore keeps
neither events nor the interest of other owners waiting for long.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from postroad.errors import BugError, PeerError
from postroad.overlay.interest import TEXT_BYTES_PER_OWNER, Intake, Interest
from postroad.seam.peers import Peer
from postroad.wire.frames import InterestUpdate

UNITS_PER_TURN: Final = 20  # of 100 us each
BYTES_PER_LINK: Final = TEXT_BYTES_PER_OWNER  # of texts that wait, of one neighbour


class Taken(NamedTuple):
    """An update that was looked at: its news is to be flooded on, its table to be pulled whole, or the peer
    that sent it to be refused."""

    peer: Peer
    update: InterestUpdate
    news: bool = False
    missing: bool = False
    error: PeerError | None = None


class WaitingUpdates:
    def __init__(self, interest: Interest) -> None:
        self._interest = interest
        # By owner, the next one first; none is empty.
        self._lines: dict[int, deque[tuple[Peer, InterestUpdate]]] = {}
        self._intakes: dict[int, Intake] = {}  # by owner: of the first of its line, if that is begun
        self._bytes: dict[int, int] = {}  # by connection: texts of its updates that wait
        self._units = UNITS_PER_TURN  # that are left of the turn

    def __len__(self) -> int:
        """Updates that wait."""
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, owner: int) -> bool:
        return owner in self._lines

    def add(self, peer: Peer, update: InterestUpdate) -> None:
        """PeerError if that is more than may wait."""
        waiting = self._bytes.get(peer.connection, 0) + _text_bytes(update)
        if waiting > BYTES_PER_LINK:
            raise PeerError(f"{waiting} bytes of interest wait to be taken in; at most {BYTES_PER_LINK} may")
        self._bytes[peer.connection] = waiting
        self._lines.setdefault(update.owner, deque()).append((peer, update))

    def take(self) -> Taken | None:
        """The next one that was looked at, None if there is none or the turn has done its part."""
        while self._lines and self._units > 0:
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            self._lines[owner] = line  # last in the order from now on
            peer, update = line[0]
            try:
                intake = self._intakes.get(owner)
                if intake is None:
                    self._units -= 1
                    intake = self._intakes[owner] = self._interest.begin(update)
                self._units -= intake.step(self._units)
                if not intake.complete:
                    continue
                news, missing = intake.finish()
                taken = Taken(peer, update, news, missing)
            except PeerError as error:
                taken = Taken(peer, update, error=error)
            self._remove_first(owner)
            return taken
        return None

    def end_turn(self) -> None:
        self._units = UNITS_PER_TURN

    def _remove_first(self, owner: int) -> None:
        self._intakes.pop(owner, None)
        line = self._lines[owner]
        peer, update = line.popleft()
        self._uncount(peer, update)
        if not line:
            del self._lines[owner]

    def _uncount(self, peer: Peer, update: InterestUpdate) -> None:
        self._bytes[peer.connection] -= _text_bytes(update)

    def closed(self, connection: int) -> None:
        """What it sent is pulled again, from whoever has it."""
        for owner, line in list(self._lines.items()):
            if line[0][0].connection == connection:
                self._abandon(owner)
            left = deque(item for item in line if item[0].connection != connection)
            if left:
                self._lines[owner] = left
            else:
                del self._lines[owner]
        self._bytes.pop(connection, None)

    def forget(self, owner: int) -> None:
        """That broker is gone for good."""
        self._abandon(owner)
        for peer, update in self._lines.pop(owner, ()):
            self._uncount(peer, update)

    def _abandon(self, owner: int) -> None:
        intake = self._intakes.pop(owner, None)
        if intake is not None:
            intake.abandon()

    def check(self) -> None:
        """BugError unless the comments in `__init__` hold."""
        sizes = dict.fromkeys(self._bytes, 0)
        for line in self._lines.values():
            for peer, update in line:
                sizes[peer.connection] += _text_bytes(update)
        if sizes != self._bytes or not all(self._lines.values()):
            raise BugError("interest that waits is miscounted")
        if not self._lines.keys() >= self._intakes.keys():
            raise BugError("interest is looked at that does not wait")


def _text_bytes(update: InterestUpdate) -> int:
    claims = sum([len(claim.name) + len(claim.principal) for claim in update.claims])
    return claims + sum([len(entry.topic) + len(entry.where) for entry in update.added])
