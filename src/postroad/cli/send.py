"""`postroad send`: send to applications from the command line."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.payloads import lines, repeat
from postroad.cli.pub import parse_attributes
from postroad.errors import UsageError
from postroad.units import SECOND_US, duration_us

if TYPE_CHECKING:
    from postroad.client.application import Application


AlsoOption = Annotated[
    list[str] | None, typer.Option(metavar="APPLICATION", help="To this one too; repeatable.")
]
ReliableOption = Annotated[bool, typer.Option("--reliable/--no-reliable", help="Wait until it is kept.")]
AttrOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An integer, float, true, false, or else text; repeatable."),
]
AttrTextOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Always text; repeatable.")
]
ExpiresOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="A dead letter after that, such as 1h.")
]
ConfirmOption = Annotated[bool, typer.Option("--confirm", help="Wait until the application has accepted it.")]


def register(app: typer.Typer) -> None:
    app.command("send")(connecting(send))


def send(
    to: Annotated[str, typer.Argument(metavar="APPLICATION", help="Whom it is for, such as inventory.")],
    payload: Annotated[str | None, typer.Argument(help="What to send; nothing for an empty message.")] = None,
    source: Annotated[str, typer.Option("--from", metavar="APPLICATION", help="Who sends it.")] = "postroad",
    also: AlsoOption = None,
    kind: Annotated[str, typer.Option(help="transactional, recoverable or express.")] = "transactional",
    reliable: ReliableOption = True,
    attr: AttrOption = None,
    attr_text: AttrTextOption = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="The highest first.")] = 4,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Not delivered before, such as 10s.")] = "0",
    expires: ExpiresOption = None,
    confirm: ConfirmOption = False,
    count: Annotated[int, typer.Option(min=1, help="Send it this many times.")] = 1,
    stdin: Annotated[bool, typer.Option("--stdin", help="One message per line of standard input.")] = False,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Send messages to an application and print their ids once they are kept. No queue is declared."""
    import uvloop

    from postroad.client.application import check_kind

    if stdin and (payload is not None or count != 1):
        raise UsageError("--stdin takes the payloads from standard input: give no PAYLOAD and no --count")
    check_kind(kind, reliable)
    attributes = parse_attributes(attr or [], attr_text or [])
    payloads = lines() if stdin else repeat(os.fsencode(payload or ""), count)
    names = [to, *(also or [])]
    delay_s = duration_us(delay) / SECOND_US
    expires_s = None if expires is None else duration_us(expires) / SECOND_US

    async def work() -> None:
        async with client_for(connection) as client:
            application = client.application(source)
            async for some in payloads:
                await send_round(application, some)

    async def send_round(application: Application, some: list[bytes]) -> None:
        if confirm:
            for each in some:
                receipt = await application.send(
                    names,
                    each,
                    kind=kind,
                    reliable=reliable,
                    attributes=attributes,
                    priority=priority,
                    delay=delay_s,
                    expires=expires_s,
                    confirm=True,
                )
                await receipt.delivered
                _print(list(receipt.ids), names, as_json=as_json)
            return
        ids = await application.send_many(
            ((name, each, attributes) for each in some for name in names),
            kind=kind,
            reliable=reliable,
            priority=priority,
            delay=delay_s,
            expires=expires_s,
        )
        _print(ids, names, as_json=as_json)

    uvloop.run(work())


def _print(ids: list[str], names: list[str], *, as_json: bool) -> None:
    for place, identity in enumerate(ids):
        name = names[place % len(names)]
        print(json.dumps({"id": identity, "to": name}) if as_json else identity)
    sys.stdout.flush()
