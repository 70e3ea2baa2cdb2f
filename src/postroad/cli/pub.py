"""`postroad pub`: publish from the command line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Final

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
    from postroad.client.receipt import Receipt

Value = str | int | float | bool

_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_FLOAT: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def register(app: typer.Typer) -> None:
    app.command("pub")(pub)


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
    count: Annotated[int, typer.Option(min=1, help="Publish it this many times.")] = 1,
    rate: Annotated[float | None, typer.Option(min=0.001, help="At most this many a second.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="One event per line of standard input.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    token: TokenOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish events and print their ids once the broker has accepted them."""
    import uvloop

    if stdin and (payload is not None or count != 1):
        raise UsageError("--stdin takes the payloads from standard input: give no PAYLOAD and no --count")
    attributes = parse_attributes(attr or [], attr_text or [])
    client = client_for(broker, token, tls_ca, tls_cert, tls_key)
    source = _lines() if stdin else _repeat((payload or "").encode(), count)
    mode = "durable" if durable else "plain"
    uvloop.run(_publish(client, topic, source, attributes, mode=mode, rate=rate, as_json=as_json))


def parse_attributes(guessed: list[str], text: list[str]) -> dict[str, Value]:
    """Attributes from NAME=VALUE, of the type the value looks like."""
    found: dict[str, Value] = {}
    for item, typed in [*((item, True) for item in guessed), *((item, False) for item in text)]:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"{item!r} is not an attribute such as price=120")
        if name in found:
            raise UsageError(f"attribute {name!r} is given twice")
        found[name] = guess(value) if typed else value
    return found


def guess(text: str) -> Value:
    """The value a person means: `120` an integer, `1.5` a float, `true` a boolean, anything else text."""
    if text in ("true", "false"):
        return text == "true"
    # Not int() and float() alone: they read `1_0`, `nan` and `-inf` as numbers too.
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


async def _repeat(payload: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield payload


async def _lines() -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        yield line.rstrip(b"\r\n")


async def _publish(
    client: Client,
    topic: str,
    source: AsyncIterator[bytes],
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
        async for payload in source:
            pending.append(await client.publish(topic, payload, attributes, mode=mode))
            number += 1
            # An id is printed once its event is accepted, so that nobody looks for one that never was.
            if rate is not None or len(pending) >= 1024:
                await client.flush()
                _print(pending, topic, as_json=as_json)
            if rate is not None:
                await asyncio.sleep(max(0.0, started + number / rate - loop.time()))
        await client.flush()
        _print(pending, topic, as_json=as_json)


def _print(receipts: list[Receipt], topic: str, *, as_json: bool) -> None:
    for receipt in receipts:
        print(json.dumps({"id": str(receipt.id), "topic": topic}) if as_json else receipt.id)
    sys.stdout.flush()
    receipts.clear()
