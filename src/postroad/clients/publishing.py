"""Publishers: the numbers their ids bear, and what of their frames is new.

A publisher's ids only increase, and whatever it sends again bears the id it had before. So the last id
accepted from it tells what is a repetition (idempotent publishing). The number of a publisher holds the
start of the broker that gave it out, so that a number is not given out again soon after a restart.

Answers are cumulative per connection: ACCEPTED(n) settles every frame up to n. A durable frame is settled
when it is synced, so it holds back the answer to plain frames that came after it on the same connection;
who wants both fast uses two connections.

A client that went on here from another broker, or from an earlier start of this one, may still send what
was not accepted there, under the ids it has given to its application. Such ids are remembered for that
client alone: nobody can use up the ids of others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from postroad.errors import BugError, PeerError
from postroad.events.batch import EventBatch
from postroad.ids import COUNT_BITS, DEAD_LETTERS_PUBLISHER, LAST_COUNT, Identity, MessageId
from postroad.seam.peers import Peer
from postroad.wire.frames import Limits

MAX_PUBLISHERS: Final = 100_000  # whose last id is remembered
# The first and the last count are never given out: the broker itself publishes with them.
_COUNTS: Final = LAST_COUNT - 1
FILTERS_PUBLISHER: Final = LAST_COUNT  # of stored filters, at every start


def runs_within(batches: Sequence[EventBatch], limits: Limits) -> list[list[EventBatch]]:
    """Runs of batches, each of which fits one frame."""
    runs: list[list[EventBatch]] = []
    size = count = 0
    for batch in batches:
        size, count = size + len(batch.data), count + batch.count
        if not runs or size > limits.batch_bytes or count > limits.batch_events:
            runs.append([])
            size, count = len(batch.data), batch.count
        runs[-1].append(batch)
    return runs


@dataclass(slots=True, eq=False)
class Waiting:
    """A frame in the order of its connection."""

    connection: int
    sequence: int
    settled: bool = False
    accepted: bool = False


class Receipts:
    """How far the publish frames of each connection are settled, in the order they came."""

    __slots__ = ("_due", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Waiting]] = {}  # by connection: from the first that is not settled on
        self._due: dict[int, int] = {}  # connection -> sequence to be told

    def accept(self, connection: int, sequence: int) -> None:
        """A frame that is accepted as it comes."""
        waiting = self._waiting.get(connection)
        if waiting is None:
            self._due[connection] = sequence
        elif waiting[-1].settled:  # it stands for the earlier one too
            waiting[-1].sequence, waiting[-1].accepted = sequence, True
        else:
            waiting.append(Waiting(connection, sequence, settled=True, accepted=True))

    def wait(self, connection: int, sequence: int) -> Waiting:
        """A frame that is settled later."""
        entry = Waiting(connection, sequence)
        self._waiting.setdefault(connection, deque()).append(entry)
        return entry

    def settle(self, entry: Waiting, *, accepted: bool) -> None:
        entry.settled, entry.accepted = True, accepted
        waiting = self._waiting.get(entry.connection)
        if waiting is None:
            return  # its connection is closed
        while waiting and waiting[0].settled:
            first = waiting.popleft()
            if first.accepted:
                self._due[entry.connection] = first.sequence
        if not waiting:
            del self._waiting[entry.connection]

    def waits(self, connection: int) -> bool:
        """Whether a frame of it is not answered."""
        return connection in self._waiting or connection in self._due

    def closed(self, connection: int) -> None:
        self._waiting.pop(connection, None)
        self._due.pop(connection, None)

    def take(self) -> dict[int, int]:
        """The answers that are due: connection -> the highest sequence settled."""
        due, self._due = self._due, {}
        return due

    def check(self) -> None:
        if any(not waiting or waiting[0].settled for waiting in self._waiting.values()):
            raise BugError("publish frames are settled and not answered")


class Publishers:
    __slots__ = ("_count", "_last_ids", "_me", "_start", "repeated")

    def __init__(self, me: Identity) -> None:
        self._me = me.number
        self._start = me.starts % (1 << 32 - COUNT_BITS)
        self._count = 0
        self._last_ids: OrderedDict[bytes, bytes] = OrderedDict()  # whose ids -> time and counter of the last
        self.repeated = 0  # events that had been accepted before

    def __len__(self) -> int:
        return len(self._last_ids)

    def new_number(self) -> int:
        """For a publisher that connects (spec T1, traps)."""
        self._count += 1
        return self._start << COUNT_BITS | (self._count - 1) % _COUNTS + 1

    @property
    def own_number(self) -> int:
        """Of what the broker publishes about itself in this start."""
        return self._start << COUNT_BITS

    def check(self, peer: Peer, batch: EventBatch) -> bytes:
        """What names the publisher of a frame's ids: their first 8 bytes, and behind those the peer's number
        where the ids were drawn elsewhere. PeerError unless they can be this peer's."""
        if batch.count == 0 or batch.pubend:
            raise PeerError(
                f"a publish frame of {batch.count} events for pubend {batch.pubend:x}; it has at least one"
                " event, and pubend 0"
            )
        if batch.count > 1:
            halves = np.frombuffer(batch.ids(), ">u8")
            prefixes, rests = halves[::2], halves[1::2]
            if not bool((prefixes == prefixes[0]).all()):
                other = int((prefixes != prefixes[0]).argmax())
                raise PeerError(
                    "a publish frame with ids of several publishers:"
                    f" {MessageId.from_bytes(batch.id(0))} and {MessageId.from_bytes(batch.id(other))}"
                )
            if not bool((rests[1:] > rests[:-1]).all()):
                row = int((rests[1:] <= rests[:-1]).argmax())
                raise PeerError(
                    "a publish frame whose ids do not increase:"
                    f" {MessageId.from_bytes(batch.id(row + 1))} after {MessageId.from_bytes(batch.id(row))}"
                )
        prefix = batch.id(0)[:8]
        if prefix == (peer.publisher << 32 | self._me).to_bytes(8, "big"):  # drawn here
            return prefix
        publisher, broker = int.from_bytes(prefix[:4], "big"), int.from_bytes(prefix[4:], "big")
        if broker == self._me and (
            publisher >> COUNT_BITS == self._start or publisher == DEAD_LETTERS_PUBLISHER
        ):
            raise PeerError(
                f"a publish frame with the ids of publisher {publisher:08x} of this broker; this connection's"
                f" is {peer.publisher:08x}"
            )
        return prefix + peer.publisher.to_bytes(4, "big")

    def fresh(self, whose: bytes, batch: EventBatch, newest: bytes) -> EventBatch | None:
        """The events of a checked frame that were not accepted before, None if all were; `newest` is the
        last id in it."""
        last = newest[8:]
        rest = last if batch.count == 1 else batch.id(0)[8:]
        before = self._last_ids.get(whose, b"")
        if last > before:
            self._last_ids[whose] = last
            self._last_ids.move_to_end(whose)
            if len(self._last_ids) > MAX_PUBLISHERS:
                self._last_ids.popitem(last=False)
        if rest > before:
            return batch
        repeats = sum(batch.id(row)[8:] <= before for row in range(batch.count))
        self.repeated += repeats
        return None if repeats == batch.count else batch.slice(repeats, batch.count)
