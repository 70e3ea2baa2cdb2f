"""`postroad trace`: the path of a message."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from postroad.cli.connection import client_for, connecting
from postroad.cli.contexts import Options
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.tracking.query.verdict import TraceResult


def register(app: typer.Typer) -> None:
    app.command("trace")(connecting(trace))


def trace(
    message: Annotated[str, typer.Argument(metavar="ID", help="As `postroad pub` prints it.")],
    *,
    connection: Options,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as one JSON object.")] = False,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print the path as a graph for Graphviz.")] = False,
) -> None:
    """Name the origin of a message, every broker that routed it and everybody who got it.

    Exit code 0 if the path is known, 1 if it is unknown or only a part of it could be found.
    """
    from postroad.ids import MessageId
    from postroad.tracking.query.render import dot, tree

    if as_json and as_dot:
        raise UsageError("choose one of --json and --dot")
    identity = MessageId.parse(message)
    result = asyncio.run(_ask(client_for(connection), identity))
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        print(dot(result) if as_dot else tree(result))
    if result.verdict != "complete":
        raise typer.Exit(1)


async def _ask(client: Client, identity: object) -> TraceResult:
    async with client:
        return await client.trace(str(identity))
