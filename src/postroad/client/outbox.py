"""What a client has published and no broker has accepted yet.

Events are encoded once, into the batch that is open; a batch is cut when somebody asks for what can be
sent (once per turn of the loop) or when it is large enough to be worth sending early. Cut frames are kept
until the broker accepts or rejects them, so that a new connection can send them again with the same ids
(spec T1): the broker recognises a retry by its id. Everything kept counts against one window.

A frame is plain or durable as a whole, so a publish of the other kind cuts the open batch. Whoever waits for
a durable event knows it by the ordinal of its frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from postroad.errors import BugError, PeerError, TooLargeError, UsageError
from postroad.events import BatchBuilder, EventBatch, Value
from postroad.ids import IdSource, MessageId
from postroad.units import KIB
from postroad.wire.frames import Kind, Limits

# A batch of this size costs the broker next to nothing per event already; a larger one only waits longer.
CUT_BYTES: Final = 128 * KIB
CUT_EVENTS: Final = 1024
MAX_SOURCES: Final = 256  # numbers that it may come back to: one at each of its brokers
# Bytes of a batch that are not events' own: the frame header, and one event header with some slack.
_OVERHEAD_BYTES: Final = 256

_NO_ATTRIBUTES: Final[Mapping[str, Value]] = {}


@dataclass(slots=True)
class _Held:
    """One cut publish frame. `ordinal` counts for ever, `sequence` anew on every connection."""

    ordinal: int
    sequence: int
    frame: bytes
    count: int
    durable: bool
    sent: bool = False  # on this connection or an earlier one


class Outbox:
    """The publish side of one client, over any number of connections."""

    def __init__(self, *, max_bytes: int, max_events: int) -> None:
        self.max_bytes = max_bytes
        self.max_events = max_events
        self.held_bytes = 0  # of _waiting and _sent; the open batch comes on top, less than one cut
        self.held_events = 0
        self.open = False  # a connection is up
        self.room = False  # add() may be called: open, and what is held is within the window
        self._waiting: deque[_Held] = deque()  # cut, not sent on this connection; all newer than _sent
        self._sent: deque[_Held] = deque()  # sent on this connection, neither accepted nor rejected
        self._cut_total = 0
        self._sequence = 0  # of the last frame cut, in this connection's numbering
        self._window = 0  # what the broker announced
        self._credit = 0  # bytes of it the broker is ready to take; one frame may overdraw it
        self._publisher: tuple[int, int] | None = None
        self._prefix = b""  # of the ids of this client's own making
        self._ids: IdSource | None = None
        self._sources: dict[tuple[int, int], IdSource] = {}  # by number and broker, the last used last
        self._limits: Limits | None = None
        self._cut_bytes = CUT_BYTES
        self._cut_events = CUT_EVENTS
        self._builder = BatchBuilder()
        self._durable = False  # what the open batch holds
        self._own = b""  # and its last id, if that is not of this client's own making
        self._stored: list[int] = []  # ordinals of durable frames accepted, until `take_stored`
        self._dropped: list[int] = []  # ordinals of durable frames not taken, until `take_dropped`

    # --- connections

    def opened(self, *, publisher: int, broker: int, limits: Limits, credit: int) -> TooLargeError | None:
        """A broker welcomed us. What it never accepted is to be sent again, in order, numbered from 1.

        A broker with narrower limits than the one before may not take some of it: that is the error.
        """
        self._cut()
        entries = [*self._sent, *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        self._sequence = 0
        dropped = 0
        for entry in entries:
            try:
                batch = EventBatch.parse(entry.frame, limits, expect=Kind.PUBLISH)
            except PeerError:
                self._settle(entry)
                if entry.durable:
                    self._dropped.append(entry.ordinal)
                dropped += entry.count
                continue
            self._sequence += 1
            entry.sequence = self._sequence
            entry.frame = batch.restamped(kind=Kind.PUBLISH, channel=entry.sequence)
            self._waiting.append(entry)
        if self._publisher != (publisher, broker):
            self._publisher = (publisher, broker)
            self._prefix = bytes(MessageId(publisher, broker, 0, 0))[:8]
            # It may have had this number before: what is not above its last id would be taken for a retry.
            self._ids = self._sources.pop(self._publisher, None) or IdSource(publisher, broker)
            self._sources[self._publisher] = self._ids
            if len(self._sources) > MAX_SOURCES:
                del self._sources[next(iter(self._sources))]
        self._limits = limits
        self._window = self._credit = credit
        # The next event always fits into the open batch, so add() need not look at its size first.
        spare = limits.batch_bytes - limits.event_bytes - _OVERHEAD_BYTES
        self._cut_bytes = max(1, min(CUT_BYTES, spare))
        self._cut_events = min(CUT_EVENTS, limits.batch_events)
        self.open = True
        self._measure()
        if dropped:
            return TooLargeError(f"{dropped} events not yet accepted are over the limits of the new broker")
        return None

    def closed(self) -> None:
        self.open = self.room = False

    def expire(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """No broker took the durable frames in time: they go. The ordinals of those never sent, and of those
        sent before, which a broker may have. Whoever waits for plain ones goes on waiting."""
        self._cut()
        gone = [entry for entry in (*self._sent, *self._waiting) if entry.durable]
        for entry in gone:
            self._settle(entry)
        self._sent = deque(entry for entry in self._sent if not entry.durable)
        self._waiting = deque(entry for entry in self._waiting if not entry.durable)
        unsent = tuple(entry.ordinal for entry in gone if not entry.sent)
        return unsent, tuple(entry.ordinal for entry in gone if entry.sent)

    # --- publishing

    def add(
        self,
        topic: str,
        attributes: Mapping[str, Value] | None,
        payload: bytes,
        now_ms: int,
        *,
        durable: bool = False,
        identity: bytes = b"",
    ) -> bytes:
        """Encode one event into the open batch, if there is `room`; its id. UsageError if it cannot be sent.

        The open batch is not counted as held, so the window may be exceeded by one batch.
        """
        ids, limits = self._ids, self._limits
        if ids is None or limits is None:
            raise BugError("published before any broker gave a publisher number")
        if identity and identity[:8] == self._prefix:
            raise UsageError(
                "these are ids of this client's own publisher: what it publishes later would not be taken"
            )
        builder = self._builder
        # A frame is of one kind and of one publisher, and its ids increase.
        other = identity[:8] != self._own[:8] or (identity and identity <= self._own)
        if other or durable is not self._durable:
            self._cut()
            self._durable = durable
        self._own = identity
        identity = identity or ids.next(now_ms)
        builder.add(identity, topic, attributes or _NO_ATTRIBUTES, payload, limits)
        if builder.size >= self._cut_bytes or builder.count >= self._cut_events:
            self._cut()
        return identity

    @property
    def ready(self) -> bool:
        """A whole batch waits and may be sent now, without waiting for the turn to end."""
        return bool(self._waiting) and self._credit > 0 and self.open

    def take(self) -> list[bytes]:
        """The frames to send now. Without credit the open batch stays open and goes on growing."""
        if not self.open:
            return []
        frames: list[bytes] = []
        while self._credit > 0:
            if not self._waiting:
                self._cut()
                if not self._waiting:
                    break
            entry = self._waiting.popleft()
            self._credit -= len(entry.frame)
            entry.sent = True
            self._sent.append(entry)
            frames.append(entry.frame)
        return frames

    def spend(self, size: int) -> bool:
        """Of the credit, for a frame that is neither kept nor answered; False if there is none."""
        if not self.open or self._credit <= 0:
            return False
        self._credit -= size
        return True

    def next_id(self, now_ms: int) -> bytes:
        """For an event that is not sent from here."""
        if self._ids is None:
            raise BugError("an id before any broker gave a publisher number")
        return self._ids.next(now_ms)

    def credit(self, size: int) -> None:
        if size < 1 or self._credit + size > self._window:
            raise PeerError(f"credit for {size} bytes that were not sent")
        self._credit += size

    def _cut(self) -> None:
        builder = self._builder
        if not builder.count:
            return
        self._cut_total += 1
        self._sequence += 1
        count = builder.count
        frame = builder.finish(channel=self._sequence, durable=self._durable)
        self._waiting.append(_Held(self._cut_total, self._sequence, frame, count, self._durable))
        self.held_bytes += len(frame)
        self.held_events += count
        self._measure()

    # --- answers

    def accepted(self, sequence: int) -> None:
        """Every frame up to `sequence` is in its pubend."""
        sent = self._sent
        while sent and sent[0].sequence <= sequence:
            entry = sent.popleft()
            self._settle(entry)
            if entry.durable:
                self._stored.append(entry.ordinal)
        last = sent[-1].sequence if sent else self._sequence - len(self._waiting)
        if sequence > last:
            raise PeerError(f"accepted publish {sequence}, only {last} were sent")

    def rejected(self, sequence: int) -> int:
        """One frame was not taken: how many events it held. It is not sent again, since a retry out of
        order would look like a duplicate."""
        for index, entry in enumerate(self._sent):
            if entry.sequence == sequence:
                del self._sent[index]
                self._settle(entry)
                if entry.durable:
                    self._dropped.append(entry.ordinal)
                return entry.count
        raise PeerError(f"rejected publish {sequence}, which is not open")

    def _settle(self, entry: _Held) -> None:
        self.held_bytes -= len(entry.frame)
        self.held_events -= entry.count
        self._measure()

    def _measure(self) -> None:
        self.room = self.open and self.held_bytes < self.max_bytes and self.held_events < self.max_events

    def mark(self) -> int:
        """A point in what was published, for `settled`."""
        self._cut()
        return self._cut_total

    @property
    def ordinal(self) -> int:
        """Of the frame that holds, or will hold, the event added last."""
        return self._cut_total + (1 if self._builder.count else 0)

    @property
    def whole(self) -> bool:
        """Everything added is in frames that are cut."""
        return not self._builder.count

    def take_stored(self) -> tuple[int, ...]:
        """Durable frames accepted since the last time."""
        taken, self._stored = self._stored, []
        return tuple(taken)

    def take_dropped(self) -> tuple[int, ...]:
        """Durable frames that no broker took since the last time."""
        taken, self._dropped = self._dropped, []
        return tuple(taken)

    def settled(self, mark: int) -> bool:
        """Whether everything published before the mark was accepted or rejected."""
        oldest = self._sent or self._waiting
        return not oldest or oldest[0].ordinal > mark

    @property
    def unsettled(self) -> int:
        """Events published and neither accepted nor rejected."""
        return self.held_events + self._builder.count

    def check(self) -> None:
        entries = [*self._sent, *self._waiting]
        if self.room and not self.open:
            raise BugError("room without a connection")
        if self.held_bytes != sum(len(entry.frame) for entry in entries):
            raise BugError("the outbox miscounts its bytes")
        if self.held_events != sum(entry.count for entry in entries):
            raise BugError("the outbox miscounts its events")
        ordinals = [entry.ordinal for entry in entries]
        if ordinals != sorted(set(ordinals)):
            raise BugError("the outbox is out of order")
        sequences = [entry.sequence for entry in entries]
        last = sequences[-1] if self.open and sequences else self._sequence
        if sequences != sorted(set(sequences)) or last != self._sequence:
            raise BugError("the outbox misnumbers its frames")
