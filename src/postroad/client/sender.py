"""What a client sends to applications, until brokers keep it (spec Q3, Q4, Q6, Q7; queues paper, 2.3 to 2.5).

A *parcel* is one message, or several that stand together as one transaction. It stays here until it is kept,
is sent again under the same id after every lost connection, and after a pause when a broker says `full`,
`unavailable` or `gap`. A *lane* is what one session sends to one inbox: transactional messages go in their
order there, so while one waits, those behind it wait too; other lanes go on. Each names the one before it
(`after`) that was not given up; none where all before it are kept.

A transactional message names its *chain*, since two networks that were founded apart may meet, and then it
must be known in which one an id was sent first (spec, responsibility 9). The first message of a lane is sent
without one: the broker does not take it, and answers with the chain. From then on the lane stays with that
chain, wherever the client goes: another network refuses its messages until the two are one.

Without an answer for `patience_us` a parcel is given up, and whoever waits for it is told what is known:
never sent, full all the time, or outcome unknown. With `confirm` a kept parcel stays until it is delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from postroad.client.effects import Confirmed, Effect, Kept, Lost, Refused
from postroad.errors import (
    BugError,
    FullError,
    PeerError,
    PostroadError,
    UnavailableError,
    UndeliveredError,
    UsageError,
    from_wire,
)
from postroad.ids import first_number
from postroad.links.handshake import printable
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import MAX_BODY_BYTES, Posting

MAX_UNKEPT: Final = 4_096  # messages
MAX_UNKEPT_BYTES: Final = 8 * MIB
MAX_CONFIRMING: Final = 65_536  # messages that are kept and whose delivery is awaited
MAX_TOGETHER: Final = 256  # messages of one SEND
MAX_TRANSACTION_BYTES: Final = 700 * KIB  # what brokers write at once
MAX_LANES: Final = 10_000  # remembered; of idle ones, the oldest are forgotten
MAX_UNANSWERED: Final = 1_024  # SENDs without an answer whose errors are still told
MAX_ID: Final = (1 << 62) - 1
MAX_CHAIN_BYTES: Final = 64
POSTING_BYTES: Final = 600  # of a message on the wire beside its payload and attributes
PAUSE_US: Final = 20 * MILLISECOND_US  # before a lane tries again, doubled each time
MAX_PAUSE_US: Final = SECOND_US
_NUMBERS: Final = 1 << 32


@dataclass(slots=True, eq=False)
class Lane:
    """From one session to one inbox."""

    unkept: int = 0  # parcels
    last: int = 0  # the transactional id that was added last
    dropped: dict[int, int] = field(default_factory=dict)  # ids given up -> the id before each
    chain: bytes = b""  # that its transactional messages are first sent in; b"": nobody said so yet
    asking: bool = False  # a message is on its way that is answered with the chain
    pause_us: int = 0
    resume_us: int = 0  # nothing is sent before

    def before(self, identity: int) -> int:
        """The last id up to this one that was not given up."""
        while identity in self.dropped:
            identity = self.dropped[identity]
        return identity


@dataclass(slots=True, eq=False)
class Session:
    source: str
    session: bytes
    last: int = 0  # id
    unkept: int = 0  # parcels
    used: bool = False
    ended: bool = False


@dataclass(slots=True, eq=False)
class Parcel:
    ordinal: int
    session: Session
    form: str
    reliable: bool
    together: bool
    confirm: bool
    postings: list[Posting]
    lanes: list[Lane]  # of each posting
    size: int
    added_us: int
    sent: bool = False
    kept: bool = False
    refused: PostroadError | None = None  # why it was not kept the last time
    undelivered: set[int] = field(default_factory=set)  # places

    @property
    def ordered(self) -> bool:
        return self.form == "transactional"

    @property
    def named(self) -> bool:
        """Whether a broker that gets it may keep it."""
        return not self.ordered or all(lane.chain for lane in self.lanes)


class Sender:
    """All that the applications of one client send."""

    def __init__(self, patience_us: int) -> None:
        self._patience_us = patience_us
        self._unkept: dict[int, Parcel] = {}  # by ordinal, oldest first
        self._confirming: dict[int, Parcel] = {}  # kept, not delivered
        self._waiting: dict[int, Parcel] = {}  # of both, those to be sent; by ordinal, oldest first
        self._flights: dict[int, list[Parcel]] = {}  # sent on this connection, by number of the SEND
        self._unanswered: deque[int] = deque(maxlen=MAX_UNANSWERED)  # numbers of unreliable SENDs
        self._lanes: dict[tuple[bytes, str, bool], Lane] = {}
        self._sessions: dict[bytes, Session] = {}
        self._last_ordinal = 0
        self._last_number = 0
        self.messages = 0  # unkept
        self.bytes = 0  # of them
        self.open = False

    @property
    def room(self) -> bool:
        return self.open and self.messages < MAX_UNKEPT and self.bytes < MAX_UNKEPT_BYTES

    @property
    def unsettled(self) -> int:
        """Messages that are not kept yet."""
        return self.messages

    # --- the connection

    def opened(self) -> None:
        self.open = True

    def closed(self) -> None:
        """All that is not settled is to be sent again."""
        self.open = False
        self._flights.clear()
        self._unanswered.clear()
        self._last_number = 0
        for lane in self._lanes.values():
            lane.asking = False
        self._waiting = dict(sorted({**self._unkept, **self._confirming}.items()))

    # --- the application's side

    def begin_session(self, source: str, session: bytes) -> None:
        self._sessions[session] = Session(source, session)

    def end_session(self, session: bytes) -> wire.EndSession | None:
        """In good order, if all that it sent is kept."""
        closing = self._sessions.pop(session, None)
        if closing is None:
            return None
        closing.ended = True
        for key in [key for key, lane in self._lanes.items() if key[0] == session and not lane.unkept]:
            del self._lanes[key]
        if not closing.used or closing.unkept or not self.open:
            return None
        return wire.EndSession(source=closing.source, session=session)

    def add(
        self,
        session: bytes,
        form: str,
        postings: Sequence[Posting],
        now_us: int,
        *,
        skew_us: int = 0,
        reliable: bool,
        together: bool,
        confirm: bool,
    ) -> list[tuple[int, int]]:
        """Queue messages, without ids, if there is `room`: an ordinal of a parcel and an id for each.

        Ids have the time of the broker, whose clock is `skew_us` ahead of ours. Patience has our own.
        """
        sender = self._sessions.get(session)
        if sender is None:
            raise UsageError("this application is closed")
        if confirm and len(self._confirming) + len(postings) > MAX_CONFIRMING:
            raise FullError(
                f"{MAX_CONFIRMING} messages are kept and not delivered, of which you wait to hear"
            )
        if together:
            return self._add(sender, form, postings, now_us, skew_us, reliable, together, confirm)
        return [
            entry
            for posting in postings
            for entry in self._add(sender, form, [posting], now_us, skew_us, reliable, together, confirm)
        ]

    def _add(
        self,
        sender: Session,
        form: str,
        postings: Sequence[Posting],
        now_us: int,
        skew_us: int,
        reliable: bool,
        together: bool,
        confirm: bool,
    ) -> list[tuple[int, int]]:
        self._last_ordinal += 1
        parcel = Parcel(
            ordinal=self._last_ordinal,
            session=sender,
            form=form,
            reliable=reliable,
            together=together,
            confirm=confirm,
            postings=[],
            lanes=[],
            size=0,
            added_us=now_us,
            undelivered=set(range(len(postings))) if confirm else set(),
        )
        for posting in postings:
            lane = self._lane(sender.session, posting.inbox, parcel.ordered)
            sender.last = max(sender.last + 1, first_number((now_us + skew_us) // MILLISECOND_US))
            if sender.last > MAX_ID:
                raise BugError(f"id {sender.last} is over {MAX_ID}")
            # What is kept cannot be passed, and an inbox may have forgotten its sender since.
            after = lane.last if parcel.ordered and lane.unkept else 0
            parcel.postings.append(replace(posting, id=sender.last, after=after))
            if parcel.ordered:
                lane.last = sender.last
            lane.unkept += 1
            parcel.lanes.append(lane)
            parcel.size += len(posting.payload) + len(posting.attributes) + POSTING_BYTES
        sender.used = True
        sender.unkept += 1
        self._unkept[parcel.ordinal] = self._waiting[parcel.ordinal] = parcel
        self.messages += len(parcel.postings)
        self.bytes += parcel.size
        return [(parcel.ordinal, posting.id) for posting in parcel.postings]

    def _lane(self, session: bytes, inbox: str, ordered: bool) -> Lane:
        key = (session, inbox, ordered)
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                # What was sent there before is kept, so nothing can be passed.
                for other in [other for other, idle in self._lanes.items() if not idle.unkept]:
                    del self._lanes[other]
            lane = self._lanes[key] = Lane()
        return lane

    # --- sending

    def take(self, now_us: int) -> tuple[list[wire.Send], list[Effect]]:
        """What is to be sent now; and what is done with that, since nobody will answer."""
        if not self.open or not self._waiting:
            return [], []
        chosen: list[Parcel] = []
        blocked: set[Lane] = set()
        for parcel in self._waiting.values():
            if any(lane in blocked or lane.asking or lane.resume_us > now_us for lane in parcel.lanes):
                blocked.update(parcel.lanes if parcel.ordered else ())
                continue
            chosen.append(parcel)
            if not parcel.named:
                blocked.update(parcel.lanes)
                for lane in parcel.lanes:
                    lane.asking = not lane.chain
        sends: list[wire.Send] = []
        effects: list[Effect] = []
        for parcels in _shared(chosen):
            sends.append(self._send(parcels))
            if parcels[0].reliable:
                self._flights[self._last_number] = parcels
            else:
                self._unanswered.append(self._last_number)
                self._settle(parcels)
                effects.append(Kept(ordinals=tuple(parcel.ordinal for parcel in parcels)))
        return sends, effects

    def _send(self, parcels: list[Parcel]) -> wire.Send:
        first = parcels[0]
        self._last_number = self._last_number % (_NUMBERS - 1) + 1
        messages: list[Posting] = []
        for parcel in parcels:
            parcel.sent = parcel.sent or parcel.named
            del self._waiting[parcel.ordinal]
            for place, (posting, lane) in enumerate(zip(parcel.postings, parcel.lanes, strict=True)):
                # The chain of the first time stays with the id; what it comes after may be given up since.
                after, chain = lane.before(posting.after), posting.chain or lane.chain
                if after != posting.after or chain != posting.chain:
                    posting = parcel.postings[place] = replace(posting, after=after, chain=chain)
                messages.append(posting)
        return wire.Send(
            number=self._last_number,
            source=first.session.source,
            session=first.session.session,
            form=first.form,
            messages=tuple(messages),
            reliable=first.reliable,
            together=first.together,
            confirm=first.confirm,
        )

    # --- answers

    def sent(self, message: wire.Sent, now_us: int) -> list[Effect]:
        """PeerError if it cannot be true."""
        if len(message.chain) > MAX_CHAIN_BYTES:
            raise PeerError(f"a chain of {len(message.chain)} bytes, at most {MAX_CHAIN_BYTES} are possible")
        parcels = self._flights.get(message.number)
        if parcels is None:
            return self._late(message)
        places = _places(parcels, message.places)
        if message.state == "kept":
            effects = self._kept(places, message.chain)
        elif message.state == "delivered":
            effects = self._kept(places, message.chain) + self._delivered(places)
        elif message.state == "dead":
            effects = self._kept(places, message.chain) + self._undelivered(places)
        elif message.state == "gap" or message.code in ("full", "unavailable"):
            error = from_wire(message.code or "unavailable", printable(message.reason or "it came too early"))
            effects = self._send_later(places, message.chain, error, now_us)
        elif message.code:
            error = from_wire(message.code, printable(message.reason))
            effects = self._refuse([parcel for parcel, _ in places], error)
        else:
            raise PeerError(f"SENT says {message.state!r}, which is no state of a message")
        if not any(self._in_flight(parcel) for parcel in parcels):
            self._flights.pop(message.number, None)
        return effects

    def _late(self, message: wire.Sent) -> list[Effect]:
        """About what was given up, or what needs no answer."""
        if not 1 <= message.number <= self._last_number:
            raise PeerError(f"SENT {message.number}, only {self._last_number} were sent")
        if message.number in self._unanswered and message.code:
            return [Lost(error=from_wire(message.code, f"not sent: {printable(message.reason)}"))]
        return []

    def _in_flight(self, parcel: Parcel) -> bool:
        """Whether an answer is still to come on this connection."""
        ordinal = parcel.ordinal
        return (ordinal in self._unkept or ordinal in self._confirming) and ordinal not in self._waiting

    def _kept(self, places: list[tuple[Parcel, int]], chain: bytes) -> list[Effect]:
        done: list[Parcel] = []
        for parcel, place in places:
            lane = parcel.lanes[place]
            lane.pause_us = lane.resume_us = 0
            self._learn(parcel, place, chain)
            if not parcel.kept and parcel.ordinal in self._unkept:
                parcel.kept = True
                done.append(parcel)
        self._settle(done)
        for parcel in done:
            if parcel.confirm:
                self._confirming[parcel.ordinal] = parcel
        return [Kept(ordinals=tuple(parcel.ordinal for parcel in done))] if done else []

    @staticmethod
    def _learn(parcel: Parcel, place: int, chain: bytes) -> None:
        """The chain of the first time stays: with the id, and of transactional messages with the lane."""
        lane, posting = parcel.lanes[place], parcel.postings[place]
        lane.asking = False
        if chain and not posting.chain:
            parcel.postings[place] = replace(posting, chain=lane.chain or chain)
        if chain and parcel.ordered and not lane.chain:
            lane.chain = chain

    def _delivered(self, places: list[tuple[Parcel, int]]) -> list[Effect]:
        done: list[int] = []
        for parcel, place in places:
            parcel.undelivered.discard(place)
            if not parcel.undelivered and self._confirming.pop(parcel.ordinal, None) is not None:
                self._waiting.pop(parcel.ordinal, None)
                done.append(parcel.ordinal)
        return [Confirmed(ordinals=tuple(done))] if done else []

    def _undelivered(self, places: list[tuple[Parcel, int]]) -> list[Effect]:
        """Nobody will accept these: they are dead letters, have expired or were dropped."""
        gone = [parcel.ordinal for parcel in dict.fromkeys(parcel for parcel, _ in places)]
        done = [ordinal for ordinal in gone if self._confirming.pop(ordinal, None) is not None]
        for ordinal in done:
            self._waiting.pop(ordinal, None)
        error = UndeliveredError("nobody accepted it: it has expired, is a dead letter, or was dropped")
        return [Confirmed(ordinals=tuple(done), error=error)] if done else []

    def _send_later(
        self, places: list[tuple[Parcel, int]], chain: bytes, error: PostroadError, now_us: int
    ) -> list[Effect]:
        for parcel, place in places:
            lane = parcel.lanes[place]
            asked = not parcel.named
            self._learn(parcel, place, chain)
            if asked and chain and not parcel.named:
                continue  # the chains of its other inboxes are still to come
            if parcel.ordinal in self._unkept or parcel.ordinal in self._confirming:
                self._waiting[parcel.ordinal] = parcel
                if not asked:
                    parcel.refused = error
            if lane.resume_us <= now_us and not (asked and chain):
                lane.pause_us = min(max(2 * lane.pause_us, PAUSE_US), MAX_PAUSE_US)
                lane.resume_us = now_us + lane.pause_us
        self._waiting = dict(sorted(self._waiting.items()))
        return []

    def _refuse(self, parcels: Iterable[Parcel], error: PostroadError) -> list[Effect]:
        """They are given up: nothing comes after their ids."""
        gone = [parcel for parcel in dict.fromkeys(parcels) if parcel.ordinal in self._unkept]
        for parcel in gone:
            self._waiting.pop(parcel.ordinal, None)
            if parcel.ordered:
                for posting, lane in zip(parcel.postings, parcel.lanes, strict=True):
                    lane.asking = False
                    lane.dropped[posting.id] = posting.after
        self._settle(gone)
        return [Refused(ordinals=tuple(parcel.ordinal for parcel in gone), error=error)] if gone else []

    def _settle(self, parcels: Iterable[Parcel]) -> None:
        for parcel in parcels:
            del self._unkept[parcel.ordinal]
            parcel.session.unkept -= 1
            self.messages -= len(parcel.postings)
            self.bytes -= parcel.size
            for lane in parcel.lanes:
                lane.unkept -= 1
                if not lane.unkept:
                    lane.last = lane.before(lane.last)
                    lane.dropped.clear()

    # --- time

    def next_deadline(self) -> int | None:
        oldest = next(iter(self._unkept.values()), None)
        times = [] if oldest is None else [oldest.added_us + self._patience_us]
        if self.open:
            times += [
                lane.resume_us
                for parcel in self._waiting.values()
                if not any(lane.asking for lane in parcel.lanes)
                for lane in parcel.lanes
                if lane.resume_us
            ]
        return min(times, default=None)

    def tick(self, now_us: int) -> list[Effect]:
        """What waited for too long is given up."""
        late = []
        for parcel in self._unkept.values():
            if parcel.added_us + self._patience_us > now_us:
                break
            late.append(parcel)
        return self._give_up(late, "no broker has kept it in time")

    def expire(self, error: PostroadError) -> list[Effect]:
        """There has been no broker for too long."""
        return self._give_up(list(self._unkept.values()), str(error))

    def _give_up(self, parcels: list[Parcel], why: str) -> list[Effect]:
        effects: list[Effect] = []
        for error, some in groupby(parcels, key=lambda parcel: _known_of(parcel, why)):
            effects += self._refuse(list(some), error[0](error[1]))
        return effects

    def check(self) -> None:
        """The invariants."""
        if self.messages != sum(len(parcel.postings) for parcel in self._unkept.values()):
            raise BugError("the sender miscounts its messages")
        if self.bytes != sum(parcel.size for parcel in self._unkept.values()):
            raise BugError("the sender miscounts its bytes")
        if not self._waiting.keys() <= self._unkept.keys() | self._confirming.keys():
            raise BugError("something waits to be sent that is settled")
        if list(self._waiting) != sorted(self._waiting) or list(self._unkept) != sorted(self._unkept):
            raise BugError("the sender is out of order")
        if any(lane.unkept < 0 or (lane.dropped and not lane.unkept) for lane in self._lanes.values()):
            raise BugError("a lane miscounts its parcels")


def _shared(parcels: list[Parcel]) -> list[list[Parcel]]:
    """Which of them travel in one SEND: neighbours of one session and form, up to its limits."""
    shared: list[list[Parcel]] = []
    size = 0
    for parcel in parcels:
        first = shared[-1][0] if shared else None
        fits = (
            first is not None
            and not first.together
            and not parcel.together
            and first.session is parcel.session
            and (first.form, first.reliable, first.confirm) == (parcel.form, parcel.reliable, parcel.confirm)
            and first.named == parcel.named
            and len(shared[-1]) < MAX_TOGETHER
            and size + parcel.size <= MAX_BODY_BYTES
        )
        if fits:
            shared[-1].append(parcel)
            size += parcel.size
        else:
            shared.append([parcel])
            size = parcel.size
    return shared


def _places(parcels: list[Parcel], places: tuple[int, ...]) -> list[tuple[Parcel, int]]:
    """The parcels that an answer is about, with the place of the message within each."""
    first = parcels[0]
    count = len(first.postings) if first.together else len(parcels)
    if any(not 0 <= place < count for place in places):
        raise PeerError(f"SENT is about message {max(places)} of {count}")
    return [(first, place) if first.together else (parcels[place], 0) for place in places or range(count)]


def _known_of(parcel: Parcel, why: str) -> tuple[type[PostroadError], str]:
    if not parcel.sent:
        return UnavailableError, f"not sent, and withdrawn: {why}"
    if isinstance(parcel.refused, FullError):
        return FullError, f"not kept, and withdrawn: {parcel.refused}"
    known = f" ({parcel.refused})" if parcel.refused is not None else ""
    return UnavailableError, f"outcome unknown: sent, perhaps kept, and not sent again: {why}{known}"
