"""Rules that are judged when the run is over, or while the network is at rest.

- `loss`      what a subscription was owed arrived or lies in a reported gap. It is owed every matching event
              accepted by a broker that it was confirmed with, except where that broker's process ended: then
              what is missing must lie in a gap once the broker is back
- `hole`      whatever became of the subscription, nothing is missing in the middle of what it got
- `converge`  after a time of rest all brokers that reach each other agree on the network
- `path`      at rest a broker gets an event from one neighbour, once, and only if somebody behind it wants it
- `accept`    at rest everything published was accepted
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from postroad.config import BrokerConfig
from postroad.ids import is_history, pubend_text
from postroad.sim.judge.connectivity import SETTLE_US, Connectivity
from postroad.sim.judge.ledger import NEVER, Ledger, Published, Subscription
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.frames import BatchView
from postroad.sim.machine.network import Connection
from postroad.sim.machine.process import Process
from postroad.sim.machine.world import World
from postroad.wire.frames import Kind

_LINGER_US: Final = 2_000_000  # interest may outlive a subscription by this much


@dataclass(frozen=True, slots=True)
class Origin:
    """One start of one broker: where a plain pubend lives."""

    broker: str
    pubend: int
    started_us: int
    ended_us: int  # 0: it still runs


class Completeness:
    """Judges what subscriptions got against what they were owed."""

    def __init__(
        self, world: World, ledger: Ledger, connectivity: Connectivity, origins: Mapping[int, Origin]
    ) -> None:
        self._world = world
        self._ledger = ledger
        self._connectivity = connectivity
        self._origins = origins
        self._by_pubend: dict[int, list[Published]] = {}
        for event in ledger.events.values():
            if event.accepted:
                self._by_pubend.setdefault(event.accepted, []).append(event)
        self._brackets: dict[int, dict[bytes, tuple[int, int]]] = {}
        self.owed = 0

    def check(self) -> None:
        for subscription in self._ledger.subscriptions:
            if not subscription.subscribed_us:
                if not subscription.ended_us and self._world.now_us - subscription.asked_us > SETTLE_US:
                    text = f"{subscription.name} was never confirmed"
                    raise Violation("confirm", text, subscription.tags)
                continue
            for pubend, origin in self._origins.items():
                self._check_pubend(subscription, origin, self._by_pubend.get(pubend, []))

    def owed_from(self, subscription: Subscription, origin: Origin) -> int:
        """From when on events of this origin count for the subscription."""
        confirmed = subscription.subscribed_us
        if origin.broker == subscription.broker:
            return confirmed
        late = confirmed + SETTLE_US if origin.broker in subscription.missing else confirmed
        last = origin.ended_us or NEVER
        for begin, end in self._connectivity.spells(origin.broker, subscription.broker):
            at = max(begin + SETTLE_US, late)
            attached = self._connectivity.attached_until(subscription.broker, origin.pubend >> 32, end)
            if origin.started_us <= begin <= last and at <= attached:
                return at
        return NEVER

    def _check_pubend(self, subscription: Subscription, origin: Origin, events: list[Published]) -> None:
        since = self.owed_from(subscription, origin)
        if since == NEVER:
            return
        seen = subscription.seen.get(origin.pubend)
        last_ids = seen.last_id if seen is not None else {}
        complete = not subscription.ended_us and self._within_reach(subscription, origin)
        for event in events:
            if event.sent[origin.pubend] < since:
                continue
            passed = event.id <= last_ids.get(event.id[:8], b"")  # something later of its publisher arrived
            if not (complete or passed) or not subscription.selector.matches(event.topic, event.attributes):
                continue
            self.owed += 1
            if seen is not None and (
                event.id in seen.ticks or seen.in_gap(*self._bracket(event, origin.pubend))
            ):
                continue
            if subscription.got(event.id):
                continue  # sent to two pubends and got from the other
            rule = "hole" if passed else "loss"
            text = (
                f"{subscription.name} ({subscription.selector}), "
                f"confirmed {self._ago(subscription.subscribed_us)}, owed since {self._ago(since)}, "
                f"never got {event.text} on {event.topic}, "
                f"accepted by {origin.broker} {self._ago(event.accepted_us)}"
            )
            raise Violation(rule, text, (event.text, pubend_text(origin.pubend), *subscription.tags))

    def _within_reach(self, subscription: Subscription, origin: Origin) -> bool:
        """Whether the broker of the origin, in this start or a later one, runs and can be reached."""
        last = max(o.started_us for o in self._origins.values() if o.broker == origin.broker)
        if any(
            o.ended_us for o in self._origins.values() if (o.broker, o.started_us) == (origin.broker, last)
        ):
            return False
        if origin.broker == subscription.broker:
            return not origin.ended_us  # else its own subscribers went with it
        spells = self._connectivity.spells(origin.broker, subscription.broker)
        return (
            bool(spells)
            and spells[-1][1] == self._world.now_us
            and spells[-1][1] - spells[-1][0] > 2 * SETTLE_US
        )

    def _bracket(self, event: Published, pubend: int) -> tuple[int, int]:
        """The ticks an event may have: its own if anybody saw it, else between its publisher's others."""
        if pubend not in self._brackets:
            self._brackets[pubend] = self._all_brackets(pubend)
        return self._brackets[pubend][event.id]

    def _all_brackets(self, pubend: int) -> dict[bytes, tuple[int, int]]:
        publishers: dict[bytes, list[bytes]] = {}
        for event in self._by_pubend.get(pubend, []):
            publishers.setdefault(event.id[:8], []).append(event.id)
        brackets: dict[bytes, tuple[int, int]] = {}
        ticks = self._ledger.ticks
        for ids in publishers.values():
            ids.sort()
            low, lows = -NEVER, []
            for id in ids:
                lows.append(low)
                low = ticks.get((pubend, id), low)
            high = NEVER
            for id, low in zip(reversed(ids), reversed(lows), strict=True):
                tick = ticks.get((pubend, id))
                brackets[id] = (low + 1, high - 1) if tick is None else (tick, tick)
                high = high if tick is None else tick
        return brackets

    def _ago(self, time_us: int) -> str:
        return f"{(self._world.now_us - time_us) / 1e6:.3f} s before the end"


class Paths:
    """Watches knowledge between brokers while the network is at rest."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        processes: Mapping[str, Process],
        connections: Callable[[], list[Connection]],
        durably_wanted: Callable[[Published, frozenset[str]], bool],
    ) -> None:
        """`durably_wanted(event, brokers)`: one of these brokers has a durable subscription for it."""
        self._durably_wanted = durably_wanted
        self._world = world
        self._ledger = ledger
        self._processes = processes
        self._connections = connections
        self._since_us = NEVER
        self._came_from: dict[tuple[str, bytes], str] = {}  # (broker, event) -> the neighbour it came from
        self.watched = 0

    def begin(self) -> None:
        self._since_us = self._world.now_us

    def end(self) -> None:
        self._since_us = NEVER

    def observe(self, connection: Connection, side: int, frame: bytes) -> None:
        if frame[4] != Kind.KNOWLEDGE or self._since_us == NEVER:
            return
        sender, receiver = connection.ends[side].name, connection.ends[1 - side].name
        view = BatchView(frame)
        if is_history(view.pubend):
            return  # brokers wrote that themselves
        for id in view.ids():
            event = self._ledger.events[id]
            if min(event.sent.values()) < self._since_us:
                continue
            self.watched += 1
            self._judge(event, sender, receiver)

    def _judge(self, event: Published, sender: str, receiver: str) -> None:
        tags = (event.text, sender, receiver)
        before = self._came_from.get((receiver, event.id))
        if before is not None:
            raise Violation(
                "path", f"{receiver} got {event.text} from {before} and again from {sender}", tags
            )
        self._came_from[receiver, event.id] = sender
        behind = self._behind(sender, receiver)
        for subscription in self._ledger.subscriptions:
            gone = subscription.ended_us and subscription.ended_us + _LINGER_US < self._world.now_us
            wants = subscription.selector.matches(event.topic, event.attributes)
            if subscription.broker in behind and wants and not gone:
                return
        if self._durably_wanted(event, behind):
            return
        raise Violation(
            "path", f"{sender} sent {event.text} to {receiver}, behind which nobody wants it", tags
        )

    def _behind(self, sender: str, receiver: str) -> frozenset[str]:
        """The brokers that can be reached from `receiver` without `sender`."""
        edges = {c.pair for c in self._connections() if all(c.open) and not c.dead}
        reached, border = {receiver}, [receiver]
        while border:
            at = border.pop()
            for name in self._processes:
                if name != sender and name not in reached and tuple(sorted((at, name))) in edges:
                    reached.add(name)
                    border.append(name)
        return frozenset(reached)


def check_agreement(connectivity: Connectivity, processes: Mapping[str, Process]) -> None:
    """Every broker knows exactly the brokers it can reach, and the distance is the same both ways."""
    distances: dict[tuple[str, str], object] = {}
    for group in connectivity.components():
        for name in group:
            core = processes[name].core
            rows = msgspec.convert(
                core.status(processes[name].clock.now_us())["brokers"], list[dict[str, object]]
            )
            known = sorted(str(row["broker"]) for row in rows)
            if known != group:
                text = f"{name} knows {known} and can reach {group}"
                raise Violation("converge", text, (name, "fault", "world"))
            distances |= {(name, str(row["broker"])): row["distance"] for row in rows}
    for (a, b), distance in distances.items():
        if distances[b, a] != distance:
            text = f"{a} is at {distance} from {b}, {b} at {distances[b, a]} from {a}"
            raise Violation("converge", text, (a, b))


def check_memory(processes: Mapping[str, Process], config: BrokerConfig, starts: int) -> None:
    """What brokers hold stays within their limits."""
    for name, process in processes.items():
        if not process.running:
            continue
        metrics = process.core.metrics()
        bounds = {
            "plain_bytes": config.streams.plain_bytes + config.limits.batch_bytes,
            "cache_bytes": config.streams.cache_bytes + config.limits.batch_bytes,
            "delivery_buffered_bytes": config.delivery.buffer_bytes * max(1, int(metrics["subscriptions"])),
            "streams": starts,
        }
        for metric, most in bounds.items():
            if metrics[metric] > most:
                text = f"{name} holds {metrics[metric]} {metric}, the limit is {most}"
                raise Violation("memory", text, (name,))
