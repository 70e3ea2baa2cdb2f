"""`postroad status`: how a broker and its network are."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    broker: Annotated[str, typer.Option(metavar="HOST:PORT", help="Which broker to ask.")] = "localhost:7420",
    token: Annotated[str | None, typer.Option(envvar="POSTROAD_TOKEN", help="The token it asks for.")] = None,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="Who signed its certificate.")] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="A certificate to show it.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Ask a broker how it is: its links, streams, subscribers and figures."""
    import postroad

    context = postroad.tls(ca=tls_ca, certificate=tls_cert, key=tls_key) if tls_ca or tls_cert else None
    with postroad.sync.connect(broker, name="status", token=token or "", tls=context) as client:
        answer = client.request("status")
    if as_json:
        print(json.dumps(answer, indent=2, sort_keys=True))
    else:
        _show(answer)


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
