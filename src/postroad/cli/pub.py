"""`postroad pub`: publish from the command line."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postroad.cli.connection import JsonOption, RecordsOption, ScopeOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.payloads import lines, repeat
from postroad.client.arguments import with_ttl
from postroad.errors import UsageError
from postroad.units import GIB, SECOND_US, duration_us

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.client.receipt import Receipt

Value = str | int | float | bool
MAX_FILE_BYTES: Final = GIB  # no event is that large; the client says how large one may be


_INTEGER: Final = re.compile(r"[+-]?(0|[1-9][0-9]*)")  # a postcode such as 01234 is a text
_FLOAT: Final = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def register(app: typer.Typer) -> None:
    app.command("pub")(connecting(pub))


def pub(
    topic: Annotated[str, typer.Argument(help="Such as orders/eu.")],
    payload: Annotated[str | None, typer.Argument(help="What to send; nothing for an empty event.")] = None,
    attr: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An integer, float, true, false, or else text; repeatable."),
    ] = None,
    attr_text: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Always text; repeatable.")
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Keep it until durable readers have it.")
    ] = False,
    best_effort: Annotated[
        bool,
        typer.Option("--best-effort", help="As datagrams that nobody keeps; `sub --repair` repairs them."),
    ] = False,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Nobody is handed it after so long, such as 30s or 5m.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The payload is this file; - is standard input.")
    ] = None,
    records: RecordsOption = False,
    scope: ScopeOption = "",
    count: Annotated[int, typer.Option(min=1, help="Publish it this many times.")] = 1,
    rate: Annotated[float | None, typer.Option(min=0.001, help="At most this many a second.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="One event per line of standard input.")] = False,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Publish events and print their ids once the broker has accepted them, best-effort ones once they are
    sent."""
    import uvloop

    if durable and best_effort:
        raise UsageError("an event is durable or best-effort, not both")
    if stdin and (payload is not None or file is not None or count != 1):
        raise UsageError("--stdin takes the payloads from standard input: give no PAYLOAD, --file or --count")
    if file is not None and payload is not None:
        raise UsageError("--file has the payload: give no PAYLOAD beside it")
    attributes = parse_attributes(attr or [], attr_text or [])
    if ttl is not None:
        attributes = with_ttl(attributes, duration_us(ttl) / SECOND_US)
    if (records or scope) and not best_effort:
        raise UsageError("--records and --scope say how best-effort events are repaired: add --best-effort")
    client = client_for(connection)
    client.repair_by("records" if records else "summaries", scope=scope)
    content = os.fsencode(payload or "") if file is None else read_payload(file)
    source = lines() if stdin else repeat(content, count)
    mode = "durable" if durable else "best-effort" if best_effort else "plain"
    uvloop.run(_publish(client, topic, source, attributes, mode=mode, rate=rate, as_json=as_json))


def read_payload(file: str) -> bytes:
    """A whole file, or all of standard input: one event."""
    try:
        if file == "-":
            return sys.stdin.buffer.read(MAX_FILE_BYTES)
        with Path(file).open("rb") as source:
            return source.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"--file {file}: {error.strerror or error}") from None


def parse_attributes(guessed: list[str], text: list[str]) -> dict[str, Value]:
    """Attributes from NAME=VALUE, of the type the value looks like."""
    attributes: dict[str, Value] = {}
    for item, typed in [*((item, True) for item in guessed), *((item, False) for item in text)]:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"{item!r} is not an attribute such as price=120")
        if name in attributes:
            raise UsageError(f"attribute {name!r} is given twice")
        attributes[name] = guess(value) if typed else value
    return attributes


def guess(text: str) -> Value:
    """The value a person means: `120` an integer, `1.5` a float, `true` a boolean, anything else text."""
    if text in ("true", "false"):
        return text == "true"
    # Not int() and float() alone: they read `1_0`, `nan` and `-inf` as numbers too.
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if math.isinf(value):
            raise UsageError(f"{text} is more than a float can hold; --attr-text sends it as text")
        return value
    return text


async def _publish(
    client: Client,
    topic: str,
    source: AsyncIterator[list[bytes]],
    attributes: dict[str, Value],
    *,
    mode: str,
    rate: float | None,
    as_json: bool,
) -> None:
    pending: list[Receipt] = []
    async with client:
        loop = asyncio.get_running_loop()
        started, number = loop.time(), 0
        async for payloads in source:
            if mode == "durable" and rate is None:  # together, since each waits for the disk
                publishes = (client.publish(topic, payload, attributes, mode=mode) for payload in payloads)
                pending += await asyncio.gather(*publishes)
                payloads = []
            for payload in payloads:
                pending.append(await client.publish(topic, payload, attributes, mode=mode))
                number += 1
                if rate is not None:
                    await client.flush()
                    _print(pending, topic, as_json=as_json)
                    await asyncio.sleep(max(0.0, started + number / rate - loop.time()))
            # An id is printed once its event is accepted, so that nobody looks for one that never was.
            await client.flush()
            _print(pending, topic, as_json=as_json)


def _print(receipts: list[Receipt], topic: str, *, as_json: bool) -> None:
    for receipt in receipts:
        print(json.dumps({"id": str(receipt.id), "topic": topic}) if as_json else receipt.id)
    sys.stdout.flush()
    receipts.clear()
