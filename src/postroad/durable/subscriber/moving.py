"""Durable subscriptions that move between brokers: claims, and tokens handed over (spec D10).

A broker claims a name when its subscription is on disk, and again at every attach: the claim with the
highest epoch has the name, so the latest attach does. Whoever hears a higher claim on a name of its own ends
the connection there and lets go, after a while (`subscriptions`).

A subscriber that brings its token goes on at once, wherever it comes. One whose token is kept by a broker
waits here until that broker has handed it over. Handing over is not letting go: until the claim of the new
broker is heard, the former one has the subscription, so nothing is lost if the new one dies before its disk
has it.

Claims are heard by everybody who is there while their broker is. A broker that joined or was cut off may have
missed one, and its broker may be away since; the others have it on their disks. So before a name begins that
is not known here, all brokers in reach are asked what they know of it, once for all such names of a turn.

A name is deleted where it is. A former broker that is away then holds what it has, and claims it when it is
back. Whoever knows better (`claims`) tells it so, once a second until it has withdrawn its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from postroad.durable.subscriber.claims import NOBODY
from postroad.durable.subscriber.subscriptions import Subscription, Subscriptions
from postroad.errors import PeerError, PostroadError, UnavailableError, UsageError, from_wire
from postroad.events.token import CheckpointToken
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Heard, Interest
from postroad.overlay.interest_entries import MAX_EPOCH
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.selectors import Selector
from postroad.units import SECOND_US
from postroad.wire.frames import Ended, InterestUpdate, Subscribe, decode_body, encode

HANDOVER: Final = "handover"
CLAIMS: Final = "claims"
DELETED: Final = "deleted"
HANDOVER_US: Final = 5 * SECOND_US  # brokers have this long to answer
MAX_WAITING: Final = 100_000  # subscribers that wait for their tokens, or for what others know
MAX_NAMES: Final = 1_000  # of a question
MAX_REFERRALS: Final = 4  # brokers that may say "it is there", one after the other


class _Request(msgspec.Struct, frozen=True, array_like=True):
    name: str
    topic: str
    where: str
    shared: bool
    key: str


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The token; or where to ask (`elsewhere`); or why not; or nothing: the name is not known there."""

    token: str = ""
    elsewhere: int = 0
    code: str = ""
    reason: str = ""
    born: int = 0


class _Known(msgspec.Struct, frozen=True, array_like=True):
    name: str
    epoch: int
    broker: int
    version: int


@dataclass(slots=True)
class _Waiting:
    connection: int
    message: Subscribe
    selector: Selector
    broker: int  # asked for its token
    deadline: int
    referrals: int = 0


@dataclass(slots=True)
class _Round:
    """Subscribers whose names are not known here, and the brokers that have not said what they know."""

    ones: list[_Waiting]
    brokers: dict[int, None]
    deadline: int


class Host(Protocol):
    """What the room around does."""

    def begin(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> list[Effect]: ...

    def attach(
        self,
        connection: int,
        message: Subscribe,
        selector: Selector,
        token: CheckpointToken | None,
        now_us: int,
        born: int = 0,
    ) -> list[Effect]: ...

    def end(self, one: Subscription, error: PostroadError) -> list[Effect]: ...

    def delete(self, name: str, now_us: int) -> list[Effect]: ...


class Moving:
    def __init__(
        self,
        *,
        me: int,
        subscriptions: Subscriptions,
        interest: Interest,
        inquiries: Inquiries,
        topology: Topology,
        retired: Callable[[int], bool],
        flood: Callable[[list[InterestUpdate]], None],
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
        self._claims: dict[str, int | None] = {one.name: one.epoch for one in subscriptions}
        self._waiting: dict[int, dict[int, _Waiting]] = {}  # by connection, then by number
        self._count = 0  # of `_waiting`
        self._unknown: list[_Waiting] = []  # others are to be asked with the end of the turn
        self._rounds: list[_Round] = []
        inquiries.serve(HANDOVER, self._asked)
        inquiries.serve(CLAIMS, self._asked_claims)
        inquiries.serve(DELETED, self._told_deleted)

    def reachable(self, broker: int) -> bool:
        return self._topology.distance(broker) is not None

    # ---- claims

    def claim(self, one: Subscription) -> None:
        """It is hosted here, and on disk."""
        self._claims[one.name] = one.epoch

    def unclaim(self, name: str) -> None:
        self._claims[name] = None

    def heard(self, news: Sequence[Heard], now_us: int) -> list[Effect]:
        """What other brokers claim. A retired one claims nothing, though somebody still has its table."""
        out: list[Effect] = []
        subscriptions = self._subscriptions
        for owner, version, claims, whole in news:
            if owner == NOBODY or self._retired(owner):
                continue
            gone = [name for name, epoch in claims.items() if epoch is None]
            if whole:
                gone += subscriptions.claims.of(owner, but=claims)
            for name in gone:
                subscriptions.withdrawn(name, owner, version, now_us)
            for name, epoch in claims.items():
                if epoch is None:
                    continue
                moved = subscriptions.claimed(name, epoch, owner, version, now_us)
                if moved is not None:
                    out += self._host.end(moved, self._taken(name, owner))
        return out

    def _taken(self, name: str, broker: int) -> UsageError:
        return UsageError(
            f"{name!r} was taken by another connection, at broker {self._topology.name(broker)!r}"
        )

    def retire(self, broker: int) -> None:
        """That broker never comes back: its names are those of whoever had them before, or free."""
        for one in self._subscriptions.retired(broker):
            self.claim(one)

    # ---- names that were deleted while a broker that had them was away

    def tell_deleted(self) -> list[Effect]:
        out: list[Effect] = []
        for broker, names in self._subscriptions.claims.deleted(self.reachable).items():
            for at in range(0, len(names), MAX_NAMES):
                body = msgspec.msgpack.encode(names[at : at + MAX_NAMES])
                # That it withdraws its claims is the answer.
                out += self._inquiries.ask(broker, DELETED, body, lambda _body, _now_us: []) or []
        return out

    def _told_deleted(self, broker: int, number: int, body: bytes, now_us: int) -> list[Effect]:
        """Below these epochs they were deleted, where they had moved to."""
        try:
            names = decode_body(body, list[tuple[str, int]])
        except PeerError:
            return []
        out: list[Effect] = []
        for name, epoch in names[:MAX_NAMES]:
            if not 0 < epoch <= MAX_EPOCH:
                continue
            self._subscriptions.claims.delete(name, epoch - 1)
            one = self._subscriptions.get(name)
            if one is not None and one.epoch < epoch:
                out += self._host.delete(name, now_us)
        return out + self._inquiries.respond(broker, number, b"")

    # ---- a subscriber whose token another broker keeps

    def wait(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> list[Effect]:
        """Ask for its token; UnavailableError if that cannot be."""
        broker = self._subscriptions.owner(message.durable) or 0
        one = _Waiting(connection, message, selector, broker, now_us + HANDOVER_US)
        out = self._ask(one)
        self._put(one)
        return out

    def _put(self, one: _Waiting) -> None:
        if self._count >= MAX_WAITING:
            raise UnavailableError(f"more than {MAX_WAITING} subscribers wait for their tokens")
        self._count += 1
        self._waiting.setdefault(one.connection, {})[one.message.number] = one

    def _take(self, one: _Waiting) -> bool:
        """Whether it waited until now."""
        if self._waiting.get(one.connection, {}).get(one.message.number) is not one:
            return False  # it left, or waited too long
        return self.forget(one.connection, one.message.number)

    def _ask(self, one: _Waiting) -> list[Effect]:
        message = one.message
        request = _Request(
            message.durable, one.selector.topic, one.selector.where, message.shared, message.key
        )

        def answered(body: bytes, now_us: int) -> list[Effect]:
            if not self._take(one):
                return []
            try:
                return self._answered(one, body, now_us)
            except PostroadError as error:
                return [self._refusal(one, error)]

        asked = self._inquiries.ask(one.broker, HANDOVER, msgspec.msgpack.encode(request), answered)
        if asked is None:
            raise self._unreachable(one)
        return asked

    def _unreachable(self, one: _Waiting) -> UnavailableError:
        return UnavailableError(
            f"the durable subscription {one.message.durable!r} is kept by broker "
            f"{self._topology.name(one.broker)!r}, which cannot be reached: it comes from there once it can"
        )

    def _answered(self, one: _Waiting, body: bytes, now_us: int) -> list[Effect]:
        name, subscriptions = one.message.durable, self._subscriptions
        try:
            answer = decode_body(body, _Answer)
        except PeerError as error:
            broker = self._topology.name(one.broker)
            raise UnavailableError(f"broker {broker!r} answered what cannot be read: {error}") from None
        if answer.code:
            raise from_wire(answer.code, answer.reason)
        if answer.elsewhere:
            one.broker = answer.elsewhere
            one.referrals += 1
            if one.referrals > MAX_REFERRALS:
                raise self._unreachable(one)
            out = self._ask(one)
            self._put(one)
            return out
        if not answer.token:
            # Whoever was asked does not have it, nor does whoever named that one: it was deleted meanwhile.
            highest = subscriptions.claims.highest(name)
            if highest is not None:
                subscriptions.claims.delete(name, highest.epoch)
            return self._host.begin(one.connection, one.message, one.selector, now_us)
        held = subscriptions.get(name)
        # A token that was kept here until it moved there may be ahead where that broker saw nothing.
        mine = CheckpointToken() if held is None else held.token()
        token = CheckpointToken.from_json(answer.token).maximum(mine)
        return self._host.attach(one.connection, one.message, one.selector, token, now_us, answer.born)

    def _refusal(self, one: _Waiting, error: PostroadError) -> Send:
        ended = Ended(number=one.message.number, code=error.code, reason=str(error))
        return Send(one.connection, encode(ended))

    def has(self, connection: int, number: int) -> bool:
        return number in self._waiting.get(connection, {})

    def count(self, connection: int) -> int:
        return len(self._waiting.get(connection, {}))

    def forget(self, connection: int, number: int) -> bool:
        """It does not wait any more."""
        held = self._waiting.get(connection, {})
        if held.pop(number, None) is None:
            return False
        self._count -= 1
        if not held:
            del self._waiting[connection]
        return True

    def closed(self, connection: int) -> None:
        self._count -= len(self._waiting.pop(connection, {}))

    # ---- a name that is not known here

    def look(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> bool:
        """Ask others, and begin then; False if there is nobody to ask."""
        if self._topology.reachable() == [self._me]:
            return False
        one = _Waiting(connection, message, selector, 0, now_us + HANDOVER_US)
        self._put(one)
        self._unknown.append(one)
        return True

    def _ask_others(self, ones: list[_Waiting], now_us: int) -> list[Effect]:
        brokers = [broker for broker in self._topology.reachable() if broker != self._me]
        names = dict.fromkeys(one.message.durable for one in ones)
        question = msgspec.msgpack.encode(list(names))
        under_way = _Round(ones, dict.fromkeys(brokers), now_us + HANDOVER_US)
        self._rounds.append(under_way)
        out: list[Effect] = []

        def asked(broker: int) -> list[Effect]:
            def answered(body: bytes, now_us: int) -> list[Effect]:
                under_way.brokers.pop(broker, None)
                self._learn(names, body, now_us)
                return self._begin_known(now_us)

            return self._inquiries.ask(broker, CLAIMS, question, answered) or []

        for broker in brokers:
            out += asked(broker)
        return out

    def _learn(self, names: Collection[str], body: bytes, now_us: int) -> None:
        """What another broker knows. Those in reach have said themselves what they claim."""
        try:
            known = decode_body(body, list[_Known])
        except PeerError:
            return
        for one in known:
            away = not self.reachable(one.broker) and not self._retired(one.broker)
            if away and one.broker != NOBODY and one.name in names and 0 < one.epoch <= MAX_EPOCH:
                self._subscriptions.claimed(one.name, one.epoch, one.broker, one.version, now_us)

    def _begin_known(self, now_us: int) -> list[Effect]:
        """Those of whose names everybody in reach has said what it knows, or had the time to."""
        out: list[Effect] = []
        for one in list(self._rounds):
            if one.deadline > now_us and any(map(self.reachable, one.brokers)):
                continue
            self._rounds.remove(one)
            for waiting in filter(self._take, one.ones):
                try:
                    out += self._host.begin(waiting.connection, waiting.message, waiting.selector, now_us)
                except PostroadError as error:
                    out.append(self._refusal(waiting, error))
        return out

    def _asked_claims(self, broker: int, number: int, body: bytes, _now_us: int) -> list[Effect]:
        try:
            names = decode_body(body, list[str])
        except PeerError:
            return []
        known = []
        for name in names[:MAX_NAMES]:
            highest = self._subscriptions.claims.highest(name)
            if highest is not None and self._subscriptions.owner(name) is not None:
                known.append(_Known(name, highest.epoch, highest.broker, highest.version))
        return self._inquiries.respond(broker, number, msgspec.msgpack.encode(known))

    # ---- the former broker

    def _asked(self, broker: int, number: int, body: bytes, _now_us: int) -> list[Effect]:
        try:
            request = decode_body(body, _Request)
        except PeerError:
            return []
        answer, out = self._hand_over(broker, request)
        return out + self._inquiries.respond(broker, number, msgspec.msgpack.encode(answer))

    def _hand_over(self, broker: int, request: _Request) -> tuple[_Answer, list[Effect]]:
        one = self._subscriptions.get(request.name)
        elsewhere = self._subscriptions.owner(request.name)
        if elsewhere is not None and elsewhere != broker:
            return _Answer(elsewhere=elsewhere), []
        if one is None or (elsewhere is None and one.moved_at is not None):  # deleted where it moved to
            return _Answer(), []
        try:
            one.check_same(Selector.parse(request.topic, request.where), request.shared, request.key)
        except UsageError as error:
            return _Answer(code=error.code, reason=str(error)), []
        out = self._host.end(one, self._taken(one.name, broker))
        return _Answer(token=one.token().to_json(), born=one.born), out

    # ---- time

    def tick(self, now_us: int) -> list[Effect]:
        if self._claims:
            claims, self._claims = self._claims, {}
            self._flood(self._interest.claim(claims))
        unknown, self._unknown = self._unknown, []
        out: list[Effect] = []
        for at in range(0, len(unknown), MAX_NAMES):
            out += self._ask_others(unknown[at : at + MAX_NAMES], now_us)
        if self._rounds:
            out += self._begin_known(now_us)
        for one in [one for held in self._waiting.values() for one in held.values()]:
            if one.deadline <= now_us and self._take(one):
                out.append(self._refusal(one, self._unreachable(one)))
        return out

    def next_deadline(self) -> int | None:
        return min((one.deadline for held in self._waiting.values() for one in held.values()), default=None)


def know_nothing(inquiries: Inquiries) -> None:
    """A broker without a disk has heard no claims; who asks need not wait for it."""

    def asked(broker: int, number: int, _body: bytes, _now_us: int) -> list[Effect]:
        return inquiries.respond(broker, number, msgspec.msgpack.encode([]))

    inquiries.serve(CLAIMS, asked)
