"""`postroad cache`: a node that keeps best-effort events for those who missed them (spec B10)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postroad.cli.connection import JsonOption, ScopeOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.sub import repair_line
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.client.subscription import Subscription

MAX_MESSAGES: Final = 1_000_000


def register(app: typer.Typer) -> None:
    app.command("cache")(connecting(cache))


def cache(
    topic: Annotated[str, typer.Option("--topic", help="What to keep, such as orders/#.")],
    where: Annotated[str, typer.Option(help="A condition over attributes, such as \"region = 'eu'\".")] = "",
    messages: Annotated[
        int, typer.Option(min=1, max=MAX_MESSAGES, help="How many to keep of each publisher.")
    ] = 10_000,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds.")] = None,
    scope: ScopeOption = "",
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Keep best-effort events, and send them again to who asks, until it is interrupted.

    Says `caching` on stderr once it does, and at the end what it did. Meanwhile `postroad status` shows it.
    """
    import uvloop

    if not topic:
        raise UsageError("a cache keeps a topic such as orders/#")
    client = client_for(connection)
    client.repair_by(scope=scope)
    uvloop.run(_serve(client, topic, where, messages, timeout, as_json=as_json))


async def _serve(
    client: Client, topic: str, where: str, messages: int, patience: float | None, *, as_json: bool
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with client, client._caching(topic, where, messages) as events:
        print(f"caching {topic} at {client.broker}", file=sys.stderr, flush=True)
        reader = asyncio.create_task(_drop(events))
        try:
            async with asyncio.timeout(patience):
                await ended.wait()
        except TimeoutError:
            pass
        finally:
            reader.cancel()
            figures = events.repair
        if as_json:
            print(json.dumps(figures))
        else:
            print(repair_line(figures))


async def _drop(events: Subscription) -> None:
    """The cache has its own copies: what the application would get goes nowhere."""
    async for _ in events.batches():
        pass
