"""`postroad status`: how a broker and its network are."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

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

# What an operator looks at first, shown also when it is 0; of all others people see those that are not.
FIRST_METRICS: Final = (
    "events_in_total",
    "deliveries_total",
    "events_forwarded_total",
    "dropped_deliveries_total",
    "lost_spans_total",
    "refused_frames_total",
)
NOT_FOR_PEOPLE: Final = frozenset({"uptime_started_seconds", "kernel_compiled"})  # said better above


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
            console.print(_facts(key, _worth_showing(value) if key == "metrics" else value))
        elif isinstance(value, list) and value:
            console.print(_rows(key, value))


def _worth_showing(metrics: dict[str, Any]) -> dict[str, Any]:
    first = {name: metrics[name] for name in FIRST_METRICS if name in metrics}
    return first | {
        name: value for name, value in metrics.items() if value and name not in NOT_FOR_PEOPLE | first.keys()
    }


def _facts(title: str, values: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        table.add_row(_plain(key.replace("_", " ")), _text(key, value))
    return table


def _rows(title: str, rows: list[Any]) -> Any:
    from rich.table import Table

    dicts = [row if isinstance(row, dict) else {"": row} for row in rows]
    columns = list(dict.fromkeys(key for row in dicts for key in row))
    table = Table(title=title.replace("_", " "), title_justify="left", pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in dicts)
        table.add_column(
            _plain(column.replace("_", " ")),
            justify="right" if numbers else "left",
            overflow="fold",  # an address that is cut off is of no use
        )
    for row in dicts:
        table.add_row(*(_text(column, row.get(column)) for column in columns))
    return table


def _text(name: str, value: Any) -> Any:
    if value is None or value == "":
        return _plain("-")
    if isinstance(value, bool):
        return _plain("yes" if value else "no")
    if name == "horizon" and isinstance(value, int):
        return _plain(_time(value))
    if isinstance(value, float):
        return _plain(f"{value:,.3f}")
    if isinstance(value, int):
        return _plain(f"{value:,}")
    return _plain(value if isinstance(value, str) else json.dumps(value))


def _time(tick: int) -> str:
    """A tick as the time it stands for, unless it stands for none."""
    try:
        return datetime.fromtimestamp(tick / 1e6, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except (ValueError, OverflowError, OSError):
        return str(tick)


def _plain(text: str) -> Any:
    """Others chose names, topics and conditions: they are neither markup nor commands to the terminal."""
    from rich.text import Text

    return Text("".join(one if one.isprintable() else "?" for one in text))
