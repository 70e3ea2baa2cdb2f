"""Durable subscriptions that move between brokers: claims, and tokens handed over (spec D10).

A broker claims a name when its subscription is on disk, and again at every attach: the claim with the
highest epoch has the name, so the latest attach does. Whoever hears a higher claim on a name of its own ends
the connection there and lets go, after a while (`subscriptions`).

A subscriber that brings its token goes on at once, wherever it comes. One whose token is kept by a broker
waits here until that broker has handed it over. Handing over is not letting go: until the claim of the new
broker is heard, the former one has the subscription, so nothing is lost if the new one dies before its disk
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from postroad.durable.subscriptions import Subscription, Subscriptions
from postroad.durable.token import CheckpointToken
from postroad.errors import PostroadError, UnavailableError, UsageError, from_wire
from postroad.overlay.effects import Effect, Send
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Heard, Interest
from postroad.selectors import Selector
from postroad.units import SECOND_US
from postroad.wire.frames import Ended, InterestUpdate, Subscribe, encode

HANDOVER: Final = "handover"
HANDOVER_US: Final = 5 * SECOND_US  # a former broker has this long to answer
MAX_WAITING: Final = 10_000  # subscribers that wait for their tokens
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


@dataclass(slots=True)
class _Waiting:
    connection: int
    message: Subscribe
    selector: Selector
    broker: int  # asked
    deadline: int
    referrals: int = 0


class Host(Protocol):
    """What the room around does."""

    def attach(
        self,
        connection: int,
        message: Subscribe,
        selector: Selector,
        token: CheckpointToken | None,
        now_us: int,
    ) -> list[Effect]: ...

    def end(self, one: Subscription, error: PostroadError) -> list[Effect]: ...


class Moving:
    def __init__(
        self,
        *,
        subscriptions: Subscriptions,
        interest: Interest,
        inquiries: Inquiries,
        name_of: Callable[[int], str],
        retired: Callable[[int], bool],
        flood: Callable[[list[InterestUpdate]], None],
        host: Host,
    ) -> None:
        self._subscriptions = subscriptions
        self._interest = interest
        self._inquiries = inquiries
        self._name_of = name_of
        self._retired = retired
        self._flood = flood
        self._host = host
        self._claims: dict[str, int | None] = {  # to be told with the end of the turn
            one.name: one.epoch
            for one in subscriptions  # also what moved: should it be retired there, it is here
        }
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # by connection and number
        inquiries.serve(HANDOVER, self._asked)

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
        for owner, claims, whole in news:
            if self._retired(owner):
                continue
            gone = [name for name, epoch in claims.items() if epoch is None]
            if whole:
                gone += subscriptions.claims.of(owner, but=claims)
            for name in gone:
                subscriptions.withdrawn(name, owner, now_us)
            for name, epoch in claims.items():
                moved = None if epoch is None else subscriptions.claimed(name, epoch, owner, now_us)
                if moved is not None:
                    out += self._host.end(moved, self._taken(name, owner))
        return out

    def _taken(self, name: str, broker: int) -> UsageError:
        return UsageError(f"{name!r} was taken by another connection, at broker {self._name_of(broker)!r}")

    def retire(self, broker: int) -> None:
        """That broker never comes back: its names are those of whoever had them before, or free."""
        for one in self._subscriptions.retired(broker):
            self.claim(one)

    # ---- a subscriber whose token another broker keeps

    def wait(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> list[Effect]:
        """Ask for its token; UnavailableError if that cannot be."""
        broker = self._subscriptions.owner(message.durable) or 0
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError(f"more than {MAX_WAITING} subscribers wait for their tokens")
        one = _Waiting(connection, message, selector, broker, now_us + HANDOVER_US)
        out = self._ask(one)
        self._waiting[connection, message.number] = one
        return out

    def _ask(self, one: _Waiting) -> list[Effect]:
        message = one.message
        request = _Request(
            message.durable, one.selector.topic, one.selector.where, message.shared, message.key
        )

        def answered(body: bytes, now_us: int) -> list[Effect]:
            if self._waiting.pop((one.connection, message.number), None) is not one:
                return []  # it left, or waited too long
            try:
                return self._answered(one, msgspec.msgpack.decode(body, type=_Answer), now_us)
            except (PostroadError, msgspec.DecodeError) as error:
                return [self._refusal(one, error)]

        asked = self._inquiries.ask(one.broker, HANDOVER, msgspec.msgpack.encode(request), answered)
        if asked is None:
            raise self._unreachable(one)
        return asked

    def _unreachable(self, one: _Waiting) -> UnavailableError:
        return UnavailableError(
            f"the durable subscription {one.message.durable!r} is kept by broker "
            f"{self._name_of(one.broker)!r}, which cannot be reached: it comes from there once it can"
        )

    def _answered(self, one: _Waiting, answer: _Answer, now_us: int) -> list[Effect]:
        name, subscriptions = one.message.durable, self._subscriptions
        if answer.code:
            raise from_wire(answer.code, answer.reason)
        if answer.elsewhere:
            one.broker = answer.elsewhere
            one.referrals += 1
            if one.referrals > MAX_REFERRALS:
                raise self._unreachable(one)
            out = self._ask(one)
            self._waiting[one.connection, one.message.number] = one
            return out
        held = subscriptions.get(name)
        token: CheckpointToken | None = None
        if answer.token:
            # A token that was kept here until it moved there may be ahead where that broker saw nothing.
            mine = CheckpointToken() if held is None else held.token()
            token = CheckpointToken.from_json(answer.token).maximum(mine)
        else:
            # Whoever was asked does not have it, nor does whoever named that one: it was deleted meanwhile.
            subscriptions.claims.drop(name)
        return self._host.attach(one.connection, one.message, one.selector, token, now_us)

    def _refusal(self, one: _Waiting, error: Exception) -> Send:
        code = error.code if isinstance(error, PostroadError) else UnavailableError.code
        ended = Ended(number=one.message.number, code=code, reason=str(error))
        return Send(one.connection, encode(ended))

    def has(self, connection: int, number: int) -> bool:
        return (connection, number) in self._waiting

    def count(self, connection: int) -> int:
        return sum(held == connection for held, _ in self._waiting)

    def forget(self, connection: int, number: int) -> bool:
        """It does not wait any more."""
        return self._waiting.pop((connection, number), None) is not None

    def closed(self, connection: int) -> None:
        for held, number in list(self._waiting):
            if held == connection:
                del self._waiting[held, number]

    # ---- the former broker

    def _asked(self, broker: int, number: int, body: bytes, _now_us: int) -> list[Effect]:
        try:
            request = msgspec.msgpack.decode(body, type=_Request)
        except msgspec.DecodeError:
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
        return _Answer(token=one.token().to_json()), out

    # ---- time

    def tick(self, now_us: int) -> list[Effect]:
        if self._claims:
            claims, self._claims = self._claims, {}
            self._flood(self._interest.claim(claims))
        out: list[Effect] = []
        for key, one in list(self._waiting.items()):
            if one.deadline <= now_us:
                del self._waiting[key]
                out.append(self._refusal(one, self._unreachable(one)))
        return out

    def next_deadline(self) -> int | None:
        return min((one.deadline for one in self._waiting.values()), default=None)
