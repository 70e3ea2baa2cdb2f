"""Where subscriptions begin: per stream, at the first tick that was filtered with them.

A new subscription is confirmed when it has begun on the streams of all reachable brokers, or after
`wait_us` with the names of those that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from postroad.ids import SubscriptionKey, SubscriptionKind, is_volatile
from postroad.overlay.topology import Topology
from postroad.seam.turn import Turn
from postroad.streams.delivery import Delivery
from postroad.streams.streams import Stream, Upstream

Confirmed = Callable[[Turn, SubscriptionKey, tuple[str, ...]], None]  # subscription, brokers missing
_PLAIN: Final = SubscriptionKind.PLAIN
_DURABLE: Final = SubscriptionKind.DURABLE


class Beginnings:
    """It shares `streams` and `upstream` with the routing core.

    `begin_durable(turn, key, stream)` begins a durable subscription, or says False: later. `confirmed` tells
    the subscriber.
    """

    def __init__(
        self,
        *,
        me: int,
        wait_us: int,
        topology: Topology,
        delivery: Delivery,
        streams: Mapping[int, Stream],
        upstream: Upstream,
        begin_durable: Callable[[Turn, SubscriptionKey, Stream], bool],
        confirmed: Confirmed,
    ) -> None:
        self._me = me
        self._wait_us = wait_us
        self._topology = topology
        self._delivery = delivery
        self._streams = streams
        self._upstream = upstream
        self._begin_durable = begin_durable
        self._confirmed = confirmed
        # Live local subscription -> interest version it needs.
        self._subscriptions: dict[SubscriptionKey, int] = {}
        # Key -> (pubends awaited, deadline).
        self._unconfirmed: dict[SubscriptionKey, tuple[set[int], int]] = {}

    def __len__(self) -> int:
        """Subscriptions that are not confirmed."""
        return len(self._unconfirmed)

    def subscribe(self, turn: Turn, key: SubscriptionKey, version: int) -> None:
        self._subscriptions[key] = version
        plain = key.kind is _PLAIN
        for stream in self._streams.values():
            current = stream.announced and stream.origin in self._upstream
            if plain and stream.pubend is None:
                stream.floors[key] = stream.top if current else None
            if stream.pubend is not None or (stream.version >= version and current):
                self._activate(turn, stream, key, version, stream.horizon)
            else:
                stream.waiting[key] = version
        self._unconfirmed[key] = (self._awaited(key), turn.now_us + self._wait_us)
        self._confirm(turn, key)

    def host_subscription(self, key: SubscriptionKey, version: int) -> None:
        """A durable subscription that has begun wherever it begins: all knowledge must serve it."""
        self._subscriptions[key] = version
        for stream in self._streams.values():
            if not is_volatile(stream.id):
                stream.need = max(stream.need, version)

    def unsubscribe(self, key: SubscriptionKey) -> None:
        self._subscriptions.pop(key, None)
        self._unconfirmed.pop(key, None)
        for stream in self._streams.values():
            stream.waiting.pop(key, None)
            stream.floors.pop(key, None)
            if not self._subscriptions:
                stream.need = 0

    def opened(self, stream: Stream) -> None:
        """There is a stream of an own durable pubend."""
        for key, version in self._subscriptions.items():
            if key.kind is _PLAIN:
                self._delivery.activate(key.id, stream.id, stream.horizon)
            elif key in self._unconfirmed:
                stream.waiting[key] = version

    def created(self, turn: Turn, stream: Stream, former: Stream | None) -> None:
        """There is a stream of another broker; it goes on where `former`, of the same broker, ended."""
        stream.waiting = dict(self._subscriptions)
        if not is_volatile(stream.id):
            for key, version in self._subscriptions.items():
                if key.kind is _DURABLE and key not in self._unconfirmed:
                    del stream.waiting[key]
                    stream.need = max(stream.need, version)
        if former is not None:
            # Subscriptions that were in force on its broker's last stream go on with this one's first tick.
            for key, version in self._subscriptions.items():
                if key not in former.waiting:
                    self._activate(turn, stream, key, version, stream.horizon)

    def in_force(self, turn: Turn, stream: Stream, tick: int) -> None:
        """What follows `tick` is filtered with the stream's version of the own interest."""
        for key, version in [item for item in stream.waiting.items() if item[1] <= stream.version]:
            self._activate(turn, stream, key, version, tick)

    def activate_waiting(self, turn: Turn, stream: Stream) -> None:
        """Hosting has caught up with a stream: durable subscriptions in force there begin."""
        for key, version in [item for item in stream.waiting.items() if item[0].kind is _DURABLE]:
            if stream.pubend is not None or version <= stream.version:
                self._activate(turn, stream, key, version, stream.horizon)

    def _activate(self, turn: Turn, stream: Stream, key: SubscriptionKey, version: int, start: int) -> None:
        if key.kind is _PLAIN:
            self._delivery.activate(key.id, stream.id, max(start, stream.floors.pop(key, None) or 0))
        elif not self._begin_durable(turn, key, stream):
            stream.waiting[key] = version
            return
        stream.waiting.pop(key, None)
        if stream.pubend is None:
            stream.need = max(stream.need, version)
        unconfirmed = self._unconfirmed.get(key)
        if unconfirmed is not None:
            unconfirmed[0].discard(stream.id)
            self._confirm(turn, key)

    def _awaited(self, key: SubscriptionKey) -> set[int]:
        """Pubends of reachable brokers on which the subscription has not begun."""
        return {
            pubend
            for origin in self._topology.reachable()
            if origin != self._me
            for pubend in self._topology.own_pubends(origin)
            if (stream := self._streams.get(pubend)) is None or key in stream.waiting
        }

    def _confirm(self, turn: Turn, key: SubscriptionKey) -> None:
        awaited, _ = self._unconfirmed[key]
        if not awaited:
            del self._unconfirmed[key]
            self._confirmed(turn, key, ())

    def rerouted(self, turn: Turn) -> None:
        """Routes changed: subscriptions stop waiting for brokers that are out of reach now."""
        for key in list(self._unconfirmed):
            awaited, deadline = self._unconfirmed[key]
            self._unconfirmed[key] = (awaited & self._awaited(key), deadline)
            self._confirm(turn, key)

    def tick(self, turn: Turn) -> None:
        """Confirm the subscriptions that waited for `wait_us`, and name the brokers that are missing."""
        for key in [key for key, (_, deadline) in self._unconfirmed.items() if deadline <= turn.now_us]:
            del self._unconfirmed[key]
            # Also brokers that came within reach meanwhile, which it did not wait for.
            origins = sorted({pubend >> 32 for pubend in self._awaited(key)})
            self._confirmed(turn, key, tuple(self._topology.name(origin) for origin in origins))

    def next_deadline(self) -> int | None:
        return min((deadline for _, deadline in self._unconfirmed.values()), default=None)
