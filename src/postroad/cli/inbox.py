"""`postroad inbox`: receive as an application, and print what comes."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.errors import TakenError, UnavailableError

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.client.application import Message

WINDOW: Final = 64
LOOKED_AT: Final = 4_096  # messages of --keep, of which none is settled


def register(app: typer.Typer) -> None:
    app.command("inbox")(connecting(inbox))


def inbox(
    name: Annotated[str, typer.Argument(metavar="APPLICATION", help="Whose messages, such as inventory.")],
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds.")] = None,
    accept: Annotated[
        bool, typer.Option("--accept/--keep", help="Accept what is printed, or leave it in the inbox.")
    ] = True,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Print messages as they come, and accept them: source, payload, attributes. Says `receiving` on stderr.

    With --keep they stay for the next one who receives, as tried once more. With --count, running into
    --timeout before that many came is a failure.
    """
    import uvloop

    client = client_for(connection)
    uvloop.run(_receive(client, name, count=count, patience=timeout, accept=accept, as_json=as_json))


async def _receive(
    client: Client, name: str, *, count: int | None, patience: float | None, accept: bool, as_json: bool
) -> None:
    printed = 0
    async with client:
        application = client.application(name)
        async with application.inbox(window=WINDOW if accept else LOOKED_AT) as messages:
            print(f"receiving as {name} at {client.broker}", file=sys.stderr, flush=True)
            try:
                async with asyncio.timeout(patience):
                    async for message in messages:
                        printed += await _take(message, accept=accept, as_json=as_json)
                        if printed == count:
                            return
            except TimeoutError:
                if count is not None:
                    raise UnavailableError(
                        f"only {printed} of {count} messages came in {patience:g} seconds"
                    ) from None


async def _take(message: Message, *, accept: bool, as_json: bool) -> int:
    """Print it and accept it: what is accepted was printed. How many count: none that is another's."""
    print(json.dumps(message_json(message), ensure_ascii=False) if as_json else message_line(message))
    sys.stdout.flush()
    if accept:
        try:
            await message.accept()
        except TakenError as error:
            print(f"postroad: {message.id}: {error}", file=sys.stderr, flush=True)
            return 0
    return 1


def message_json(message: Message) -> dict[str, Any]:
    """A message as one JSON object; a payload that is not UTF-8 is in base64, infinite numbers are text."""
    try:
        payload, encoding = message.payload.decode(), "utf-8"
    except UnicodeDecodeError:
        payload, encoding = base64.b64encode(message.payload).decode(), "base64"
    return {
        "id": message.id,
        "source": message.source,
        "kind": message.kind,
        "attempt": message.attempt,
        "priority": message.priority,
        "sent_at": message.sent_at.isoformat(),
        "attributes": {
            name: json.dumps(value) if isinstance(value, float) and math.isinf(value) else value
            for name, value in message.attributes.items()
        },
        "payload": payload,
        "encoding": encoding,
    }


def message_line(message: Message) -> str:
    """A message for people, on one line whatever is in it."""
    text = message.payload.decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    attributes = "  ".join(f"{name}={json.dumps(value)}" for name, value in message.attributes.items())
    attempt = f"attempt {message.attempt}" if message.attempt > 1 else ""
    return "  ".join(part for part in (message.source, shown, attributes, attempt) if part)
