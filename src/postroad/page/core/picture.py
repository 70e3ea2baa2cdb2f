"""The topology as it is drawn: where each broker is, its colour, the width and colour of each link.

Places are found once for a set of brokers and links, and kept: a drawing that moves cannot be read. Brokers
that are linked attract each other, all others push each other away (a spring layout), starting from a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from postroad.page.core.figures import doubt, per_second, quantity, share, volume
from postroad.page.core.model import Broker, Link, Model
from postroad.page.core.reading import number, rows, text

ROUNDS: Final = 120
BUSY: Final = 0.35  # of a core
HOT: Final = 0.75
LOSES: Final = 0.001  # of the events of a link
LOSES_MUCH: Final = 0.01
MAX_WIDTH: Final = 9.0
MIN_WIDTH: Final = 1.5
SURE: Final = 1e-3  # a claim with less doubt is drawn as certain

Place = tuple[float, float]


def load_tone(load: float | None, state: str) -> str:
    """The colour of a broker."""
    if state != "up":
        return "gone"
    if load is None:
        return "unknown"
    return "hot" if load >= HOT else "busy" if load >= BUSY else "calm"


def loss_tone(link: Link) -> str:
    if not link.up:
        return "gone"
    if link.lost is None or link.lost < LOSES:
        return "calm"
    return "hot" if link.lost >= LOSES_MUCH else "busy"


def width(traffic: float | None) -> float:
    """Pixels: a step for each factor of ten above 100 bytes a second."""
    if not traffic or traffic < 100:
        return MIN_WIDTH
    return min(MAX_WIDTH, MIN_WIDTH + 1.5 * math.log10(traffic / 100))


class Places:
    """Where brokers are drawn: 0 to 1 from left to right, and from the top down."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._of: tuple[frozenset[str], frozenset[tuple[str, str]]] | None = None

    def find(self, names: Iterable[str], links: Iterable[tuple[str, str]]) -> dict[str, Place]:
        wanted = (frozenset(names), frozenset(links))
        if wanted != self._of:
            self._of = wanted
            self._places = _spring(sorted(wanted[0]), sorted(wanted[1]), self._places)
        return self._places


def _spring(names: list[str], links: list[tuple[str, str]], before: Mapping[str, Place]) -> dict[str, Place]:
    count = len(names)
    if count <= 2:
        return dict(zip(names, [(0.5, 0.5)] if count == 1 else [(0.2, 0.5), (0.8, 0.5)], strict=False))
    angles = np.arange(count) * 2 * np.pi / count - np.pi / 2
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for at, name in enumerate(names):
        if name in before:
            places[at] = (before[name][0] * 2 - 1, before[name][1] * 2 - 1)
    at_of = {name: at for at, name in enumerate(names)}
    linked = np.zeros((count, count))
    for one_end, other_end in links:
        if one_end in at_of and other_end in at_of:
            linked[at_of[one_end], at_of[other_end]] = linked[at_of[other_end], at_of[one_end]] = 1
    ideal = 2 / math.sqrt(count)
    for step in np.linspace(0.2, 0.005, ROUNDS):
        apart = places[:, None] - places[None, :]
        distance = np.maximum(np.linalg.norm(apart, axis=2), 1e-3)
        force = ideal**2 / distance**2 - linked * distance / ideal
        np.fill_diagonal(force, 0)
        moves = (apart * force[:, :, None]).sum(axis=1)
        lengths = np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-9)
        places = places + moves / lengths * np.minimum(lengths, step)
    low, high = places.min(axis=0), places.max(axis=0)
    places = (places - low) / np.maximum(high - low, 1e-6)
    return {name: (float(x), float(y)) for name, (x, y) in zip(names, places.tolist(), strict=True)}


def nodes(model: Model, places: Mapping[str, Place]) -> list[dict[str, Any]]:
    return [_node(broker, places.get(broker.name, (0.5, 0.5))) for broker in _in_order(model)]


def _in_order(model: Model) -> list[Broker]:
    return sorted(model.brokers.values(), key=lambda broker: broker.name)


def _node(broker: Broker, place: Place) -> dict[str, Any]:
    tone = load_tone(broker.load, broker.state)
    published, delivered = broker.rate("published"), broker.rate("delivered")
    below = f"{quantity(published)} in  {quantity(delivered)} out" if broker.state == "up" else broker.state
    said = (
        f"load {share(broker.load)}, {per_second(published)} in, {per_second(delivered)} out"
        if broker.state == "up"
        else ("does not answer" if broker.state == "silent" else f"refuses: {broker.why}")
    )
    return {
        "key": broker.name,
        "x": round(place[0], 4),
        "y": round(place[1], 4),
        "tone": tone,
        "label": broker.name,
        "inside": share(broker.load) if broker.state == "up" else "?",
        "below": below,
        "says": f"broker {broker.name}, {said}",
    }


def edges(model: Model) -> list[dict[str, Any]]:
    return [_edge(link) for _, link in sorted(model.links.items())]


def _edge(link: Link) -> dict[str, Any]:
    said = "down" if not link.up else f"{volume(link.traffic)}/s" if link.traffic is not None else "up"
    label = said
    if link.lost is not None:
        said += f", {share(link.lost)} of best-effort events lost"
        label += f", {share(link.lost)} lost" if link.lost >= LOSES else ""
    return {
        "key": edge_key(*link.ends),
        "from": link.ends[0],
        "to": link.ends[1],
        "tone": loss_tone(link),
        "width": round(width(link.traffic if link.up else None), 1),
        "label": label,
        "says": f"link {link.ends[0]} to {link.ends[1]}, {said}",
    }


def edge_key(one_end: str, other_end: str) -> str:
    return "\n".join(sorted((one_end, other_end)))


def traced(drawn: list[dict[str, Any]], trail: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The edges with the path of a message on them: its direction, and how much it is doubted. Hops between
    brokers that are not linked any more are drawn beside them."""
    hops = {
        edge_key(text(hop, "broker"), text(hop, "from")): hop
        for hop in rows(trail, "route")
        if hop.get("from")
    }
    result = []
    for edge in drawn:
        hop = hops.pop(edge["key"], None)
        result.append({**edge, "path": ""} if hop is None else {**edge, **_hop(hop)})
    for key, hop in hops.items():
        result.append({"key": key, "tone": "gone", "width": MIN_WIDTH, **_hop(hop)})
    return result


def visited(drawn: list[dict[str, Any]], trail: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes, with those that routed the message marked, and how many got it at each."""
    routed = {text(hop, "broker") for hop in rows(trail, "route")}
    receivers = [text(each, "broker") for each in rows(trail, "receivers")]
    result = []
    for node in drawn:
        count = receivers.count(node["key"])
        below = f"{count} got it" if count else "passed" if node["key"] in routed else ""
        says = f"broker {node['label']}" + (f", {below}" if below else "")
        result.append({**node, "mark": node["key"] in routed, "below": below, "says": says})
    return result


def _hop(hop: Mapping[str, Any]) -> dict[str, Any]:
    says = doubt(number(hop, "doubt"))
    return {
        "from": text(hop, "from"),
        "to": text(hop, "broker"),
        "path": "sure" if number(hop, "doubt") < SURE else "doubtful",
        "label": "" if number(hop, "doubt") < SURE else says,
        "says": f"from {text(hop, 'from')} to {text(hop, 'broker')}, {says}",
    }
