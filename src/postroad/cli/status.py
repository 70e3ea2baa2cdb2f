"""`postroad status`: how a broker and its network are."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postroad.cli.connection import client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.glance import broker_line, glance
from postroad.cli.network import ask_all, report_missing
from postroad.cli.words import count, printable

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
TICKS: Final = frozenset({"horizon", "floor", "last", "released", "latest_delivered"})  # shown as times
NOT_FOR_PEOPLE: Final = frozenset({"uptime_started_seconds", "kernel_compiled"})  # said better above


def register(app: typer.Typer) -> None:
    app.command("status")(connecting(status))


def status(
    *,
    network: Annotated[bool, typer.Option("--network", help="All brokers, a line each.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also its links, streams, subscriptions and figures.")
    ] = False,
    connection: Options,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Ask a broker how it is: whom it reaches, who is there, what came and went, what to look at."""
    answer = asyncio.run(_ask(client_for(connection), network=network))
    if as_json:
        print(json.dumps(answer, indent=2, sort_keys=True))
        return
    statuses = list(answer["answers"].values()) if network else [answer]
    for status in statuses:
        print(broker_line(status) if network and not details else "\n".join(glance(status)))
        if details:
            _show(status)
    if network:
        print(count(len(statuses), "broker answers", "brokers answer"))
        report_missing(answer)
    elif not details:
        print("More: --details, or --network for all brokers")


async def _ask(client: Client, *, network: bool) -> dict[str, Any]:
    async with client:
        return await (ask_all(client, "status") if network else client.request("status"))


def _show(answer: dict[str, Any]) -> None:
    """Single values, then every list as a table: whatever rooms add to status appears by itself.

    A table that is wider than the terminal would be broken inside its cells; its rows are then written
    one after the other, each as names and values.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        _facts("", {key: value for key, value in answer.items() if not isinstance(value, list | dict)})
    )
    for key, value in answer.items():
        if isinstance(value, dict) and value:
            console.print(_facts(key, _worth_showing(value) if key == "metrics" else value))
        elif isinstance(value, list) and value:
            rows = [row if isinstance(row, dict) else {"": row} for row in value]
            table = _table(key, rows)
            if _width(table) <= console.width:
                console.print(table)
            else:
                console.print(plain(key.replace("_", " ")), style="italic")
                for row in rows:
                    for line in _lines(row, console.width, 0):
                        console.print(line, soft_wrap=True)


def _worth_showing(metrics: dict[str, Any]) -> dict[str, Any]:
    first = {name: metrics[name] for name in FIRST_METRICS if name in metrics}
    return first | {
        name: value for name, value in metrics.items() if value and name not in NOT_FOR_PEOPLE | first.keys()
    }


def _facts(title: str, values: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        table.add_row(plain(key.replace("_", " ")), _text(key, value))
    return table


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title.replace("_", " "), title_justify="left", pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(
            plain(column.replace("_", " ")), justify="right" if numbers else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*(_text(column, row.get(column)) for column in columns))
    return table


def _width(table: Any) -> int:
    from rich.console import Console

    unbounded = Console(width=10_000)
    return int(unbounded.measure(table).maximum)


def _lines(row: dict[str, Any], width: int, indent: int) -> list[Any]:
    """Names and values side by side, as many on a line as fit; lists inside a row follow it, indented."""
    nested = [
        value for value in row.values() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    lines = [plain(" " * indent)]
    for name, value in row.items():
        if value in nested:
            continue
        pair = plain(name.replace("_", " ") + " ", "dim").append_text(_text(name, value))
        if lines[-1].cell_len > indent and lines[-1].cell_len + 2 + pair.cell_len > width:
            lines.append(plain(" " * (indent + 2)))
        elif lines[-1].cell_len > indent:
            lines[-1].append("  ")
        lines[-1].append_text(pair)
    for value in nested:
        for inner in value:
            lines += _lines(inner, width, indent + 2)
    return lines


def _text(name: str, value: Any) -> Any:
    if value is None or value == "":
        return plain("-")
    if isinstance(value, bool):
        return plain("yes" if value else "no")
    if name in TICKS and isinstance(value, int):
        return plain(_time(value))
    if isinstance(value, float):
        return plain(f"{value:,.3f}")
    if isinstance(value, int):
        return plain(f"{value:,}")
    return plain(value if isinstance(value, str) else json.dumps(value))


def _time(tick: int) -> str:
    """A tick as the time it stands for, unless it stands for none."""
    try:
        return datetime.fromtimestamp(tick / 1e6, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except (ValueError, OverflowError, OSError):
        return str(tick)


def plain(text: str, style: str = "") -> Any:
    """Others chose names, topics and conditions: they are neither markup nor commands to the terminal."""
    from rich.text import Text

    return Text(printable(text), style)
