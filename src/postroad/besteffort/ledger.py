"""What became of best-effort events here: on each link, and for each subscriber that repairs (spec P7).

Brokers know nothing of repair. What a subscriber reports of it is noted under its name, for status, metrics,
traces and the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from postroad.errors import PeerError
from postroad.ids import ID_BYTES
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.streams.delivery import Delivery
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import Repaired

MAX_RECEIVERS: Final = 10_000  # whose figures wait to be published; then the oldest are not
MAX_SHOWN: Final = 100  # rows of the status: those that lost most
# Metrics, and the fields of reports that they are sums of.
_SUMS: Final = {
    "repair_received": "received",
    "repair_losses_detected": "detected",
    "repair_requests": "requests",
    "repair_recovered": "recovered",
    "repair_given_up": "given_up",
    "repair_duplicates_suppressed": "duplicates",
    "repair_repairs_sent": "repairs",
    "repair_cache_asked": "asked",
    "repair_cache_hits": "hits",
    "repair_cache_messages": "cached",
}


@dataclass(slots=True)
class LinkCount:
    """Events, since this start of the broker."""

    sent: int = 0  # meant for that neighbour
    received: int = 0  # that came from it


class Ledger:
    def __init__(self, board: Switchboard, *, delivery: Delivery, tracking: Tracking | None) -> None:
        self._delivery = delivery
        self._tracking = tracking
        self._links: dict[int, LinkCount] = {}  # by neighbour; by this broker: what clients published here
        self._changed: set[int] = set()  # those that were not taken yet
        self._receivers: dict[str, Repaired] = {}  # likewise, by the name of the subscription
        # By connection and subscription: the last report. What has ended is dropped at the next new one.
        self._reports: dict[int, dict[int, Repaired]] = {}
        board.from_client(Repaired, self._repaired)
        board.peers("client", down=self._down)
        board.metrics(self.metrics)
        board.status("repair", self._status)
        board.status("best_effort_links", self._links_status)

    def sent(self, neighbour: int, count: int) -> None:
        self._link(neighbour).sent += count

    def received(self, neighbour: int, count: int) -> None:
        self._link(neighbour).received += count

    def _link(self, neighbour: int) -> LinkCount:
        self._changed.add(neighbour)
        return self._links.setdefault(neighbour, LinkCount())

    def _repaired(self, turn: Turn, peer: Peer, message: Repaired) -> None:
        if len(message.ids) % ID_BYTES:
            raise PeerError(f"REPAIRED with {len(message.ids)} bytes of ids, which have {ID_BYTES} each")
        name = self._delivery.name(peer.connection, message.number)
        if name is None:
            return  # it has just ended
        reports = self._reports.setdefault(peer.connection, {})
        if message.number not in reports:
            for number in [at for at in reports if self._delivery.name(peer.connection, at) is None]:
                del reports[number]
        reports[message.number] = message
        if message.ids and self._tracking is not None:
            self._tracking.repaired(name, message.ids, turn.now_us)
        self._receivers.pop(name, None)
        self._receivers[name] = message
        while len(self._receivers) > MAX_RECEIVERS:
            del self._receivers[next(iter(self._receivers))]

    def _down(self, _turn: Turn, peer: Peer) -> None:
        self._reports.pop(peer.connection, None)

    def _present(self) -> list[tuple[str, Repaired]]:
        """Reports of the subscriptions that are here, with their names."""
        return [
            (name, report)
            for connection, reports in self._reports.items()
            for number, report in reports.items()
            if (name := self._delivery.name(connection, number)) is not None
        ]

    def metrics(self) -> dict[str, int | float]:
        """Sums over the subscriptions that repair and are here now."""
        reports = [report for _, report in self._present()]
        return {
            "repair_subscriptions": len(reports),
            **{name: sum(getattr(report, field) for report in reports) for name, field in _SUMS.items()},
            "repair_recovery_seconds": sum(report.recovery_us for report in reports) / SECOND_US,
        }

    def _status(self, _now_us: int) -> list[dict[str, object]]:
        rows = sorted(self._present(), key=lambda row: (-row[1].detected, row[0]))[:MAX_SHOWN]
        return [_row(name, report) for name, report in rows]

    def _links_status(self, _now_us: int) -> list[dict[str, object]]:
        """Compared with what the neighbour counts, they tell what the link loses."""
        return [
            {"number": f"{at:08x}", "sent": count.sent, "received": count.received}
            for at, count in sorted(self._links.items())[:MAX_SHOWN]
        ]

    @property
    def changed(self) -> bool:
        return bool(self._changed or self._receivers)

    def restate(self) -> None:
        """All links count as changed."""
        self._changed.update(self._links)

    def take(self) -> tuple[list[tuple[int, int, int]], list[tuple[str, Repaired]]]:
        """What changed since the last time: of each link the neighbour, and how many went there and came from
        there in all; of each subscriber what it said last."""
        links = [(at, self._links[at].sent, self._links[at].received) for at in sorted(self._changed)]
        receivers = sorted(self._receivers.items(), key=itemgetter(0))
        self._changed.clear()
        self._receivers.clear()
        return links, receivers


def _row(name: str, report: Repaired) -> dict[str, object]:
    return {
        "subscriber": name,
        "received": report.received,
        "losses_detected": report.detected,
        "requests": report.requests,
        "recovered": report.recovered,
        "given_up": report.given_up,
        "duplicates_suppressed": report.duplicates,
        "recovery_ms": round(report.recovery_us / max(1, report.recovered) / 1_000, 1),
        "repairs_sent": report.repairs,
        "hit_ratio": round(report.hits / report.asked, 3) if report.asked else None,
        "cache_messages": report.cached,
    }
