"""Subscribing: what clients ask to subscribe to is checked and handed to delivery, interest and routing.

A plain subscription lives as long as its connection. Durable ones, and readers of what is stored, go to
their host after the same checks.
"""

from __future__ import annotations

from typing import Final

from postroad.durable.subscriber.subscribers import DurableHosting
from postroad.errors import DeniedError, PeerError, TooLargeError, UnavailableError, UsageError
from postroad.ids import plain_name
from postroad.links.links import Links, Peer
from postroad.overlay.flooding import Flooding
from postroad.overlay.interest import Interest
from postroad.seam.effects import Effect, Send
from postroad.selectors import Selector
from postroad.streams.delivery import Delivery
from postroad.streams.routing import Routing
from postroad.streams.streams import DURABLE_KEY
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Ended, Limits, Subscribe, Subscribed, Unsubscribe, encode

MAX_MISSING: Final = 256  # brokers named to a subscriber as not having confirmed
_MAX_NUMBER: Final = (1 << 32) - 1


class Subscribing:
    """The subscriptions of this broker's clients. Its effects go to `out`, the broker's.

    `host` is None where there is no disk.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        links: Links,
        delivery: Delivery,
        interest: Interest,
        flooding: Flooding,
        routing: Routing,
        host: DurableHosting | None,
        tracking: Tracking,
        out: list[Effect],
    ) -> None:
        self._limits = limits
        self._links = links
        self._delivery = delivery
        self._interest = interest
        self._flooding = flooding
        self._routing = routing
        self._host = host
        self._tracking = tracking
        self._out = out
        self._subscribers: dict[int, tuple[int, int, str]] = {}  # key -> (connection, number, name)

    def subscribe(self, peer: Peer, message: Subscribe, now_us: int) -> None:
        connection, number = peer.connection, message.number
        self._delivery.check_free(connection, number)
        if self._host is not None and self._host.has(connection, number):
            raise PeerError(f"subscription number {number} is in use on this connection")
        try:
            selector = self._checked(peer, message)
            if message.durable or message.until:
                if self._host is None:
                    raise UsageError("this broker keeps nothing on disk: it has no durable subscriptions")
                begin = self._host.readers.begin if message.until else self._host.subscribe
                self._out += begin(connection, message, selector, now_us)
            else:
                self._subscribe_plain(peer, message, selector, now_us)
        except (UsageError, UnavailableError) as error:
            self._out.append(
                Send(connection, encode(Ended(number=number, code=error.code, reason=str(error))))
            )

    def _checked(self, peer: Peer, message: Subscribe) -> Selector:
        if not 0 <= message.number <= _MAX_NUMBER:
            raise UsageError(f"subscription number {message.number} is not an unsigned 32-bit number")
        durable = 0 if self._host is None else self._host.count(peer.connection)
        if self._delivery.count(peer.connection) + durable >= peer.limits.subscriptions:
            raise TooLargeError(f"more than {peer.limits.subscriptions} subscriptions on one connection")
        selector = Selector.parse(message.topic, message.where, self._limits)
        if not self._links.may_subscribe(peer.connection, message.topic):
            who = peer.principal or "anonymous"
            raise DeniedError(f"{who} may not subscribe to {message.topic or '#'}")
        return selector

    def _subscribe_plain(self, peer: Peer, message: Subscribe, selector: Selector, now_us: int) -> None:
        connection, number = peer.connection, message.number
        name = plain_name(peer.name, peer.publisher, number)
        key = self._delivery.subscribe(
            connection=connection,
            number=number,
            selector=selector,
            overflow=message.overflow,
            buffer=message.buffer,
            name=name,
        )
        try:
            updates = self._interest.subscribe(key, selector)
        except UsageError:
            self._delivery.unsubscribe(connection, number)
            raise
        self._subscribers[key] = (connection, number, name)
        self._tracking.attached(name, now_us)
        self._flooding.interest(updates)
        self._out += self._routing.subscribe(key, self._interest.own_version, now_us)

    def confirmed(self, key: int, missing: tuple[str, ...]) -> list[Effect]:
        """A subscription has begun wherever it can, but for these brokers."""
        missing = missing[:MAX_MISSING]
        if key >= DURABLE_KEY:
            return [] if self._host is None else self._host.confirmed(key, missing)
        connection, number, _ = self._subscribers[key]
        return [Send(connection, encode(Subscribed(number=number, missing=missing)))]

    def unsubscribe(self, peer: Peer, message: Unsubscribe, now_us: int) -> None:
        key = self._delivery.unsubscribe(peer.connection, message.number)
        if key is not None:
            self._end(key, now_us)
        if key is not None or (
            self._host is not None and self._host.unsubscribe(peer.connection, message.number)
        ):
            ended = Ended(number=message.number, code="", reason="")
            self._out.append(Send(peer.connection, encode(ended)))

    def closed(self, connection: int, now_us: int) -> None:
        if self._host is not None:
            self._host.closed(connection)
        for key in self._delivery.closed(connection):
            self._end(key, now_us)

    def _end(self, key: int, now_us: int) -> None:
        _, _, name = self._subscribers.pop(key)
        self._tracking.detached(name, now_us)
        self._routing.unsubscribe(key)
        self._flooding.interest(self._interest.unsubscribe(key))
