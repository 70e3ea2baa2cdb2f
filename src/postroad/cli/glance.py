"""A broker at a glance: a few sentences made of its status, and what somebody should look at."""

from __future__ import annotations

from typing import Any, Final

from postroad.cli.words import count, printable, size, span

# Metric -> what it says of one of these, and of many; shown when it is not 0.
CONCERNS: Final = {
    "streams_with_gaps": (
        "stream misses events, which it asked for",
        "streams miss events, which it asked for",
    ),
    "lost_spans_total": (
        "time plain events were lost: their broker died, or a reader fell too far behind",
        "times plain events were lost: their broker died, or a reader fell too far behind",
    ),
    "dropped_deliveries_total": (
        "delivery to a slow subscriber was dropped; it was told a gap",
        "deliveries to slow subscribers were dropped; they were told gaps",
    ),
    "stalled_connections": ("connection does not read", "connections do not read"),
    "feeds_blocked": ("neighbour takes no more for now", "neighbours take no more for now"),
    "durable_failures_total": (
        "failure of durable events: see the log",
        "failures of durable events: see the log",
    ),
    "queue_disk_failures_total": (
        "failure of a queue's disk: see the log",
        "failures of a queue's disk: see the log",
    ),
    "queue_replicas_behind": ("replica of queues is not up to date", "replicas of queues are not up to date"),
    "queue_dead_letters": (
        "dead letter of queues: `postroad queues`",
        "dead letters of queues: `postroad queues`",
    ),
    "history_dropped_total": ("record of its history was dropped", "records of its history were dropped"),
}


def concerns(status: dict[str, Any]) -> list[str]:
    """What is not as it should be, a sentence each."""
    metrics = status.get("metrics", {})
    worries = [count(metrics[name], *texts) for name, texts in CONCERNS.items() if metrics.get(name)]
    if status.get("kernel") == "reference":
        worries.append("its kernel is not compiled: it works, slowly")
    if status.get("ring", {}).get("joining"):
        worries.append("it is still joining the ring of queues")
    return worries


def glance(status: dict[str, Any]) -> list[str]:
    """The broker in a few lines: who it is, whom it reaches, who is there, what came and went."""
    metrics = status["metrics"]
    worries = concerns(status)
    state = "is well" if not worries else "works, but look below"
    lines = [
        f"{status['name']} {state}: up {span(status['uptime_s'])}, at {status.get('address', '?')}",
        f"  network  {_network(status)}",
        f"  clients  {_clients(metrics)}",
        f"  events   {_events(metrics)}",
    ]
    if "durable_pubends" in status:
        lines.append(f"  durable  {_durable(metrics)}")
    if "queues" in status:
        lines.append(f"  queues   {_queues(metrics)}")
    lines += [f"  look at  {worry}" for worry in worries]
    return [printable(line) for line in lines]


def broker_line(status: dict[str, Any]) -> str:
    """The broker in one line, among others."""
    metrics = status["metrics"]
    worries = concerns(status)
    parts = (
        status["name"],
        status.get("address", "?"),
        f"up {span(status['uptime_s'])}",
        count(metrics.get("links", 0), "link"),
        count(metrics.get("clients", 0), "client"),
        f"{count(metrics.get('events_in_total', 0), 'event')} in",
        f"{_deliveries(metrics):,} delivered",
        "well" if not worries else "; ".join(worries),
    )
    return printable("  ".join(parts))


def _network(status: dict[str, Any]) -> str:
    others = len(status["brokers"]) - 1
    links = [
        link["broker"] + ("" if link["rtt_ms"] is None else f" ({link['rtt_ms']:.1f} ms)")
        for link in status["links"]
    ]
    if not others:
        return "no other broker is linked"
    return f"{count(others, 'other broker')} in reach; linked to {', '.join(links)}"


def _clients(metrics: dict[str, Any]) -> str:
    durable, connected = (
        metrics.get(name, 0) for name in ("durable_subscriptions", "durable_subscriptions_connected")
    )
    text = f"{count(metrics['clients'], 'client')}, {count(metrics.get('subscriptions', 0), 'subscription')}"
    if durable:
        text += f"; {count(durable, 'durable subscription')}, {connected:,} connected"
    return text


def _events(metrics: dict[str, Any]) -> str:
    published = count(metrics.get("events_in_total", 0), "event")
    return f"{published} published here, {count(_deliveries(metrics), 'delivery', 'deliveries')}"


def _deliveries(metrics: dict[str, Any]) -> int:
    names = ("deliveries_total", "durable_deliveries_total", "best_effort_delivered_total")
    return sum(metrics.get(name, 0) for name in names)


def _durable(metrics: dict[str, Any]) -> str:
    kept = size(metrics.get("durable_kept_bytes", 0))
    return f"{count(metrics.get('durable_events_total', 0), 'durable event')} since it started, {kept} kept"


def _queues(metrics: dict[str, Any]) -> str:
    waiting = count(metrics.get("queue_depth", 0), "message waits", "messages wait")
    return f"{waiting} in {count(metrics.get('queue_inboxes', 0), 'inbox', 'inboxes')} that it answers for"
