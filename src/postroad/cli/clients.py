"""`postroad clients`: who is connected to a broker, or to the network."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.network import ask_all, report_missing
from postroad.cli.words import count, printable, size, span
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client


def register(app: typer.Typer) -> None:
    app.command("clients")(connecting(clients))


def clients(
    *,
    kick: Annotated[
        int | None,
        typer.Option(metavar="CONNECTION", help="Close this connection; a client connects again by itself."),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="The clients of all brokers.")] = False,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """List who is connected to a broker: from where, since when, how busy. Others' need the right `admin`."""
    if network and kick is not None:
        raise UsageError("--kick closes a connection of one broker: name that with --broker")
    client = client_for(connection)
    if kick is not None:
        answer = asyncio.run(_ask(client, "clients.kick", connection=str(kick)))
        print(json.dumps(answer) if as_json else f"connection {kick} is closed")
        return
    rows, more = asyncio.run(_list_all(client) if network else _list(client))
    for row in rows:
        print(json.dumps(row) if as_json else line(row))
    if more:
        print("postroad: there are more than are listed", file=sys.stderr)


async def _list(client: Client) -> tuple[list[dict[str, Any]], bool]:
    """All of them, page by page."""
    rows: list[dict[str, Any]] = []
    async with client:
        while True:
            after = str(rows[-1]["connection"]) if rows else "0"
            answer = await client.request("clients", after=after)
            rows += answer["clients"]
            if not answer["more"]:
                return rows, False


async def _list_all(client: Client) -> tuple[list[dict[str, Any]], bool]:
    async with client:
        answer = await ask_all(client, "clients")
    report_missing(answer)
    answers = answer["answers"]
    rows = [row | {"broker": broker} for broker, page in answers.items() for row in page["clients"]]
    return rows, any(page["more"] for page in answers.values())


async def _ask(client: Client, what: str, **arguments: str) -> dict[str, Any]:
    async with client:
        return await client.request(what, **arguments)


def line(row: dict[str, Any]) -> str:
    """One client for people."""
    rate = row["bytes_in"] / max(1, row["up_s"])
    parts = (
        str(row["connection"]),
        printable(row["name"]) or "(unnamed)",
        row["principal"],
        f"from {row['host'] or '?'}",
        f"at {printable(row['broker'])}" if "broker" in row else "",
        f"for {span(row['up_s'])}",
        count(row["subscriptions"], "subscription"),
        f"sends {size(rate)}/s",
    )
    return "  ".join(part for part in parts if part)
