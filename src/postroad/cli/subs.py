"""`postroad subs`: the durable subscriptions of a broker."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import (
    DEFAULT_BROKER,
    BrokerOption,
    JsonOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenOption,
    client_for,
)
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client


def register(app: typer.Typer) -> None:
    app.command("subs")(subs)


def subs(
    name: Annotated[str | None, typer.Argument(help="Show this one; none: list all.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="End it: nothing is kept for it.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    token: TokenOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List, inspect or delete the durable subscriptions that a broker hosts, with their lag."""
    if delete and name is None:
        raise UsageError("--delete needs the NAME of a subscription")
    client = client_for(broker, token, tls_ca, tls_cert, tls_key)
    rows = asyncio.run(_ask(client, name if delete else None))
    if delete:
        return
    found = [row for row in rows if name is None or row["name"] == name]
    if name is not None and not found:
        raise UsageError(f"there is no durable subscription {name!r} at this broker")
    for row in found:
        print(json.dumps(row) if as_json or name is not None else _line(row))


def _line(row: dict[str, Any]) -> str:
    state = "connected" if row["connected"] else "away"
    lag = f"{row['lag_events']} events, {row['lag_s']:.1f} s behind"
    return f"{row['name']}  {row['topic'] or '#'}  {row['where']}  {state}  ack {row['ack']}  {lag}"


async def _ask(client: Client, delete: str | None) -> list[dict[str, Any]]:
    async with client:
        if delete is not None:
            await client.request("subs.delete", name=delete)
            return []
        answer = await client.request("subs")
        return list(answer["subscriptions"])
