"""Five brokers over wide-area delays: unconnected, in a star, in a line (Pallickara et al., section 9).

The product's own cores on the simulated network. The paper does not say how far its sites were from one
another, so the delays are those of fibre between the places, with a little more for routers; what a search
takes is in virtual time: of the protocol and the distances alone.

The physical limit of a search that waits for everybody: the request reaches the discovery node, from there
the last broker, its response comes back, and the nearest broker is pinged once; each way takes its distance
and the mean of the jitter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from postroad.errors import BugError
from postroad.lab.discovery_figures import draw_topologies
from postroad.sim.discovery import DiscoveryWorld
from postroad.sim.machine.network import Quality
from postroad.units import MILLISECOND_US, SECOND_US

SECONDS: Final = 20.0  # of virtual time between searches, so that nothing of one is left for the next
SEARCHES: Final = 20
SITES: Final = ("indianapolis", "umn", "ncsa", "fsu", "cardiff")
NODE: Final = "bdn"  # in Bloomington
CLIENTS: Final = ("fsu", "cardiff", "umn", "ncsa", "bloomington")
HUB: Final = "indianapolis"
# Kilometres east and north of Bloomington, roughly; Cardiff is the way of the cables.
_PLACES: Final = {
    "bloomington": (0.0, 0.0),
    "indianapolis": (40.0, 70.0),
    "umn": (-560.0, 650.0),
    "ncsa": (-145.0, 105.0),
    "fsu": (190.0, -960.0),
    "cardiff": (6_300.0, 1_400.0),
}
_US_PER_KM: Final = 5.0 * 1.6  # light in fibre, and fibre that does not run straight
_ROUTERS_US: Final = 1_500
JITTER_US: Final = 500
PAPER: Final = {
    "unconnected.bloomington.waiting_percent": 83.0,
    "unconnected.fsu.total_ms": 528.5573,
    "unconnected.cardiff.total_ms": 539.9716,
    "unconnected.umn.total_ms": 1306.393,
    "unconnected.ncsa.total_ms": 410.0891,
    "unconnected.bloomington.total_ms": 338.4112,
}
NOTES: Final = (
    "The paper measured real sites, with Java of 2005, and timeouts; here the network is simulated with"
    " assumed distances, and a search ends when all brokers have answered. Figure 5 of the paper does not"
    " name its site; it is taken to be the University of Minnesota.",
    "over_limit_ms is what a search took beyond the physical limit; allowed_ms is one round trip to the"
    " discovery node (the cookie) and one ping.",
)

Figures = dict[str, float]


def distance_us(site: str, other: str) -> int:
    here, there = (_PLACES[_site(name)] for name in (site, other))
    kilometres = ((here[0] - there[0]) ** 2 + (here[1] - there[1]) ** 2) ** 0.5
    return round(_ROUTERS_US + kilometres * _US_PER_KM) if kilometres else _ROUTERS_US // 10


def _site(name: str) -> str:
    """Requesters are named after their sites."""
    return "bloomington" if name == NODE else name.split("/")[-1]


def _way_us(site: str, other: str) -> int:
    """What a datagram takes on average."""
    return distance_us(site, other) + JITTER_US // 2


TOPOLOGIES: Final[dict[str, list[tuple[str, str]]]] = {
    "unconnected": [],
    "star": [(HUB, site) for site in SITES if site != HUB],
    "linear": list(pairwise(SITES)),
}


def run(seconds: float, out: Path | None, progress: Callable[[str], None]) -> tuple[Figures, Figures]:
    measured: Figures = {}
    for shape in TOPOLOGIES:
        progress(f"{shape}: {SEARCHES} searches at each of {len(CLIENTS)} sites")
        measured |= measure(shape, seconds)
    if out is not None:
        draw_topologies(measured, PAPER, out)
    return measured, dict(PAPER)


def measure(shape: str, seconds: float, searches: int = SEARCHES) -> Figures:
    quality = Quality(jitter_us=JITTER_US)
    world = DiscoveryWorld(1, distance_us, quality=quality)
    world.node(NODE)
    for site in SITES:
        links = [neighbour for neighbour, other in TOPOLOGIES[shape] if other == site]
        nodes = [NODE] if shape != "linear" or site == SITES[0] else []
        world.broker(site, links=links, nodes=nodes)
    world.run(60 * SECOND_US)
    figures: Figures = {}
    for client in CLIENTS:
        totals: list[float] = []
        phases: dict[str, list[float]] = {"request": [], "responses": [], "selection": [], "ping": []}
        good = 0
        for number in range(searches):
            requester = world.requester(f"{shape}{number}/{client}", nodes=[NODE])
            world.finish(requester)
            result = requester.search.result
            if result is None or len(result.candidates) != len(SITES):
                raise BugError(f"{shape}, {client}: a search did not find all brokers")
            nearest = min(world.distances(client).values())
            good += world.distances(client)[result.chosen.response.name] <= nearest * 1.1
            totals.append(result.phases_us["total"] / MILLISECOND_US)
            for name, values in phases.items():
                values.append(result.phases_us[name] / MILLISECOND_US)
            world.run(round(seconds * SECOND_US))
        total = fmean(totals)
        limit = limit_us(shape, client) / MILLISECOND_US
        key = f"{shape}.{client}"
        waiting = fmean(phases["request"]) + fmean(phases["responses"])
        ping = 2 * min(_way_us(client, site) for site in SITES)
        figures |= {
            f"{key}.total_ms": total,
            f"{key}.waiting_percent": 100 * waiting / total,
            f"{key}.ping_percent": 100 * fmean(phases["ping"]) / total,
            f"{key}.limit_ms": limit,
            f"{key}.over_limit_ms": total - limit,
            f"{key}.allowed_ms": (2 * _way_us(client, NODE) + ping) / MILLISECOND_US,
            f"{key}.best_chosen_share": good / searches,
        }
    return figures


def limit_us(shape: str, client: str) -> int:
    """See the module's docstring."""
    reached = (
        {HUB: _way_us(NODE, HUB)} if shape == "linear" else {place: _way_us(NODE, place) for place in SITES}
    )
    for _ in SITES:
        for left, right in TOPOLOGIES[shape]:
            for here, there in ((left, right), (right, left)):
                if here in reached:
                    by_link = reached[here] + _way_us(here, there)
                    reached[there] = min(reached.get(there, by_link), by_link)
    last = max(at + _way_us(site, client) for site, at in reached.items())
    return _way_us(client, NODE) + last + 2 * min(_way_us(client, site) for site in SITES)
