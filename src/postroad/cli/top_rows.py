"""What `postroad top` shows: the answers of all brokers as rows of five tables. No terminal, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Table -> its columns. The first is the one to sort by at first.
VIEWS: Final[dict[str, tuple[str, ...]]] = {
    "brokers": (
        *("broker", "address", "up s", "links", "clients"),
        *("in/s", "out/s", "bytes in/s", "machine CPU %", "note"),
    ),
    "links": ("broker", "to", "rtt ms", "clock ms", "up s", "unsent credit"),
    "subscriptions": ("name", "broker", "connected", "lag events", "lag s", "topic"),
    "queues": ("inbox", "depth", "oldest s", "consumers", "responsible", "replicas", "epoch"),
    "clients": ("client", "broker", "host", "up s", "subscriptions", "bytes/s"),
}

Row = tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What all brokers said at one time."""

    at_s: float
    status: Mapping[str, Any] = field(default_factory=dict)  # broker -> its status
    subs: Mapping[str, Any] = field(default_factory=dict)
    clients: Mapping[str, Any] = field(default_factory=dict)
    queues: tuple[Mapping[str, Any], ...] = ()
    silent: tuple[str, ...] = ()  # brokers that did not answer


def tables(look: Look, before: Look | None) -> dict[str, list[Row]]:
    """The rows of each table; rates are those since the look before."""
    return {
        "brokers": _brokers(look, before),
        "links": [
            (
                name,
                link["broker"],
                round(link["rtt_ms"] or 0, 1),
                round(link["clock_offset_ms"] or 0, 1),
                link["up_s"],
                link["credit"],
            )
            for name, status in look.status.items()
            for link in status["links"]
        ],
        "subscriptions": [
            (
                row["name"],
                broker,
                "yes" if row["connected"] else "no",
                row["lag_events"],
                round(row["lag_s"], 1),
                row["topic"],
            )
            for broker, page in look.subs.items()
            for row in page["subscriptions"]
            if not row["moved"]
        ],
        "queues": [
            (
                row["inbox"],
                row["depth"],
                round(row["oldest_s"] or 0, 1),
                row["consumers"],
                row["responsible"],
                ", ".join(row["replicas"]),
                row["epoch"],
            )
            for row in look.queues
        ],
        "clients": _clients(look, before),
    }


def _brokers(look: Look, before: Look | None) -> list[Row]:
    rows: list[Row] = []
    passed_s = _passed_s(look, before)
    for name, status in look.status.items():
        metrics = status["metrics"]
        earlier = {} if before is None else before.status.get(name, {})
        same = earlier.get("boot") == status["boot"]
        then = earlier["metrics"] if same else metrics
        usage = status["discovery"]["usage"]
        rows.append(
            (
                name,
                status.get("address", "?"),
                status["uptime_s"],
                len(status["links"]),
                metrics["clients"],
                _rate(metrics, then, "events_in_total", passed_s),
                _rate(metrics, then, "deliveries_total", passed_s),
                _rate(metrics, then, "bytes_in_total", passed_s),
                round(100 * usage["cpu_share"], 1),
                "" if status["kernel"] == "compiled" else "kernel not compiled",
            )
        )
    rows += [(name, "?", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, "does not answer") for name in look.silent]
    return rows


def _passed_s(look: Look, before: Look | None) -> float:
    return 1.0 if before is None else max(0.001, look.at_s - before.at_s)


def _rate(now: Mapping[str, float], then: Mapping[str, float], metric: str, passed_s: float) -> float:
    return round((now.get(metric, 0) - then.get(metric, 0)) / passed_s, 1)


def _clients(look: Look, before: Look | None) -> list[Row]:
    earlier = {} if before is None else {place: row["bytes_in"] for place, row in _connections(before)}
    passed_s = _passed_s(look, before)
    return [
        (
            row["name"] or "(unnamed)",
            place[0],
            row["host"] or "?",
            row["up_s"],
            row["subscriptions"],
            round((row["bytes_in"] - earlier.get(place, row["bytes_in"])) / passed_s, 1),
        )
        for place, row in _connections(look)
    ]


def _connections(look: Look) -> list[tuple[tuple[str, int], Mapping[str, Any]]]:
    """By broker and number."""
    return [
        ((broker, row["connection"]), row) for broker, page in look.clients.items() for row in page["clients"]
    ]


def in_order(rows: list[Row], column: int, *, backwards: bool) -> list[Row]:
    """Numbers before texts, where a column has both."""
    return sorted(rows, key=lambda row: (isinstance(row[column], str), row[column]), reverse=backwards)
