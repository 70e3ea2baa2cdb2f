"""The rows of the tables, from answers. A row has a key, cells and the acts that are possible on it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from postroad.events import Event
from postroad.page.core.figures import Line, doubt, duration, per_second, quantity, share, volume
from postroad.page.core.model import Broker, Model
from postroad.page.core.picture import SURE, load_tone, loss_tone
from postroad.page.core.reading import MAX_TEXT, Answer, maybe, number, rows, shown, text, texts, within


def cell(
    text: str, *, tone: str = "", below: str = "", chip: bool = False, mono: bool = False
) -> dict[str, Any]:
    return {"text": text, "tone": tone, "below": below, "chip": chip, "mono": mono}


def row(key: str, *cells: str | dict[str, Any], acts: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "key": key,
        "cells": [cell(each) if isinstance(each, str) else each for each in cells],
        "acts": list(acts),
    }


def matching(listed: Sequence[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    """Rows in which every word is somewhere."""
    wanted = words.casefold().split()
    return [
        each
        for each in listed
        if all(
            any(word in (part["text"] + " " + part["below"]).casefold() for part in each["cells"])
            for word in wanted
        )
    ]


def left_out(answers: Mapping[str, Answer], command: str = "") -> str:
    """What is said where brokers have more than one answer holds: the page cannot find that."""
    names = sorted(name for name, answer in answers.items() if answer.get("more") is True)
    lists = f" `{command}` lists them." if command else ""
    return f"Not all are here: {', '.join(names)} has more.{lists}" if names else ""


# ---- brokers

BROKER_COLUMNS = ("broker", "load#", "published#", "delivered#", "forwarded#", "clients#", "links#", "up#")


def brokers(model: Model) -> list[dict[str, Any]]:
    return [_broker(broker) for broker in sorted(model.brokers.values(), key=lambda each: each.name)]


def _broker(broker: Broker) -> dict[str, Any]:
    state = {"up": share(broker.load), "silent": "does not answer", "refused": "refuses"}[broker.state]
    return row(
        broker.name,
        broker.name,
        cell(state, tone=load_tone(broker.load, broker.state), chip=True),
        per_second(broker.rate("published")),
        per_second(broker.rate("delivered")),
        per_second(broker.rate("forwarded")),
        quantity(number(broker.status, "clients")),
        str(len(rows(broker.status, "links"))),
        duration(maybe(broker.status, "uptime_s")),
    )


def facts(broker: Broker) -> list[tuple[str, str]]:
    """One broker, a fact a line."""
    status, metrics = broker.status, broker.metrics
    ring, queues = within(status, "ring"), within(status, "queues")
    usage = within(within(status, "discovery"), "usage")
    return [
        ("address", text(status, "address") or "-"),
        ("number", text(status, "number") or "-"),
        ("version", " ".join(filter(None, (text(status, "version"), text(status, "kernel"), "kernel")))),
        ("up for", duration(maybe(status, "uptime_s"))),
        ("connections", quantity(maybe(usage, "connections"))),
        ("memory free", volume(maybe(usage, "memory_free_bytes"))),
        ("ring neighbours", ", ".join(texts(ring, "leaves")) or "none"),
        (
            "queues",
            f"answers for {number(queues, 'responsible_for'):.0f} of {number(queues, 'arcs'):.0f} arcs",
        ),
        ("histories", quantity(maybe(metrics, "tracking_histories"))),
        ("histories in memory", volume(maybe(metrics, "tracking_memory_bytes"))),
        ("histories on disk", volume(maybe(metrics, "tracking_kept_bytes"))),
        ("log", f"{volume(maybe(metrics, 'durable_kept_bytes'))} of durable events"),
    ]


LINK_COLUMNS = ("link", "traffic#", "lost#", "round trip#", "up#")


def links_of(model: Model, name: str = "") -> list[dict[str, Any]]:
    """Of one broker, or all."""
    result = []
    for ends, link in sorted(model.links.items()):
        if name and name not in ends:
            continue
        other = ends[1] if ends[0] == name else ends[0]
        trip = link.round_trip_ms
        seconds = [number(each, "up_s") for each in link.rows.values()]
        result.append(
            row(
                "\n".join(ends),
                other if name else " - ".join(ends),
                "-" if link.traffic is None else f"{volume(link.traffic)}/s",
                cell("down" if not link.up else share(link.lost), tone=loss_tone(link), chip=True),
                "-" if trip is None else f"{trip:.1f} ms",
                duration(max(seconds)) if seconds and link.up else "-",
            )
        )
    return result


STREAM_COLUMNS = ("stream", "from", "kind", "behind#", "kept#")


def streams(status: Answer, now_us: float) -> list[dict[str, Any]]:
    result = []
    for stream in rows(status, "streams"):
        pubend = text(stream, "pubend")
        behind_s = max(0.0, (now_us - number(stream, "horizon")) / 1e6)
        gaps = number(stream, "unknown")
        result.append(
            row(
                pubend,
                cell(pubend, mono=True),
                text(stream, "broker"),
                "durable" if pubend.endswith("-00000000") else "plain",
                cell(
                    duration(behind_s), tone="busy" if gaps else "", below=f"{gaps:.0f} gaps" if gaps else ""
                ),
                volume(number(stream, "held_bytes")),
            )
        )
    return result


SUBSCRIBER_COLUMNS = ("subscription", "topic", "condition", "delivered#", "dropped#", "waiting#")


def subscribers(status: Answer) -> list[dict[str, Any]]:
    """The connections that read at a broker."""
    return [
        row(
            f"{each.get('connection')}.{each.get('number')}",
            text(each, "name"),
            cell(text(each, "topic") or "#", mono=True),
            cell(text(each, "where"), mono=True),
            quantity(number(each, "delivered")),
            cell(quantity(number(each, "dropped")), tone="busy" if number(each, "dropped") else ""),
            volume(number(each, "buffered_bytes")),
        )
        for each in rows(status, "subscriptions")
    ]


# ---- durable subscriptions

SUBSCRIPTION_COLUMNS = ("subscription", "broker", "reads", "mode", "behind#", "oldest#", "owner")
ACTS = ("Delete", "Replay")


def subscriptions(model: Model, *, acts: bool) -> list[dict[str, Any]]:
    """Those furthest behind first."""
    listed = [
        (broker, each)
        for broker, answer in model.answers.get("subs", {}).items()
        for each in rows(answer, "subscriptions")
        if not each.get("moved")
    ]
    listed.sort(key=lambda pair: (-number(pair[1], "lag_events"), text(pair[1], "name"), pair[0]))
    return [_subscription(broker, each, acts=acts) for broker, each in listed]


def subscription_key(broker: str, name: str) -> str:
    return f"{broker}\n{name}"


def _subscription(broker: str, each: Answer, *, acts: bool) -> dict[str, Any]:
    away = not each.get("connected")
    mode = "away" if away else text(each, "mode") or "connected"
    behind = quantity(number(each, "lag_events"))
    return row(
        subscription_key(broker, str(each.get("name", ""))),
        text(each, "name"),
        broker,
        cell(text(each, "topic") or "#", below=text(each, "where"), mono=True),
        cell(
            mode,
            chip=True,
            tone={"away": "gone", "catchup": "busy"}.get(mode, "calm"),
            below="shared" if each.get("shared") else "",
        ),
        f"at least {behind}" if each.get("lag_at_least") else behind,
        duration(number(each, "lag_s")),
        text(each, "principal") or "anybody",
        acts=ACTS if acts else (),
    )


def find_subscription(model: Model, key: str) -> tuple[str, Answer] | None:
    for broker, answer in model.answers.get("subs", {}).items():
        for each in rows(answer, "subscriptions"):
            if subscription_key(broker, str(each.get("name", ""))) == key:
                return broker, each
    return None


MAX_DRAWN = 2  # pubends of a subscription in a chart


def progress(model: Model, key: str) -> dict[str, Line]:
    """latestDelivered and released of a subscription, for those of its pubends that are furthest behind."""
    listed = find_subscription(model, key)
    if listed is None:
        return {}
    broker, each = listed
    name = text(each, "name")
    released = sorted(
        (tick, shown(pubend)) for pubend, tick in within(each, "released").items() if isinstance(tick, int)
    )
    lines: dict[str, Line] = {}
    for _, pubend in released[:MAX_DRAWN]:
        for title, owner in (("latestDelivered", ""), ("released", name)):
            line = model.watched.get((broker, owner, pubend))
            if line is not None:
                lines[f"{title} of {model.pubend_name(pubend)}"] = line
    return lines


# ---- queues

QUEUE_COLUMNS = (
    "inbox",
    "waiting#",
    "oldest#",
    "consumers#",
    "answers for it",
    "replicas",
    "epoch#",
    "dead letters#",
)


def queues(answer: Answer, *, acts: bool) -> list[dict[str, Any]]:
    result = []
    for each in sorted(
        rows(answer, "queues"), key=lambda item: (-number(item, "depth"), text(item, "inbox"))
    ):
        dead = number(each, "dead")
        result.append(
            row(
                str(each.get("inbox", "")),
                text(each, "inbox"),
                cell(quantity(number(each, "depth")), below=volume(maybe(each, "bytes"))),
                duration(number(each, "oldest_s")) if number(each, "depth") else "-",
                quantity(number(each, "consumers")),
                text(each, "responsible"),
                ", ".join(texts(each, "replicas")),
                quantity(number(each, "epoch")),
                cell(quantity(dead), tone="hot" if dead else ""),
                acts=("Send again", "Drop") if acts and dead else (),
            )
        )
    return result


DEAD_COLUMNS = ("from", "message", "attempts#", "why")


def dead_letters(answer: Answer) -> list[dict[str, Any]]:
    return [
        row(
            str(at),
            text(each, "source"),
            cell(payload(str(each.get("payload", ""))), mono=True),
            quantity(number(each, "attempts")),
            text(each, "reason"),
        )
        for at, each in enumerate(rows(answer, "dead"))
    ]


def payload(encoded: str) -> str:
    """Base64, as text that can be looked at."""
    try:
        return shown(base64.b64decode(encoded[: 4 * MAX_TEXT]).decode(errors="replace"))
    except ValueError:
        return "(not readable)"


# ---- repair

REPAIR_COLUMNS = (
    "subscriber",
    "broker",
    "received#",
    "lost#",
    "asked for#",
    "recovered#",
    "given up#",
    "in#",
    "repairs sent#",
    "hits#",
    "cache#",
)


def repair(model: Model) -> list[dict[str, Any]]:
    """Who lost most, first."""
    listed = [(broker.name, each) for broker in model.up for each in rows(broker.status, "repair")]
    listed.sort(key=lambda pair: (-number(pair[1], "losses_detected"), text(pair[1], "subscriber")))
    return [
        row(
            f"{broker}\n{text(each, 'subscriber')}",
            text(each, "subscriber"),
            broker,
            quantity(number(each, "received")),
            quantity(number(each, "losses_detected")),
            quantity(number(each, "requests")),
            quantity(number(each, "recovered")),
            cell(quantity(number(each, "given_up")), tone="hot" if number(each, "given_up") else ""),
            f"{number(each, 'recovery_ms'):.1f} ms" if number(each, "recovered") else "-",
            quantity(number(each, "repairs_sent")),
            share(maybe(each, "hit_ratio")),
            quantity(number(each, "cache_messages")),
        )
        for broker, each in listed
    ]


def repair_facts(model: Model) -> list[tuple[str, str]]:
    def total(name: str) -> float:
        return sum(number(broker.metrics, name) for broker in model.up)

    lost, recovered, asked = (
        total(f"repair_{name}") for name in ("losses_detected", "recovered", "cache_asked")
    )
    return [
        ("best-effort events delivered", quantity(total("best_effort_delivered_total"))),
        ("losses found", quantity(lost)),
        ("recovered", f"{quantity(recovered)} ({share(recovered / lost)})" if lost else "none was lost"),
        ("given up", quantity(total("repair_given_up"))),
        ("requests", quantity(total("repair_requests"))),
        ("repairs sent", quantity(total("repair_repairs_sent"))),
        ("hit ratio of caches", share(total("repair_cache_hits") / asked) if asked else "nobody asked"),
        ("messages in caches", quantity(total("repair_cache_messages"))),
    ]


# ---- clients

CLIENT_COLUMNS = ("client", "broker", "principal", "from", "sends#", "gets#", "subscriptions#", "connected#")


def clients(model: Model, *, acts: bool, at: str = "") -> list[dict[str, Any]]:
    """The busiest first; of one broker, or all."""
    listed = []
    for broker, answer in model.answers.get("clients", {}).items():
        if at not in ("", broker):
            continue
        for each in rows(answer, "clients"):
            counters = model.client_rates.get((broker, str(each.get("connection"))))
            rates = [None if counters is None else counters.rate(name) for name in ("bytes_in", "delivered")]
            listed.append((broker, each, rates[0], rates[1]))
    listed.sort(key=lambda item: (-(item[2] or 0), item[0], number(item[1], "connection")))
    return [
        row(
            f"{broker}\n{each.get('connection')}",
            text(each, "name") or "(unnamed)",
            broker,
            text(each, "principal"),
            text(each, "host") or "?",
            "-" if sends is None else f"{volume(sends)}/s",
            per_second(gets),
            quantity(number(each, "subscriptions")),
            duration(number(each, "up_s")),
            acts=("Disconnect",) if acts else (),
        )
        for broker, each, sends, gets in listed
    ]


# ---- discovery

RESPONSE_COLUMNS = (
    "broker",
    "address",
    "weight#",
    "delay#",
    "ping#",
    "cpu#",
    "memory free#",
    "connections#",
    "links#",
)


def responses(answer: Answer) -> list[dict[str, Any]]:
    chosen = text(answer, "chosen")
    result = []
    for each in rows(answer, "responses"):
        ping = maybe(each, "ping_ms")
        name = text(each, "broker")
        result.append(
            row(
                f"{name}\n{text(each, 'address')}",
                cell(name, tone="calm" if name == chosen else "", below="chosen" if name == chosen else ""),
                cell(text(each, "address"), mono=True),
                f"{number(each, 'weight'):.3f}",
                f"{number(each, 'delay_ms'):.1f} ms",
                "not pinged" if ping is None else f"{ping:.2f} ms",
                share(number(each, "cpu_share")),
                volume(number(each, "memory_free_bytes")),
                quantity(number(each, "connections")),
                quantity(number(each, "links")),
            )
        )
    return result


ADVERTISED_COLUMNS = ("broker", "discovery nodes", "multicast", "cpu of its machine#", "memory free#")


def advertised(model: Model) -> list[dict[str, Any]]:
    """Where each broker says that it is."""
    result = []
    for broker in sorted(model.up, key=lambda each: each.name):
        said = within(broker.status, "discovery")
        usage = within(said, "usage")
        result.append(
            row(
                broker.name,
                broker.name,
                ", ".join(text(node, "node") for node in rows(said, "nodes")) or "none",
                cell(text(said, "multicast") or "off", mono=True),
                share(maybe(usage, "cpu_share")),
                volume(maybe(usage, "memory_free_bytes")),
            )
        )
    return result


# ---- traces

ROUTE_COLUMNS = ("broker", "came from", "certainty")
RECEIVER_COLUMNS = ("receiver", "at", "certainty")
TAIL_COLUMNS = ("message", "topic", "attributes", "published", "size#")


def tailed(event: Event) -> dict[str, Any]:
    attributes = ", ".join(f"{name}={value!r}" for name, value in list(event.attributes.items())[:8])
    published = datetime.fromtimestamp(event.published_at.timestamp(), UTC)
    return row(
        str(event.id),
        cell(str(event.id), mono=True),
        cell(shown(event.topic), mono=True),
        cell(shown(attributes), mono=True),
        f"{published:%H:%M:%S} UTC",
        volume(len(event.payload)),
    )


def route(trail: Answer) -> list[dict[str, Any]]:
    return [
        row(
            text(hop, "broker"),
            text(hop, "broker"),
            text(hop, "from") or "its publisher",
            cell(doubt(number(hop, "doubt")), tone="busy" if number(hop, "doubt") >= SURE else ""),
        )
        for hop in rows(trail, "route")
    ]


def receivers(trail: Answer) -> list[dict[str, Any]]:
    return [
        row(
            f"{text(each, 'subscriber')}\n{text(each, 'broker')}",
            text(each, "subscriber"),
            text(each, "broker"),
            cell(doubt(number(each, "doubt")), tone="busy" if number(each, "doubt") >= SURE else ""),
        )
        for each in rows(trail, "receivers")
    ]


def verdict(trail: Answer) -> str:
    """The result in words."""
    origin, missing = within(trail, "origin"), within(trail, "missing")
    said = text(missing, "text")
    if text(missing, "verdict") == "complete":
        count = len(rows(trail, "receivers"))
        hops = len(rows(trail, "route"))
        publisher = text(origin, "publisher") or "somebody"
        return (
            f"Published by {publisher} at {text(origin, 'broker') or '?'}, routed by {hops} "
            f"broker{'' if hops == 1 else 's'}, received by {count or 'nobody'}."
        )
    brokers_missing = ", ".join(texts(missing, "brokers"))
    return " ".join(filter(None, (said or "The path is not known whole.", brokers_missing)))
