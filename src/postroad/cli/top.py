"""`postroad top`: the network at a glance, in a terminal."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import DEFAULT_BROKER, JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.network import ask_all
from postroad.cli.top_rows import VIEWS, Look, tables
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client

MAX_INTERVAL_S = 60.0
MAX_KNOWN = 16  # brokers to go to when one goes away


def register(app: typer.Typer) -> None:
    app.command("top")(connecting(top))


def top(
    *,
    interval: Annotated[float, typer.Option(help="Seconds between looks.")] = 2.0,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Show brokers, rates, links, subscriptions with their lag, queues and clients of the whole network.

    1 to 5, or Tab, switch tables; s sorts by the next column, r turns the order, p pauses, q ends. When the
    broker that is asked goes away, another one is. With --json, one look is printed.
    """
    if not 0.1 <= interval <= MAX_INTERVAL_S:
        raise UsageError(f"--interval {interval:g}: it is between 0.1 and {MAX_INTERVAL_S:g} seconds")
    source = Source(connection)
    if as_json:
        print(json.dumps(asyncio.run(_once(source, interval))))
        return
    try:
        from postroad.cli.top_app import Top
    except ModuleNotFoundError:
        raise UsageError("postroad top needs Textual: pip install 'postroad[page]'") from None
    Top(source, interval).run()


async def _once(source: Source, interval: float) -> dict[str, Any]:
    async with source:
        before = await source.look()
        await asyncio.sleep(interval)
        look = await source.look()
    named: dict[str, Any] = {
        view: [dict(zip(VIEWS[view], row, strict=True)) for row in rows]
        for view, rows in tables(look, before).items()
    }
    return named | {"silent": list(look.silent)}


class Source:
    """Asks the network, through whichever broker answers: the one that was named, or one that it told of."""

    def __init__(self, connection: Options) -> None:
        self._connection = connection
        self._client: Client | None = None
        self._known: list[str] = []  # addresses of brokers that were seen

    async def __aenter__(self) -> Source:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.forget()

    async def look(self) -> Look:
        """PostroadError where nobody answers: the next look is at another broker."""
        if self._client is None:
            named = self._connection.broker
            if self._known:
                given = (named or DEFAULT_BROKER).split(",")
                named = ",".join(dict.fromkeys([*self._known, *given]))
            reached = client_for(replace(self._connection, broker=named))
            await reached
            self._client = reached
        try:
            return await self._ask(self._client)
        except BaseException:
            await self.forget()
            raise

    async def _ask(self, client: Client) -> Look:
        status, subs, clients = [await ask_all(client, what) for what in ("status", "subs", "clients")]
        queues = await client.request("queues")
        answers = status["answers"]
        addresses = [answer["address"] for answer in answers.values() if "address" in answer]
        self._known = list(dict.fromkeys([*addresses, *self._known]))[:MAX_KNOWN]
        return Look(
            at_s=time.monotonic(),
            status=answers,
            subs=subs["answers"],
            clients=clients["answers"],
            queues=tuple(queues["queues"]),
            silent=(*status["silent"], *status["refused"]),
        )

    async def forget(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
