"""Delays, round trips and messages on the wire, of the queues paper's middleware (PBM) and MSMQ (spec Q12).

Section 4: every broker is responsible for one application, which lives at another site; applications send to
applications, themselves among them. Each message is walked over the wire hop by hop, with the delay of the
sites it passes, the transmission and reception of its bits, the disk writes that MSMQ makes and the
acknowledgements. Section 3 has formulas for the same, of mean hops and a mean delay: they are the column
`paper`, with the hops that were measured. The curves of figures 6 to 8 exist as pictures only.

The paper does not say how long a message is; a kilobyte with its headers is taken, 64 bytes for an
acknowledgement. `--seconds` means nothing here: time is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Final

from postroad.lab.queues_network import Distances, LeastCostPaths, Ring, path

SECONDS: Final = 1.0
SIZES: Final = (64, 128, 256, 512, 1024)
MANY: Final = 10_000  # brokers of the further run
LONGEST_MS: Final = 15
AREAS_MS: Final = (10, 20, 30, 40, 50, 60)
AREA_SIZE: Final = 1024  # brokers
REPLICAS: Final = 3  # K
PAIRS: Final = 20_000  # at most; below that, every application to every application
SOURCES: Final = 400  # MSMQ sites that send, at most: a tree is made for each
MESSAGE_BITS, ACK_BITS = 1024 * 8, 64 * 8
BITS_PER_MS: Final = 3_152.0  # of a link: 3.152 Mbps
DISK_MS: Final = (5.0, 10.0)
TABLE2: Final = {"pbm": 2_000.0, "msmq_clustered": 11_000.0, "msmq_single": 2_000.0}  # USD a site
PRICES: Final = {"application_server": 2_000, "database_server": 3_500}
NOTES: Final = (
    "The column `paper` is section 3's formulas with the measured hops and the mean delay of a link.",
    "The paper's curves are pictures. Its text says: to who is offline MSMQ sends more than PBM above 1,000"
    " brokers, and PBM is sooner up to about 35 ms.",
    f"Message {MESSAGE_BITS // 8} bytes, acknowledgement {ACK_BITS // 8}: the paper does not say.",
)

Figures = dict[str, float]


def transmission_ms(bits: int) -> float:
    """Out of one site and into the next: the formulas' 2l/p."""
    return 2 * bits / BITS_PER_MS


@dataclass(slots=True)
class Means:
    """Sums by name, of which means are asked."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def of(self, name: str) -> float:
        return self.sums[name] / self.counts[name]

    def all(self) -> Figures:
        return {name: self.of(name) for name in self.sums}


class Wire:
    """Sites of an area, and what it takes to send over them."""

    def __init__(self, distances: Distances, longest_ms: int) -> None:
        self._distances, self._longest_ms = distances, longest_ms

    def carry(self, way: Sequence[int], bits: int) -> float:
        """Milliseconds along these sites; what stays within a site costs nothing."""
        return sum(
            transmission_ms(bits) + self._distances.delay_ms(node, other, self._longest_ms)
            for node, other in pairwise(way)
            if node != other
        )


def messages_on(way: Sequence[int]) -> int:
    return sum(node != other for node, other in pairwise(way))


def pairs(count: int, chance: Random) -> list[tuple[int, int]]:
    """Every application to every application, or as many drawn as are enough for a mean."""
    if count * count <= PAIRS:
        return [(first, other) for first in range(count) for other in range(count)]
    return [(chance.randrange(count), chance.randrange(count)) for _ in range(PAIRS)]


def send_by_ring(ring: Ring, wire: Wire, count: int, chance: Random) -> Figures:
    """Means of PBM: application `n` lives at `homes[n]`, broker `n` is responsible for it."""
    homes = list(range(count))
    chance.shuffle(homes)
    means = Means()
    for source, goal in pairs(count, chance):
        there, back = ring.way(source, goal), ring.way(goal, source)
        to_broker, to_application = [homes[source], *there], [*there[-1:], homes[goal]]
        acknowledged = [*back, homes[source]]
        kept_ms = wire.carry(to_broker, MESSAGE_BITS)
        delivered_ms = kept_ms + wire.carry(to_application, MESSAGE_BITS)
        replicas = ring.replicas(goal, REPLICAS - 1)
        # Replicas are written at once; the slowest counts.
        replicated_ms = max(
            wire.carry((goal, replica), MESSAGE_BITS) + wire.carry((replica, goal), ACK_BITS)
            for replica in replicas
        )
        answered_ms = wire.carry(acknowledged, ACK_BITS)
        sent, answered = messages_on(to_broker), messages_on(acknowledged)
        last = messages_on(to_application)
        means.add(
            hops=messages_on(there),
            online_ms=delivered_ms,
            offline_ms=kept_ms,
            online_rtt_ms=delivered_ms + wire.carry(to_application[::-1], ACK_BITS) + answered_ms,
            offline_rtt_ms=kept_ms + replicated_ms + answered_ms,
            offline_express_rtt_ms=kept_ms + answered_ms,
            online_messages=sent + 2 * last + answered,
            # Kept and confirmed; replicated; then delivered, confirmed again, and the replicas deleted.
            offline_messages=sent + answered + 3 * (REPLICAS - 1) + 2 * last + answered,
            offline_express_messages=sent + answered + 2 * last + answered,
            online_unreliable_messages=sent + last,
            offline_unreliable_messages=sent + 3 * (REPLICAS - 1) + last,
        )
    return means.all()


def send_by_msmq(paths: LeastCostPaths, wire: Wire, count: int, chance: Random) -> Figures:
    """Means of MSMQ: an application's broker is at its own site, and every broker on the way stores."""
    means = Means()
    sources = range(count) if count * count <= PAIRS else chance.sample(range(count), min(count, SOURCES))
    goals = range(count) if count * count <= PAIRS else chance.sample(range(count), PAIRS // len(sources))
    for source in sources:
        before = paths.tree(source)
        for goal in goals:
            way = path(before, source, goal)
            if not way:
                means.add(unreached_share=1)
                continue
            sent_ms = wire.carry(way, MESSAGE_BITS)
            back_ms = wire.carry(way[::-1], ACK_BITS)
            stored_ms, read_ms = (sum(chance.uniform(*DISK_MS) for _ in way) for _ in range(2))
            hops = messages_on(way)
            means.add(
                unreached_share=0,
                hops=hops,
                express_ms=sent_ms,
                recoverable_ms=sent_ms + stored_ms,
                express_rtt_ms=sent_ms + back_ms,
                recoverable_rtt_ms=sent_ms + stored_ms + back_ms + read_ms,
                # Each hop acknowledges; then the destination broker and the application do, all the way back.
                messages=4 * hops,
                unreliable_messages=2 * hops,
            )
    return means.all()


def formulas_of_ring(hops: float, delay_ms: float) -> Figures:
    """Sections 3.1 and 3.3."""
    message, ack = transmission_ms(MESSAGE_BITS) + delay_ms, transmission_ms(ACK_BITS) + delay_ms
    return {
        "online_ms": (hops + 2) * message,
        "offline_ms": (hops + 1) * message,
        "online_rtt_ms": (hops + 2) * (message + ack),
        "offline_rtt_ms": (hops + 2) * (message + ack),
        "offline_express_rtt_ms": (hops + 1) * (message + ack),
        "online_messages": 2 * (hops + 2),
        "offline_messages": 3 * hops + 3 * REPLICAS + 2,
        "offline_express_messages": 3 * hops + 5,
        "online_unreliable_messages": hops + 2,
        "offline_unreliable_messages": hops + 3 * REPLICAS - 1,
    }


def formulas_of_msmq(hops: float, delay_ms: float) -> Figures:
    """Sections 3.2 and 3.4."""
    message, ack = transmission_ms(MESSAGE_BITS) + delay_ms, transmission_ms(ACK_BITS) + delay_ms
    stored_ms = sum(DISK_MS) / 2 * (hops + 1)
    return {
        "express_ms": hops * message,
        "recoverable_ms": hops * message + stored_ms,
        "express_rtt_ms": hops * (message + ack),
        "recoverable_rtt_ms": hops * (message + ack) + 2 * stored_ms,
        "messages": 4 * hops,
        "unreliable_messages": 2 * hops,
    }


def send(ring: Ring, distances: Distances, longest_ms: int) -> tuple[Figures, Figures]:
    """Measured, and by the formulas."""
    count = distances.sites
    wire = Wire(distances, longest_ms)
    ours = send_by_ring(ring, wire, count, Random(count))
    theirs = send_by_msmq(LeastCostPaths(distances, longest_ms), wire, count, Random(count))
    mean_ms = (longest_ms + 1) / 2
    # Least-cost paths take short links; what one of theirs takes on average is part of the measurement.
    link_ms = theirs["express_ms"] / theirs["hops"] - transmission_ms(MESSAGE_BITS)
    measured = {f"pbm_{name}": value for name, value in ours.items()}
    measured |= {f"msmq_{name}": value for name, value in theirs.items()}
    paper = {f"pbm_{name}": value for name, value in formulas_of_ring(ours["hops"], mean_ms).items()}
    paper |= {f"msmq_{name}": value for name, value in formulas_of_msmq(theirs["hops"], link_ms).items()}
    return measured, paper


def crossing(places: Sequence[float], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Where ours meets theirs, between the two places beside it; None if nowhere within the sweep."""
    for index in range(1, len(places)):
        before, after = ours[index - 1] - theirs[index - 1], ours[index] - theirs[index]
        if (before < 0) != (after < 0):
            part = before / (before - after)
            return places[index - 1] + part * (places[index] - places[index - 1])
    return None


def _chosen(figures: Figures, *, traffic: bool) -> Figures:
    """Of one size: what figure 6 or figure 7 shows."""
    return {
        name: value
        for name, value in figures.items()
        if name.endswith(("_hops", "_share")) or name.endswith("_messages") == traffic
    }


def _over_sizes(tell: Callable[[str], None], *, traffic: bool) -> tuple[Figures, Figures]:
    measured: Figures = {}
    paper: Figures = {}
    for count in SIZES:
        distances = Distances(count)
        ours, formulas = send(Ring(distances, tell), distances, LONGEST_MS)
        measured |= {f"{count}.{name}": value for name, value in _chosen(ours, traffic=traffic).items()}
        paper |= {f"{count}.{name}": value for name, value in _chosen(formulas, traffic=traffic).items()}
    return measured, paper


def column(figures: Figures, name: str, places: Sequence[int]) -> list[float]:
    return [figures[f"{place}.{name}"] for place in places]


def run_scale(_seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    """Figure 6, and Table 2."""
    measured, paper = _over_sizes(tell, traffic=False)
    servers, databases = PRICES["application_server"], PRICES["database_server"]
    measured |= {
        "usd_per_site.pbm": float(servers),
        "usd_per_site.msmq_clustered": float(2 * servers + 2 * databases),
        "usd_per_site.msmq_single": float(servers),
    }
    paper |= {f"usd_per_site.{name}": value for name, value in TABLE2.items()}
    if out is not None:
        from postroad.lab.queues_figures import draw_scale

        draw_scale(measured, paper, SIZES, out)
    return measured, paper


def run_traffic(_seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    """Figure 7."""
    measured, paper = _over_sizes(tell, traffic=True)
    brokers = crossing(
        SIZES, column(measured, "pbm_offline_messages", SIZES), column(measured, "msmq_messages", SIZES)
    )
    if brokers is not None:
        measured["msmq_sends_more_above_brokers"] = brokers
    paper["msmq_sends_more_above_brokers"] = 1000.0
    if out is not None:
        from postroad.lab.queues_figures import draw_traffic

        draw_traffic(measured, paper, SIZES, out)
    return measured, paper


def run_distance(_seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    """Figure 8."""
    distances = Distances(AREA_SIZE)
    ring = Ring(distances, tell)
    measured: Figures = {}
    paper: Figures = {}
    for longest_ms in AREAS_MS:
        tell(f"sending over an area of {longest_ms} ms")
        ours, formulas = send(ring, distances, longest_ms)
        measured |= {f"{longest_ms}.{name}": value for name, value in _chosen(ours, traffic=False).items()}
        paper |= {f"{longest_ms}.{name}": value for name, value in _chosen(formulas, traffic=False).items()}
    for receiver, what in product(("online", "offline"), ("ms", "rtt_ms")):
        kind = what.removesuffix("ms")
        area_ms = crossing(
            AREAS_MS,
            column(measured, f"pbm_{receiver}_{what}", AREAS_MS),
            column(measured, f"msmq_recoverable_{what}", AREAS_MS),
        )
        if area_ms is not None:
            measured[f"pbm_{receiver}_{kind}is_sooner_up_to_ms"] = area_ms
        paper[f"pbm_{receiver}_{kind}is_sooner_up_to_ms"] = 35.0
    if out is not None:
        from postroad.lab.queues_figures import draw_distance

        draw_distance(measured, paper, AREAS_MS, out)
    return measured, paper


def run_many(_seconds: float, _out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    """Beyond the paper: ten times as many brokers."""
    distances = Distances(MANY)
    ours, formulas = send(Ring(distances, tell), distances, LONGEST_MS)
    return (
        {f"{MANY}.{name}": value for name, value in ours.items()},
        {f"{MANY}.{name}": value for name, value in formulas.items()},
    )
