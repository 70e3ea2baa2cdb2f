"""Subscribing: what clients ask to subscribe to is checked and handed to delivery, interest and routing.

A plain subscription lives as long as its connection. Durable ones, and readers of what is stored, go to
their host after the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from postroad.clients.intake import Intake
from postroad.clients.quotas import Quotas
from postroad.errors import BugError, DeniedError, PeerError, TooLargeError, UnavailableError, UsageError
from postroad.ids import SubscriptionKey, SubscriptionKind, plain_name
from postroad.links.links import Links
from postroad.overlay.flooding import Flooding
from postroad.overlay.interest import Interest
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams.delivery import Delivery
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Ended, Limits, Subscribe, Subscribed, Unsubscribe, encode

MAX_MISSING: Final = 256  # brokers named to a subscriber as not having confirmed
_MAX_NUMBER: Final = (1 << 32) - 1


class Readers(Protocol):
    """Readers of what is stored, up to a token."""

    def begin(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None:
        """UsageError or UnavailableError if it cannot be."""


class DurableSubscriptions(Protocol):
    """The host of durable subscriptions and of readers. `number` counts the subscriptions of a connection."""

    @property
    def readers(self) -> Readers: ...

    def subscribe(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None:
        """UsageError or UnavailableError if it cannot be."""

    def unsubscribe(self, turn: Turn, connection: int, number: int) -> bool:
        """Whether there was one."""

    def confirmed(self, turn: Turn, key: SubscriptionKey, missing: tuple[str, ...]) -> None:
        """A subscription has begun wherever it can, but for these brokers."""

    def has(self, connection: int, number: int) -> bool: ...

    def count(self, connection: int) -> int: ...


class Subscribing:
    """The subscriptions of this broker's clients. `durable` is None where there is no disk."""

    def __init__(
        self,
        board: Switchboard,
        *,
        limits: Limits,
        links: Links,
        intake: Intake,
        delivery: Delivery,
        interest: Interest,
        flooding: Flooding,
        routing: Routing,
        durable: DurableSubscriptions | None,
        tracking: Tracking | None,
        quotas: Quotas,
    ) -> None:
        self._limits = limits
        self._links = links
        self._intake = intake
        self._delivery = delivery
        self._interest = interest
        self._flooding = flooding
        self._routing = routing
        self._hosts = [] if durable is None else [durable]
        self._tracking = tracking
        self._quotas = quotas
        # Plain subscription -> (connection, number, name, what gives back its part of its principal's quota).
        self._subscribers: dict[SubscriptionKey, tuple[int, int, str, Callable[[], None]]] = {}
        board.from_client(Subscribe, self._subscribe)
        board.from_client(Unsubscribe, self._unsubscribe)
        board.peers("client", down=self._closed)

    def _subscribe(self, turn: Turn, peer: Peer, message: Subscribe) -> None:
        self._intake.flush(turn)  # what came before it in this turn is not for it
        connection, number = peer.connection, message.number
        self._delivery.check_free(connection, number)
        if any(host.has(connection, number) for host in self._hosts):
            raise PeerError(f"subscription number {number} is in use on this connection")
        try:
            selector = self._checked(peer, message)
            if message.until:
                self._host().readers.begin(turn, connection, message, selector)
            elif message.durable:
                self._host().subscribe(turn, connection, message, selector)
            else:
                self._subscribe_plain(turn, peer, message, selector)
        except (UsageError, UnavailableError) as error:
            turn.send(connection, encode(Ended(number=number, code=error.code, reason=str(error))))
            if isinstance(error, DeniedError):
                turn.note("warning", f"denied to client {peer.name!r}: {error}")

    def _host(self) -> DurableSubscriptions:
        if not self._hosts:
            raise UsageError("this broker keeps nothing on disk: it has no durable subscriptions")
        return self._hosts[0]

    def count(self, connection: int) -> int:
        """The subscriptions of a client."""
        return self._delivery.count(connection) + sum(host.count(connection) for host in self._hosts)

    def _checked(self, peer: Peer, message: Subscribe) -> Selector:
        if not 0 <= message.number <= _MAX_NUMBER:
            raise UsageError(f"subscription number {message.number} is not an unsigned 32-bit number")
        if self.count(peer.connection) >= peer.limits.subscriptions:
            raise TooLargeError(f"more than {peer.limits.subscriptions} subscriptions on one connection")
        selector = Selector.parse(message.topic, message.where, self._limits)
        if not self._links.may_subscribe(peer.connection, message.topic):
            who = peer.principal or "anonymous"
            every = "every topic, where answers to others are: '#' leaves those out"
            raise DeniedError(f"{who} may not subscribe to {message.topic or every}")
        return selector

    def _subscribe_plain(self, turn: Turn, peer: Peer, message: Subscribe, selector: Selector) -> None:
        connection, number = peer.connection, message.number
        name = plain_name(peer.name, peer.publisher, number)
        give_back = self._quotas.take(peer.principal, SubscriptionKind.PLAIN, selector)
        try:
            key = _plain_key(self._delivery.subscribe(connection, message, selector, name))
            try:
                updates = self._interest.subscribe(key, selector)
            except UsageError:
                self._delivery.unsubscribe(connection, number)
                raise
        except UsageError:
            give_back()
            raise
        self._subscribers[key] = (connection, number, name, give_back)
        if self._tracking is not None:
            self._tracking.attached(name, turn.now_us)
        self._flooding.interest(turn, updates)
        self._routing.subscribe(turn, key, self._interest.own_version)

    def confirmed(self, turn: Turn, key: SubscriptionKey, missing: tuple[str, ...]) -> None:
        """A subscription has begun wherever it can, but for these brokers."""
        missing = missing[:MAX_MISSING]
        if key.kind is SubscriptionKind.DURABLE:
            self._host().confirmed(turn, key, missing)
            return
        connection, number, _, _ = self._subscribers[key]
        turn.send(connection, encode(Subscribed(number=number, missing=missing)))

    def _unsubscribe(self, turn: Turn, peer: Peer, message: Unsubscribe) -> None:
        self._intake.flush(turn)
        plain = self._delivery.unsubscribe(peer.connection, message.number)
        if plain is not None:
            name = self._subscribers[_plain_key(plain)][2]
            if self._tracking is not None:
                self._tracking.detached(name, turn.now_us)
            self._end(turn, _plain_key(plain))
        if plain is not None or any(
            host.unsubscribe(turn, peer.connection, message.number) for host in self._hosts
        ):
            ended = Ended(number=message.number, code="", reason="")
            turn.send(peer.connection, encode(ended))

    def _closed(self, turn: Turn, peer: Peer) -> None:
        """A connection may have a million subscriptions: they get nothing from now on, and end one by one."""
        for number in self._delivery.closed(peer.connection):
            if self._tracking is not None:  # the client may be back under this name before that
                self._tracking.detached(plain_name(peer.name, peer.publisher, number), turn.now_us)
            turn.later(partial(self._end_later, peer.connection, number))

    def _end_later(self, connection: int, number: int, turn: Turn) -> None:
        plain = self._delivery.unsubscribe(connection, number)
        if plain is None:
            raise BugError(f"subscription {number} of connection {connection} ended before its time")
        self._end(turn, _plain_key(plain))

    def _end(self, turn: Turn, key: SubscriptionKey) -> None:
        _, _, _, give_back = self._subscribers.pop(key)
        give_back()
        self._routing.unsubscribe(key)
        self._flooding.interest(turn, self._interest.unsubscribe(key))


def _plain_key(subscription: int) -> SubscriptionKey:
    """What interest and routing call a subscription of delivery, which has plain ones only."""
    return SubscriptionKey(SubscriptionKind.PLAIN, subscription)
