"""The brokers a lake knows of: their links, how they read their records, the cheapest ways between them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from postroad.spark.lake.tables import Lake
from postroad.tracking.settings import TrackingConfig


class Place(NamedTuple):
    """What one broker said last; None for what an older one does not tell."""

    name: str
    links: Mapping[str, int]  # broker -> cost
    skew_us: int | None = None
    jitter_us: int | None = None
    routing: str | None = None


def latest(lake: Lake) -> dict[str, Place]:
    """By broker."""
    from pyspark.sql.functions import expr

    said = expr(f"max_by(struct({', '.join(Place._fields)}), number) AS said")
    return {
        row.broker: Place(
            **(row.said.asDict() | {"links": {link.broker: link.cost for link in row.said.links}})
        )
        for row in lake.read("topology").groupBy("broker").agg(said).orderBy("broker").collect()
    }


def tracking_settings(places: Iterable[Place]) -> TrackingConfig:
    """Those that answers depend on: the widest of the brokers', and the defaults where none tells."""
    known = [
        place
        for place in places
        if place.skew_us is not None and place.jitter_us is not None and place.routing
    ]
    if not known:
        return TrackingConfig()
    ways = {place.routing for place in known}
    return TrackingConfig(
        skew_us=max(place.skew_us or 0 for place in known),
        jitter_us=max(place.jitter_us or 0 for place in known),
        routing=ways.pop() or "all" if len(ways) == 1 else "all",
    )


def link_loads(
    places: Mapping[str, Place], flows: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    """Deliveries that went over each link, along the cheapest paths from origins to delivering brokers."""
    loads: dict[tuple[str, str], int] = {}
    for origin in sorted({origin for origin, _ in flows}):
        parents = _cheapest(places, origin)
        for (source, target), count in sorted(flows.items()):
            if source != origin:
                continue
            here = target
            while here in parents:
                link = (min(here, parents[here]), max(here, parents[here]))
                loads[link] = loads.get(link, 0) + count
                here = parents[here]
    return loads


def _cheapest(places: Mapping[str, Place], origin: str) -> dict[str, str]:
    """The broker before each on the way from the origin."""
    parents: dict[str, str] = {}
    costs = {origin: 0}
    queue = [(0, origin)]
    while queue:
        cost, here = heapq.heappop(queue)
        if cost > costs[here] or here not in places:
            continue
        for other, step in sorted(places[here].links.items()):
            if other not in costs or cost + step < costs[other]:
                costs[other] = cost + step
                parents[other] = here
                heapq.heappush(queue, (cost + step, other))
    return parents
