"""`postroad sub`: print events as they come."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, RecordsOption, ScopeOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.errors import UnavailableError, UsageError
from postroad.units import duration_us

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.client.subscription import Subscription
    from postroad.events import Event, Gap


UNTOLD = (
    "what this subscription matches cannot be told well from the bits of a message (a topic alone, a range,"
    " LIKE, NOT), so some are asked for in vain. A condition with = or IS NOT NULL tells better, and plain"
    " mode needs none"
)


def register(app: typer.Typer) -> None:
    app.command("sub")(connecting(sub))


def sub(
    pattern: Annotated[str, typer.Argument(help="Such as orders/eu, orders/+ or orders/#.")],
    where: Annotated[
        str | None, typer.Option(help='A condition over attributes, such as "price > 100".')
    ] = None,
    durable: Annotated[
        str | None, typer.Option(metavar="NAME", help="A durable subscription that goes on where it was.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Divide the events with all who use this durable name.")
    ] = False,
    key: Annotated[
        str, typer.Option(metavar="ATTR", help="Shared: in order where this attribute is the same.")
    ] = "",
    max_attempts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Shared: what failed so often is a dead letter."),
    ] = None,
    dead_letters: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Shared: where dead letters are published.")
    ] = None,
    since: Annotated[
        str,
        typer.Option(metavar="TIME", help="A new durable one begins then: 2026-01-31T12:00Z, or 10m."),
    ] = "",
    ack: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Durable: auto, batch, or manual, which acknowledges nothing."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Find out which best-effort events were lost, and get them.")
    ] = False,
    order: Annotated[
        float, typer.Option(min=0, metavar="S", help="With --repair: restore their order within S seconds.")
    ] = 0.0,
    records: RecordsOption = False,
    scope: ScopeOption = "",
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds.")] = None,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Print events as they come: topic, payload, attributes. Says `subscribed` on stderr once it listens.

    With --count, running into --timeout before that many came is a failure.
    """
    import uvloop

    _check(pattern, where, ack=ack, durable=durable, by=records or bool(scope), repair=repair)
    client = client_for(connection)
    client.repair_by("records" if records else "summaries", scope=scope)
    events = client.subscribe(
        pattern,
        where or "",
        durable=durable,
        shared=shared,
        key=key,
        max_attempts=max_attempts,
        dead_letters=dead_letters,
        since=time_of(since) if since else None,
        ack=ack or "auto",
        repair=repair,
        order=order,
    )
    uvloop.run(_subscribe(client, events, count=count, patience=timeout, as_json=as_json))


def _check(
    pattern: str, where: str | None, *, ack: str | None, durable: str | None, by: bool, repair: bool
) -> None:
    """UsageError for what could only be a mistake. `by`: it says how to repair."""
    if not pattern:
        raise UsageError(
            "a topic to subscribe to is such as orders/eu, orders/+ or orders/#, it is not empty"
        )
    if where is not None and not where.strip():
        raise UsageError('a condition is such as --where "price > 100"; without --where there is none')
    if ack is not None and durable is None:
        raise UsageError("--ack is for a durable subscription: give it a name with --durable")
    if by and not repair:
        raise UsageError("--records and --scope say how to repair: add --repair")


def time_of(text: str) -> datetime:
    """A time as ISO 8601 has it, local if it does not say otherwise; or how long ago, such as `10m`."""
    with contextlib.suppress(UsageError, OverflowError):
        return datetime.now(UTC) - timedelta(microseconds=duration_us(text))
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r} is not a time such as 2026-01-31T12:00 or 2026-01-31T12:00Z, nor how long ago it was, "
            "such as 10m"
        ) from None


async def _subscribe(
    client: Client,
    subscription: Subscription,
    *,
    count: int | None,
    patience: float | None,
    as_json: bool,
) -> None:
    printed = _Printer(as_json=as_json)
    async with client, subscription as events:
        print(f"subscribed to {events.topic} at {client.broker}", file=sys.stderr, flush=True)
        if events.missing:
            print(f"not yet confirmed by {', '.join(events.missing)}", file=sys.stderr, flush=True)
        if events.repair and not events.repair["told_apart"]:
            print(UNTOLD, file=sys.stderr, flush=True)
        try:
            async with asyncio.timeout(patience):
                await _print_all(events, printed, count)
        except TimeoutError:
            if count is not None:
                raise UnavailableError(
                    f"only {printed.events} of {count} events came in {patience:g} seconds"
                ) from None
        finally:
            if events.repair and not events.repair["permitted"]:
                print("the broker refuses repair: it needs rights on $repair/#", file=sys.stderr)
            if events.repair:
                figures = json.dumps({"repair": events.repair}) if as_json else repair_line(events.repair)
                print(figures, file=sys.stderr, flush=True)


async def _print_all(events: Subscription, printed: _Printer, count: int | None) -> None:
    from postroad.events import Gap

    if events.durable:  # one by one: what is not printed must not be acknowledged
        async for event in events:
            printed.print(event)
            sys.stdout.flush()
            if printed.events == count:
                return
        return
    async for batches in events.batches():
        for batch in batches:
            for item in [batch] if isinstance(batch, Gap) else batch.events():
                printed.print(item)
                if printed.events == count:
                    sys.stdout.flush()
                    return
        sys.stdout.flush()


class _Printer:
    """Prints what came and counts the events."""

    def __init__(self, *, as_json: bool) -> None:
        self.events = 0
        self._as_json = as_json

    def print(self, item: Event | Gap) -> None:
        from postroad.events import Gap

        if isinstance(item, Gap):
            if self._as_json:
                print(json.dumps({"gap": gap_json(item)}))
            else:
                print(f"gap: {item}", file=sys.stderr)
            return
        self.events += 1
        print(json.dumps(event_json(item), ensure_ascii=False) if self._as_json else event_line(item))


def repair_line(figures: dict[str, float]) -> str:
    """What repair did, for people."""
    return (
        f"repair: {figures['losses_detected']:.0f} losses found, {figures['recovered']:.0f} repaired,"
        f" {figures['given_up']:.0f} given up, {figures['missing']:.0f} under way;"
        f" {figures['requests_sent'] + figures['asks_sent']:.0f} requests,"
        f" {figures['duplicates_suppressed']:.0f} duplicates dropped;"
        f" repaired after {figures['recovery_ms_p50']:.0f} ms, 1 in 100 after"
        f" {figures['recovery_ms_p99']:.0f} ms; {figures['repairs_sent']:.0f} repairs sent to others,"
        f" {figures['cache_messages']:.0f} events cached, hit ratio {figures['cache_hit_ratio']:.3f}"
    )


def gap_json(gap: Gap) -> dict[str, Any]:
    return {"pubend": gap.pubend, "start": gap.start, "end": gap.end, "text": str(gap)}


def event_json(event: Event) -> dict[str, Any]:
    """An event as one JSON object.

    A payload that is not UTF-8 is in base64. JSON has no infinite numbers: they are "Infinity" and
    "-Infinity", as text.
    """
    try:
        payload, encoding = event.payload.decode(), "utf-8"
    except UnicodeDecodeError:
        payload, encoding = base64.b64encode(event.payload).decode(), "base64"
    return {
        "id": str(event.id),
        "topic": event.topic,
        "attributes": {
            name: json.dumps(value) if isinstance(value, float) and math.isinf(value) else value
            for name, value in event.attributes.items()
        },
        "payload": payload,
        "encoding": encoding,
        "published_at": event.published_at.isoformat(),
        "pubend": event.pubend,
        "tick": event.tick,
        **({"attempt": event.attempt} if event.attempt > 1 else {}),
    }


def event_line(event: Event) -> str:
    """An event for people, on one line whatever is in it."""
    text = event.payload.decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    attributes = "  ".join(f"{name}={json.dumps(value)}" for name, value in event.attributes.items())
    return "  ".join(part for part in (event.topic, shown, attributes) if part)
