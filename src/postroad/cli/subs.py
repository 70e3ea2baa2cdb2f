"""`postroad subs`: the durable subscriptions of a broker."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
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
    """List, inspect or delete the durable subscriptions that a broker hosts, with their lag.

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
        raise UsageError(f"there is no durable subscription {shorten(name, 60)!r} at this broker{hint}")
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
        state = f"{row['consumers']} consumer{'' if row['consumers'] == 1 else 's'}"
    if row["moved"]:
        state = f"moved to {row['moved_to']}" if row["moved_to"] else "moved"
    least = "at least " if row["lag_at_least"] else ""
    lag = "" if row["moved"] else f"{least}{row['lag_events']} events, {row['lag_s']:.1f} s behind"
    parts = (row["name"], row["topic"] or "#", row["where"], state, f"ack {row['ack']}", lag)
    return "  ".join(part for part in parts if part)


def _lines(row: dict[str, Any]) -> list[str]:
    """One subscription, a fact a line."""
    lines = [_line(row)]
    if row["shared"]:
        lines.append(
            f"  shared{' by key ' + row['key'] if row['key'] else ''}: {row['waiting']} events wait, "
            f"{row['in_flight']} are with consumers, {row['redelivered']} were given to another"
        )
    return lines + [f"  {pubend}  acknowledged to {tick}" for pubend, tick in row["released"].items()]


async def _delete(client: Client, name: str) -> None:
    async with client:
        await client.request("subs.delete", name=name)


async def _ask(client: Client, name: str | None) -> list[dict[str, Any]]:
    """This one, or all, page by page."""
    async with client:
        answer = await client.request("subs", **({} if name is None else {"name": name}))
        rows, groups = answer["subscriptions"], answer["groups"]
        while answer["more"]:
            answer = await client.request("subs", after=rows[-1]["name"])
            rows += answer["subscriptions"]
            groups += answer["groups"]
    shared = {row["name"]: row for row in groups}
    return [row | shared.get(row["name"], {}) for row in rows]
