"""`postroad subs`: the durable subscriptions of the network."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.network import ask_all, report_missing
from postroad.cli.words import count, printable
from postroad.errors import UsageError, shorten

if TYPE_CHECKING:
    from postroad.client.aio import Client


def register(app: typer.Typer) -> None:
    app.command("subs")(connecting(subs))


def subs(
    name: Annotated[str | None, typer.Argument(help="Show this one; none: list all.")] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="[BROKER]", help="subs retire BROKER: it never comes back.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="End it: nothing is kept for it.")] = False,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """List, inspect or delete the durable subscriptions of the network, with their lag.

    Whichever broker is asked, it asks all others. --delete is for the broker that hosts the subscription.

    `postroad subs retire BROKER` frees what all others keep for a broker that never comes back.
    """
    if target is not None:
        if name != "retire" or delete:
            raise UsageError(f"`subs retire {target}` is what takes two words")
        _retire(client_for(connection), target, as_json)
        return
    if delete and name is None:
        raise UsageError("--delete needs the NAME of a subscription")
    client = client_for(connection)
    if delete:
        asyncio.run(_delete(client, name or ""))
        return
    rows = asyncio.run(_ask(client, name))
    if name is not None and not rows:
        hint = "; to retire a broker give its name: postroad subs retire BROKER" if name == "retire" else ""
        raise UsageError(
            f"there is no durable subscription {shorten(name, 60)!r} at any broker that answered{hint}"
        )
    for row in rows:
        if as_json:
            print(json.dumps(row))
        elif name is None:
            print(_line(row))
        else:
            print("\n".join(_lines(row)))


def _retire(client: Client, target: str, as_json: bool) -> None:
    async def ask() -> dict[str, Any]:
        async with client:
            return await client.request("subs.retire", broker=target)

    answer = asyncio.run(ask())
    if as_json:
        print(json.dumps(answer))
        return
    print(f"{answer['retired']} is retired at {', '.join(answer['done'])}")
    if answer["missing"]:
        print(f"not at {', '.join(answer['missing'])}: ask again when they are back")


def _line(row: dict[str, Any]) -> str:
    state = "connected" if row["connected"] else "away"
    if row["shared"] and row["connected"]:
        state = count(row["consumers"], "consumer")
    if row["moved"]:
        state = f"moved to {row['moved_to']}" if row["moved_to"] else "moved"
    lag = "" if row["moved"] else _lag(row)
    place = f"at {row['broker']}"
    parts = (row["name"], row["topic"] or "#", row["where"], place, state, f"ack {row['ack']}", lag)
    return printable("  ".join(part for part in parts if part))


def _lag(row: dict[str, Any]) -> str:
    behind = f"{row['lag_s']:.1f} s behind"
    if not row["lag_at_least"]:
        return f"{count(row['lag_events'], 'event')}, {behind}"
    if not row["lag_events"]:
        return f"part of its past is not gone through yet, {behind}"
    return f"at least {count(row['lag_events'], 'event')}, {behind}"


def _lines(row: dict[str, Any]) -> list[str]:
    """One subscription, a fact a line."""
    lines = [_line(row)]
    if row["shared"]:
        waiting = count(row["waiting"], "event waits", "events wait")
        lines.append(
            f"  shared{' by key ' + row['key'] if row['key'] else ''}: {waiting}, "
            f"{row['in_flight']} with consumers, {row['redelivered']} given to another, "
            f"{row['rejected']} rejected, {count(row['dead_letters'], 'dead letter')}"
        )
    return lines + [f"  {pubend}  acknowledged to {tick}" for pubend, tick in row["released"].items()]


async def _delete(client: Client, name: str) -> None:
    async with client:
        await client.request("subs.delete", name=name)


async def _ask(client: Client, name: str | None) -> list[dict[str, Any]]:
    """This one, or all, in the order of their names; of a broker with many, page by page."""
    rows: list[dict[str, Any]] = []
    arguments = {} if name is None else {"name": name}
    async with client:
        answer = await ask_all(client, "subs", **arguments)
        report_missing(answer)
        for broker, first in answer["answers"].items():
            page = first
            rows += _rows(broker, page)
            while page["more"]:
                rest = await ask_all(client, "subs", broker=broker, after=rows[-1]["name"])
                report_missing(rest)
                page = rest["answers"].get(broker, {"subscriptions": [], "groups": [], "more": False})
                rows += _rows(broker, page)
    return sorted(rows, key=lambda row: (row["name"], row["broker"]))


def _rows(broker: str, page: dict[str, Any]) -> list[dict[str, Any]]:
    shared = {row["name"]: row for row in page["groups"]}
    return [row | shared.get(row["name"], {}) | {"broker": broker} for row in page["subscriptions"]]
