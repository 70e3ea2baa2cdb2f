"""What clients do: publish events on a small tree of topics, subscribe to parts of it, come and go."""

from __future__ import annotations

from random import Random
from typing import Final

from postroad.events import Value
from postroad.selectors import Selector
from postroad.sim.machine.world import World
from postroad.sim.people.applications import DurablePublisher
from postroad.sim.people.clients import Publisher, Subscriber

_FIRST: Final = ("orders", "stock", "news", "$system")
_SECOND: Final = ("eu", "us", "asia", "")
_THIRD: Final = ("a1", "a2", "b1")
_PATTERNS: Final = (
    *("", "#", "orders/#", "stock/#", "orders/eu/#", "+/eu/#", "+/+/a1", "orders/+/a2"),
    *("stock/us/b1", "news/asia", "news/#", "$system/#", "+/asia", "orders/us/+"),
)
_CONDITIONS: Final = (
    *("", "", "", "price > 100", "price <= 40", "price BETWEEN 20 AND 60", "region IN ('eu', 'us')"),
    *("region LIKE 'a%'", "ok = TRUE", "NOT (ok = TRUE)", "ratio IS NULL", "ratio > 0.5 OR price < 10"),
    *(
        "price > 50 AND region = 'eu' OR ok = FALSE",
        "region <> 'eu' AND ratio IS NOT NULL",
        "price * 2 > 300",
    ),
)
MAX_WANTS: Final = 4  # subscriptions of one client at a time


def random_selector(chance: Random) -> Selector:
    return Selector.parse(chance.choice(_PATTERNS), chance.choice(_CONDITIONS))


def random_event(chance: Random) -> tuple[str, dict[str, Value], bytes]:
    levels = (chance.choice(_FIRST), chance.choice(_SECOND), chance.choice(_THIRD))
    topic = "/".join(levels[: chance.randint(1, 3)])
    attributes: dict[str, Value] = {}
    if chance.random() < 0.9:
        attributes["price"] = chance.randint(0, 200)
    if chance.random() < 0.8:
        attributes["region"] = chance.choice(("eu", "us", "asia", "africa"))
    if chance.random() < 0.7:
        attributes["ok"] = chance.random() < 0.5
    if chance.random() < 0.5:
        attributes["ratio"] = chance.random()
    return topic, attributes, chance.randbytes(chance.randint(0, 300))


class PublishingHabit:
    """Bursts of events at random intervals around `pause_us`, until told to stop."""

    def __init__(self, world: World, publisher: Publisher | DurablePublisher, *, pause_us: int) -> None:
        self._world = world
        self._publisher = publisher
        self._chance = world.random(f"publishes/{publisher.name}")
        self._pause_us = pause_us
        self._going_on = True
        self._next()

    def stop(self) -> None:
        self._going_on = False

    def _next(self) -> None:
        pause = min(20 * self._pause_us, int(self._chance.expovariate(1 / self._pause_us)))
        self._world.after(pause, self._publish)

    def _publish(self) -> None:
        if not self._going_on:
            return
        frames = 1 if self._chance.random() < 0.8 else self._chance.randint(2, 6)
        for _ in range(frames):
            if self._publisher.ready:
                events = [random_event(self._chance) for _ in range(self._chance.choice((1, 1, 2, 5, 12)))]
                self._publisher.publish(events)
        self._next()


class SubscribingHabit:
    """A subscriber that changes its mind, and now and then leaves and comes back."""

    def __init__(self, world: World, subscriber: Subscriber, *, pause_us: int, restless: bool) -> None:
        self._world = world
        self._subscriber = subscriber
        self._chance = world.random(f"subscribes/{subscriber.name}")
        self._pause_us = pause_us
        self._going_on = restless
        self._keys: list[int] = []
        self._next_key = 1
        self._away = False
        for _ in range(self._chance.randint(1, 3)):
            self._want()
        if restless:
            self._next()

    def stop(self) -> None:
        """Keep to what it has, and be there."""
        self._going_on = False
        if self._away:
            self._return()
        if not self._keys:
            self._want()

    def _want(self) -> None:
        self._keys.append(self._next_key)
        self._subscriber.want(self._next_key, random_selector(self._chance))
        self._next_key += 1

    def _next(self) -> None:
        self._world.after(self._chance.randint(self._pause_us // 4, 2 * self._pause_us), self._change)

    def _change(self) -> None:
        if not self._going_on:
            return
        dice = self._chance.random()
        if self._away:
            self._return()
        elif dice < 0.1:
            self._away = True
            self._subscriber.stop()
        elif dice < 0.5 and self._keys:
            self._subscriber.unwant(self._keys.pop(self._chance.randrange(len(self._keys))))
        elif len(self._keys) < MAX_WANTS:
            self._want()
        self._next()

    def _return(self) -> None:
        self._away = False
        self._subscriber.start()
