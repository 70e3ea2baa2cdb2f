"""Durable subscriptions that move between brokers: claims, and tokens handed over (spec D10).

A broker claims a name when its subscription is on disk, and again at every attach: the claim with the
highest epoch has the name, so the latest attach does. Whoever hears a higher claim on a name of its own ends
the connection there and lets go, after a while (`subscriptions`).

A subscriber that brings its token goes on at once, wherever it comes. One whose token is kept by a broker
waits here until that broker has handed it over. Handing over is not letting go: until the claim of the new
broker is heard, the former one has the subscription, so nothing is lost if the new one dies before its disk
has it.

Where that broker cannot be asked, because it is dead or out of reach, what the client remembers serves: it
saw all that it acknowledged (spec D11). That holds for whoever was attached last, so it says which attachment
it remembers, by its epoch. Who remembers nothing, or somebody else was attached since, waits for the broker.

Claims are heard by everybody who is there while their broker is. A broker that joined or was cut off may have
missed one, and its broker may be away since; the others have it on their disks. So before a name begins that
is not known here, all brokers in reach are asked what they know of it, once for all such names of a turn. A
token does not replace that: it proves a position, and not to whom the name belongs.

A name is deleted where it is. A former broker that is away then holds what it has, and claims it when it is
back. Whoever knows better (`claims`) tells it so, once a second until it has withdrawn its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from postroad.durable.subscriber.claims import NOBODY, Row
from postroad.durable.subscriber.subscriptions import Subscription, Subscriptions, fingerprint
from postroad.errors import (
    BugError,
    DeniedError,
    MovedError,
    PeerError,
    PostroadError,
    UnavailableError,
    UsageError,
    from_wire,
)
from postroad.events.token import CheckpointToken
from postroad.ids import principal_fits
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Heard, Interest
from postroad.overlay.interest_entries import MAX_EPOCH, Claim, check_claim
from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.units import SECOND_US
from postroad.wire.fields import Broker, Key, Name, Number, Text, Topic, Where, Whole, Word
from postroad.wire.frames import Ack, Ended, InterestUpdate, Subscribe, decode_body, encode

HANDOVER: Final = "handover"
CLAIMS: Final = "claims"
DELETED: Final = "deleted"
HANDOVER_US: Final = 5 * SECOND_US  # brokers have this long to answer
MAX_WAITING: Final = 100_000  # subscribers that wait for their tokens, or for what others know
MAX_NAMES: Final = 1_000  # of a question
MAX_REFERRALS: Final = 4  # brokers that may say "it is there", one after the other


class _Request(msgspec.Struct, frozen=True, array_like=True):
    name: Name
    topic: Topic
    where: Where
    shared: bool
    key: Text
    principal: Name = ""  # who asks for it; "": nobody in particular
    admin: bool = False  # it may use the names of others


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The token; or where to ask (`elsewhere`); or why not; or nothing: the name is not known there."""

    token: Whole = ""
    elsewhere: Broker = 0
    code: Word = ""
    reason: Text = ""
    born: Number = 0
    principal: Name = ""  # that it belongs to


class _Known(msgspec.Struct, frozen=True, array_like=True):
    name: Name
    epoch: Number
    broker: Broker
    version: Number
    principal: Name = ""
    born: Number = 0
    fingerprint: Key = b""


_Names: TypeAlias = Annotated[list[Name], Meta(max_length=MAX_NAMES)]
_Deleted: TypeAlias = Annotated[list[tuple[Name, Number]], Meta(max_length=MAX_NAMES)]
_AllKnown: TypeAlias = Annotated[list[_Known], Meta(max_length=MAX_NAMES)]
_REQUESTS: Final = Decoder(_Request)
_ANSWERS: Final = Decoder(_Answer)
_NAMES: Final[Decoder[list[str]]] = Decoder(_Names)
_DELETED: Final[Decoder[list[tuple[str, int]]]] = Decoder(_Deleted)
_KNOWN: Final[Decoder[list[_Known]]] = Decoder(_AllKnown)


@dataclass(slots=True)
class _Waiting:
    connection: int
    message: Subscribe
    selector: Selector
    broker: int  # asked for its token
    deadline: int
    referrals: int = 0
    principal: str = ""  # who it is, "" for nobody in particular
    admin: bool = False  # it may use the names of others
    epoch: int = 0  # the attachment that it remembers; 0: none


@dataclass(slots=True)
class _Round:
    """Subscribers whose names are not known here, and the brokers that have not said what they know."""

    subscribers: list[_Waiting]
    brokers: dict[int, None]
    deadline: int


class Host(Protocol):
    """What the room around does."""

    def begin(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None: ...

    def attach(
        self,
        turn: Turn,
        connection: int,
        message: Subscribe,
        selector: Selector,
        token: CheckpointToken | None,
        born: int = 0,
        principal: str = "",
    ) -> None: ...

    def go_on_alone(
        self, turn: Turn, connection: int, message: Subscribe, selector: Selector, claim: Row
    ) -> None: ...

    def end(self, turn: Turn, subscription: Subscription, error: PostroadError) -> None: ...

    def delete(self, turn: Turn, name: str) -> None: ...


class Moving:
    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        subscriptions: Subscriptions,
        interest: Interest,
        inquiries: Inquiries,
        topology: Topology,
        retired: Callable[[int], bool],
        flood: Callable[[Turn, Sequence[InterestUpdate]], None],
        host: Host,
    ) -> None:
        self._me = me
        self._subscriptions = subscriptions
        self._interest = interest
        self._inquiries = inquiries
        self._topology = topology
        self._retired = retired
        self._flood = flood
        self._host = host
        # To be told with the end of the turn; also what moved: should its new broker be retired, it is here.
        self._claims: dict[str, Claim | None] = {
            subscription.name: _claim_of(subscription) for subscription in subscriptions
        }
        self._waiting: dict[int, dict[int, _Waiting]] = {}  # by connection, then by number
        self._count = 0  # of `_waiting`
        self._unknown: list[_Waiting] = []  # others are to be asked with the end of the turn
        self._rounds: list[_Round] = []
        board.query(HANDOVER, self._asked)
        board.query(CLAIMS, self._asked_claims)
        board.query(DELETED, self._on_deleted)

    def reachable(self, broker: int) -> bool:
        return self._topology.distance(broker) is not None

    # ---- claims

    def claim(self, subscription: Subscription) -> None:
        """It is hosted here, and on disk."""
        self._claims[subscription.name] = _claim_of(subscription)

    def unclaim(self, name: str) -> None:
        self._claims[name] = None

    def heard(self, turn: Turn, news: Sequence[Heard]) -> None:
        """What other brokers claim. A retired one claims nothing, though somebody still has its table."""
        subscriptions, now_us = self._subscriptions, turn.now_us
        for owner, version, claims, whole in news:
            if owner == NOBODY or self._retired(owner):
                continue
            gone = [name for name, claim in claims.items() if claim is None]
            if whole:
                gone += subscriptions.claims.of(owner, but=claims)
            for name in gone:
                subscriptions.withdrawn(name, owner, version, now_us)
            for name, claim in claims.items():
                if claim is None:
                    continue
                moved = subscriptions.claimed(claim, owner, version, now_us)
                if moved is None:
                    continue
                if moved.principal in ("", claim.principal) or not claim.principal:
                    self._host.end(turn, moved, self._moved(name, owner))
                else:  # two principals made it, and that one was the first
                    self._host.end(turn, moved, not_its_own(name))
                    self._host.delete(turn, name)

    def _moved(self, name: str, broker: int) -> MovedError:
        return MovedError(
            f"{name!r} was taken by another connection, at broker {self._topology.name(broker)!r}"
        )

    def retire(self, broker: int) -> None:
        """That broker never comes back: its names are those of whoever had them before, or free."""
        for subscription in self._subscriptions.retired(broker):
            self.claim(subscription)

    # ---- names that were deleted while a broker that had them was away

    def tell_deleted(self, turn: Turn) -> None:
        for broker, names in self._subscriptions.claims.deleted(self.reachable).items():
            for at in range(0, len(names), MAX_NAMES):
                body = msgspec.msgpack.encode(names[at : at + MAX_NAMES])
                # That it withdraws its claims is the answer.
                self._inquiries.ask(turn, broker, DELETED, body, lambda _turn, _body: None)

    def _on_deleted(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        """Below these epochs they were deleted, where they had moved to."""
        try:
            names = decode_body(body, _DELETED)
        except PeerError:
            return
        for name, epoch in names:
            if not 0 < epoch <= MAX_EPOCH:
                continue
            self._subscriptions.heard_epoch(epoch, turn.now_us)
            self._subscriptions.claims.delete(name, epoch - 1)
            subscription = self._subscriptions.get(name)
            if subscription is not None and subscription.epoch < epoch:
                self._host.delete(turn, name)
        self._inquiries.respond(turn, broker, number, b"")

    # ---- a subscriber whose token another broker keeps

    def wait(
        self,
        turn: Turn,
        connection: int,
        message: Subscribe,
        selector: Selector,
        *,
        principal: str,
        admin: bool,
    ) -> None:
        """Ask for its token; UnavailableError if that cannot be, and the client does not remember it."""
        waiting = _Waiting(
            connection,
            message,
            selector,
            broker=self._subscriptions.owner(message.durable) or 0,
            deadline=turn.now_us + HANDOVER_US,
            principal=principal,
            admin=admin,
            epoch=message.epoch,
        )
        self._ask(turn, waiting)

    def _check_room(self) -> None:
        """UnavailableError unless another one may wait; to be called before somebody is asked for it."""
        if self._count >= MAX_WAITING:
            raise UnavailableError(f"more than {MAX_WAITING} subscribers wait for their tokens")

    def _put(self, waiting: _Waiting) -> None:
        self._count += 1
        self._waiting.setdefault(waiting.connection, {})[waiting.message.number] = waiting

    def _take(self, waiting: _Waiting) -> bool:
        """Whether it waited until now."""
        if self._waiting.get(waiting.connection, {}).get(waiting.message.number) is not waiting:
            return False  # it left, or waited too long
        return self.forget(waiting.connection, waiting.message.number)

    def _ask(self, turn: Turn, waiting: _Waiting) -> None:
        self._check_room()
        message = waiting.message
        request = _Request(
            message.durable,
            waiting.selector.topic,
            waiting.selector.where,
            message.shared,
            message.key,
            waiting.principal,
            waiting.admin,
        )
        answered = partial(self._on_answer, waiting)
        if self._inquiries.ask(turn, waiting.broker, HANDOVER, msgspec.msgpack.encode(request), answered):
            self._put(waiting)
        else:
            self._go_on_alone(turn, waiting)

    def _on_answer(self, waiting: _Waiting, turn: Turn, body: bytes) -> None:
        if self._take(waiting):
            try:
                self._go_on(turn, waiting, body)
            except PostroadError as error:
                self._refuse(turn, waiting, error)

    def _go_on_alone(self, turn: Turn, waiting: _Waiting) -> None:
        """Its broker does not answer: with what the client remembers; UnavailableError if that is nothing, or
        somebody was attached after it."""
        highest = self._subscriptions.claims.highest(waiting.message.durable)
        if highest is None or highest.epoch > waiting.epoch:
            raise self._unreachable(waiting)
        self._host.go_on_alone(turn, waiting.connection, waiting.message, waiting.selector, highest)

    def _unreachable(self, waiting: _Waiting) -> UnavailableError:
        return UnavailableError(
            f"the durable subscription {waiting.message.durable!r} is kept by broker "
            f"{self._topology.name(waiting.broker)!r}, which cannot be reached: it comes from there once it"
            " can"
        )

    def _go_on(self, turn: Turn, waiting: _Waiting, body: bytes) -> None:
        """With what the broker answered that keeps its token."""
        name, subscriptions = waiting.message.durable, self._subscriptions
        try:
            answer = decode_body(body, _ANSWERS)
        except PeerError as error:
            broker = self._topology.name(waiting.broker)
            raise UnavailableError(f"broker {broker!r} answered what cannot be read: {error}") from None
        if answer.code:
            raise from_wire(answer.code, answer.reason)
        if answer.elsewhere:
            waiting.broker = answer.elsewhere
            waiting.referrals += 1
            if waiting.referrals > MAX_REFERRALS:
                raise self._unreachable(waiting)
            self._ask(turn, waiting)
            return
        if not answer.token:
            # Whoever was asked does not have it, nor does whoever named that one: it was deleted meanwhile.
            highest = subscriptions.claims.highest(name)
            if highest is not None:
                subscriptions.claims.delete(name, highest.epoch)
            self._host.begin(turn, waiting.connection, waiting.message, waiting.selector)
            return
        known = subscriptions.get(name)
        # A token that was kept here until it moved there may be ahead where that broker saw nothing.
        own_token = CheckpointToken() if known is None else known.token()
        token = CheckpointToken.from_json(answer.token).maximum(own_token)
        self._host.attach(
            turn,
            waiting.connection,
            waiting.message,
            waiting.selector,
            token,
            answer.born,
            answer.principal if principal_fits(answer.principal) else "",
        )

    def _refuse(self, turn: Turn, waiting: _Waiting, error: PostroadError) -> None:
        ended = Ended(number=waiting.message.number, code=error.code, reason=str(error))
        turn.send(waiting.connection, encode(ended))

    def has(self, connection: int, number: int) -> bool:
        return number in self._waiting.get(connection, {})

    def count(self, connection: int) -> int:
        return len(self._waiting.get(connection, {}))

    def forget(self, connection: int, number: int) -> bool:
        """It does not wait any more."""
        waiting = self._waiting.get(connection, {})
        if waiting.pop(number, None) is None:
            return False
        self._count -= 1
        if not waiting:
            del self._waiting[connection]
        return True

    def closed(self, connection: int) -> None:
        self._count -= len(self._waiting.pop(connection, {}))

    # ---- a name that is not known here

    def look(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> bool:
        """Ask others, and begin then; False if there is nobody to ask."""
        if self._topology.reachable() == [self._me]:
            return False
        self._check_room()
        waiting = _Waiting(connection, message, selector, 0, now_us + HANDOVER_US)
        self._put(waiting)
        self._unknown.append(waiting)
        return True

    def _ask_others(self, turn: Turn, subscribers: list[_Waiting]) -> None:
        brokers = [broker for broker in self._topology.reachable() if broker != self._me]
        names = dict.fromkeys(waiting.message.durable for waiting in subscribers)
        question = msgspec.msgpack.encode(list(names))
        under_way = _Round(subscribers, dict.fromkeys(brokers), turn.now_us + HANDOVER_US)
        self._rounds.append(under_way)

        def answered(broker: int, turn: Turn, body: bytes) -> None:
            under_way.brokers.pop(broker, None)
            self._learn(names, body, turn.now_us)
            self._begin_known(turn)

        for broker in brokers:
            self._inquiries.ask(turn, broker, CLAIMS, question, partial(answered, broker))

    def _learn(self, names: Collection[str], body: bytes, now_us: int) -> None:
        """What another broker knows. Those in reach have said themselves what they claim."""
        try:
            known = decode_body(body, _KNOWN)
        except PeerError:
            return
        for known_claim in known:
            self._subscriptions.heard_epoch(known_claim.epoch, now_us)
            broker, claim = known_claim.broker, _claim_in(known_claim)
            away = not self.reachable(broker) and not self._retired(broker)
            if claim is not None and away and broker != NOBODY and claim.name in names:
                self._subscriptions.claimed(claim, broker, known_claim.version, now_us)

    def _begin_known(self, turn: Turn) -> None:
        """Those of whose names everybody in reach has said what it knows, or had the time to."""
        for round_ in list(self._rounds):
            if round_.deadline > turn.now_us and any(map(self.reachable, round_.brokers)):
                continue
            self._rounds.remove(round_)
            for waiting in filter(self._take, round_.subscribers):
                try:
                    self._host.begin(turn, waiting.connection, waiting.message, waiting.selector)
                except PostroadError as error:
                    self._refuse(turn, waiting, error)

    def _asked_claims(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        try:
            names = decode_body(body, _NAMES)
        except PeerError:
            return
        known = []
        subscriptions = self._subscriptions
        for name in names:
            highest = subscriptions.claims.highest(name)
            if highest is not None and subscriptions.owner(name) is not None:
                known.append(
                    _Known(
                        name,
                        highest.epoch,
                        highest.broker,
                        highest.version,
                        highest.principal,
                        highest.born,
                        highest.fingerprint,
                    )
                )
            elif subscriptions.last_epoch:  # it is nobody's: whoever makes it is to have a higher epoch
                known.append(_Known(name, subscriptions.last_epoch, NOBODY, 0))
        self._inquiries.respond(turn, broker, number, msgspec.msgpack.encode(known))

    # ---- the former broker

    def _asked(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        try:
            request = decode_body(body, _REQUESTS)
        except PeerError:
            return
        answer = self._hand_over(turn, broker, request)
        self._inquiries.respond(turn, broker, number, msgspec.msgpack.encode(answer))

    def _hand_over(self, turn: Turn, broker: int, request: _Request) -> _Answer:
        subscription = self._subscriptions.get(request.name)
        elsewhere = self._subscriptions.owner(request.name)
        if elsewhere is not None and elsewhere != broker:
            return _Answer(elsewhere=elsewhere)
        if subscription is None or (
            elsewhere is None and subscription.moved_at is not None
        ):  # deleted where it moved to
            return _Answer()
        try:
            if subscription.principal not in ("", request.principal) and not request.admin:
                raise not_its_own(request.name)
            subscription.check_same(Selector.parse(request.topic, request.where), request.shared, request.key)
        except UsageError as error:
            return _Answer(code=error.code, reason=str(error))
        self._host.end(turn, subscription, self._moved(subscription.name, broker))
        return _Answer(
            token=subscription.token().to_json(), born=subscription.born, principal=subscription.principal
        )

    # ---- time

    def tick(self, turn: Turn) -> None:
        if self._claims:
            claims, self._claims = self._claims, {}
            self._flood(turn, self._interest.claim(claims))
        unknown, self._unknown = self._unknown, []
        for at in range(0, len(unknown), MAX_NAMES):
            self._ask_others(turn, unknown[at : at + MAX_NAMES])
        if self._rounds:
            self._begin_known(turn)
        for waiting in self._everybody():
            if waiting.deadline <= turn.now_us and self._take(waiting):
                try:
                    self._go_on_alone(turn, waiting)
                except PostroadError as error:
                    self._refuse(turn, waiting, error)

    def next_deadline(self) -> int | None:
        return min((waiting.deadline for waiting in self._everybody()), default=None)

    def _everybody(self) -> list[_Waiting]:
        """All that wait."""
        return [waiting for numbers in self._waiting.values() for waiting in numbers.values()]

    def check(self) -> None:
        if self._count != len(self._everybody()) or not all(self._waiting.values()):
            raise BugError("moving: subscribers that wait are miscounted")


def not_its_own(name: str) -> DeniedError:
    """Says no more than that there is such a name: what it is for is its principal's business."""
    return DeniedError(
        f"the durable subscription {name!r} belongs to another principal: choose another name, or have the"
        " right `admin`"
    )


def _claim_of(subscription: Subscription) -> Claim:
    return Claim(
        subscription.name,
        subscription.epoch,
        subscription.principal,
        subscription.born,
        fingerprint(subscription.selector, subscription.shared, subscription.key),
    )


def _claim_in(known: _Known) -> Claim | None:
    """What another broker knows of, if it can be."""
    claim = Claim(known.name, known.epoch, known.principal, known.born, known.fingerprint)
    try:
        check_claim(claim)
    except PeerError:
        return None
    return claim


class NoDurableSubscribers:
    """What stands in for `DurableSubscribers` at a broker without a disk.

    It knows of no claims, and brokers that ask need not wait for it. A client that acknowledges something is
    ignored, like one whose subscription has ended.
    """

    def __init__(self, board: Switchboard, *, interest: Interest, inquiries: Inquiries) -> None:
        self._interest = interest
        self._inquiries = inquiries
        board.query(CLAIMS, self._asked)
        board.report("subs", lambda _asking: {"subscriptions": [], "groups": [], "more": False})
        board.from_client(Ack, self._ignore)

    def _asked(self, turn: Turn, broker: int, number: int, _body: bytes) -> None:
        self._inquiries.respond(turn, broker, number, msgspec.msgpack.encode([]))

    def _ignore(self, _turn: Turn, _peer: Peer, _message: Ack) -> None:
        pass

    def tick(self, _turn: Turn) -> None:
        self._interest.take_heard()  # nobody here wants to know what others claim

    def next_deadline(self) -> None:
        return None

    def check(self) -> None:
        pass
