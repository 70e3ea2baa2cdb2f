"""`postroad status`: how a broker and its network are."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import (
    DEFAULT_BROKER,
    BrokerOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenOption,
    client_for,
)

if TYPE_CHECKING:
    from postroad.client.aio import Client


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    broker: BrokerOption = DEFAULT_BROKER,
    token: TokenOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Ask a broker how it is: its links, streams, subscribers and figures."""
    answer = asyncio.run(_ask(client_for(broker, token, tls_ca, tls_cert, tls_key)))
    if as_json:
        print(json.dumps(answer, indent=2, sort_keys=True))
    else:
        _show(answer)


async def _ask(client: Client) -> dict[str, Any]:
    async with client:
        return await client.request("status")


def _show(answer: dict[str, Any]) -> None:
    """Single values, then every list as a table: whatever rooms add to status appears by itself."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        _facts("", {key: value for key, value in answer.items() if not isinstance(value, list | dict)})
    )
    for key, value in answer.items():
        if isinstance(value, dict) and value:
            console.print(_facts(key, value))
        elif isinstance(value, list) and value:
            console.print(_rows(key, value))


def _facts(title: str, values: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        table.add_row(key.replace("_", " "), _text(value))
    return table


def _rows(title: str, rows: list[Any]) -> Any:
    from rich.table import Table

    dicts = [row if isinstance(row, dict) else {"": row} for row in rows]
    columns = list(dict.fromkeys(key for row in dicts for key in row))
    table = Table(title=title.replace("_", " "), title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in dicts:
        table.add_row(*(_text(row.get(column, "")) for column in columns))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)
