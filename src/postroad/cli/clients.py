"""`postroad clients`: who is connected to a broker."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.units import KIB, MIB

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
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """List who is connected to a broker: from where, since when, how busy. Others' need the right `admin`.

    Example: postroad clients --broker localhost:7420
    """
    client = client_for(connection)
    if kick is not None:
        answer = asyncio.run(_ask(client, "clients.kick", connection=str(kick)))
        print(json.dumps(answer) if as_json else f"connection {kick} is closed")
        return
    answer = asyncio.run(_ask(client, "clients"))
    for row in answer["clients"]:
        print(json.dumps(row) if as_json else line(row))
    if answer["more"]:
        print("postroad: there are more than are listed", file=sys.stderr)


async def _ask(client: Client, what: str, **arguments: str) -> dict[str, Any]:
    async with client:
        return await client.request(what, **arguments)


def line(row: dict[str, Any]) -> str:
    """One client for people."""
    name = "".join(character if character.isprintable() else "?" for character in row["name"]) or "(unnamed)"
    subscriptions = f"{row['subscriptions']} subscription{'' if row['subscriptions'] == 1 else 's'}"
    rate = row["bytes_in"] / max(1, row["up_s"])
    return "  ".join(
        (
            str(row["connection"]),
            name,
            row["principal"],
            f"from {row['host'] or '?'}",
            f"for {row['up_s']} s",
            subscriptions,
            f"sends {_size(rate)}/s",
        )
    )


def _size(size: float) -> str:
    if size < KIB:
        return f"{size:.0f} B"
    return f"{size / KIB:.1f} KiB" if size < MIB else f"{size / MIB:.1f} MiB"
