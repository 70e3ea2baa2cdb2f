"""`postroad queues`: what is in the inboxes of the network, its dead letters, and the last resorts."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.cli.words import count as number_of
from postroad.errors import UsageError

InboxArgument = Annotated[str, typer.Argument(metavar="APPLICATION", help="Whose dead letters.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="The inboxes of the network: how much waits in each, for how long, and who answers for it.",
        invoke_without_command=True,
    )
    group.callback()(connecting(queues))
    group.command("dead")(connecting(dead))
    group.command("again")(connecting(again))
    group.command("delete")(connecting(delete))
    group.command("own")(connecting(own))
    group.command("rescue")(connecting(rescue))
    group.command("found")(connecting(found))
    app.add_typer(group, name="queues")


def _ask(
    what: str,
    arguments: dict[str, str],
    connection: Options,
) -> dict[str, Any]:
    client = client_for(connection)

    async def ask() -> dict[str, Any]:
        async with client:
            return await client.request(what, **arguments)

    return asyncio.run(ask())


def queues(
    call: typer.Context,
    *,
    connection: Options,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the inboxes of the whole network, whichever broker is asked."""
    if call.invoked_subcommand is not None:
        return
    answer = _ask("queues", {}, connection)
    if as_json:
        print(json.dumps(answer))
        return
    for row in answer["queues"]:
        print(queue_line(row))
    if answer.get("silent"):
        print(f"postroad: no answer from {', '.join(answer['silent'])}", file=sys.stderr)


def queue_line(row: dict[str, Any]) -> str:
    """An inbox for people."""
    waits = number_of(row["depth"], "message")
    oldest = f", oldest {row['oldest_s']:.1f} s" if row["depth"] else ""
    consumers = number_of(row["consumers"], "consumer")
    replicas = ", ".join(row["replicas"])
    parts = [row["inbox"], waits + oldest, consumers, f"at {row['responsible']} ({replicas})"]
    parts.append(f"epoch {row['epoch']}")
    if row.get("dead"):
        parts.append(number_of(row["dead"], "dead letter"))
    return "  ".join(parts)


def dead(
    inbox: InboxArgument,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """List the messages that were rejected too often, or have expired: oldest first."""
    answer = _ask("queues.dead", {"inbox": inbox}, connection)
    for row in answer["dead"]:
        print(json.dumps(row) if as_json else dead_line(row))
    if answer["more"]:
        print("postroad: there are more; send these again or drop them first", file=sys.stderr)


def dead_line(row: dict[str, Any]) -> str:
    text = base64.b64decode(row["payload"]).decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    tried = number_of(row["attempts"], "attempt")
    return "  ".join(part for part in (row["source"], shown, tried, row["reason"]) if part)


def again(
    inbox: InboxArgument,
    count: Annotated[int | None, typer.Option(min=1, help="The oldest so many. \\[default: all]")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Throw them away instead.")] = False,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, oldest first; they have no order any more."""
    arguments = {"inbox": inbox} | ({} if count is None else {"count": str(count)})
    if drop:
        arguments["drop"] = "yes"
    answer = _ask("queues.revive", arguments, connection)
    if as_json:
        print(json.dumps(answer))
        return
    outcome = "thrown away" if drop else "sent again"
    print(f"{number_of(answer['count'], 'dead letter')} of {inbox} {outcome}")


def delete(
    inbox: Annotated[str, typer.Argument(metavar="APPLICATION", help="Whose inbox.")],
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Delete an inbox that nobody receives from, with all messages and dead letters that are in it."""
    answer = _ask("queues.delete", {"inbox": inbox}, connection)
    count = answer["messages"]
    print(
        json.dumps(answer)
        if as_json
        else f"{inbox} deleted, with {count:,} message{'' if count == 1 else 's'}"
    )


def own(
    inbox: Annotated[str, typer.Argument(metavar="APPLICATION", help="Whose inbox.")],
    principal: Annotated[str, typer.Option(help="Who may receive under this name from now on.")],
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Give an application's name to another principal. Its owner may do that, and an administrator."""
    answer = _ask("queues.own", {"inbox": inbox, "principal": principal}, connection)
    print(json.dumps(answer) if as_json else f"{inbox} is {answer['owner']}'s now")


def rescue(
    yes: Annotated[bool, typer.Option("--yes", help="Do it, whatever may be lost.")] = False,
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """The last resort when a majority of an arc's electors is gone for good, or every replica, or no log of
    one is whole: go on with what is left.

    Says what may be lost; only --yes does it. If those who are gone come back, theirs is not taken any more.
    """
    arguments = {"confirm": "yes"} if yes else {}
    answer = _ask("queues.rescue", arguments, connection)
    if as_json:
        print(json.dumps(answer))
        return
    if not answer["arcs"]:
        print("every arc has a majority of its electors and a replica: there is nothing to rescue")
        return
    for arc in answer["arcs"]:
        print(rescue_line(arc))
    if not yes:
        raise UsageError("nothing is done yet: add --yes if the brokers that are gone never come back")


def rescue_line(arc: dict[str, Any]) -> str:
    gone = ", ".join(arc["gone"]) or "nobody"
    lost = f"may be lost: {arc['lost']}" if arc["lost"] else "nothing is lost"
    return f"arc {arc['arc']}  gone {gone}  reached {', '.join(arc['reached']) or 'nobody'}  {lost}"


def found(
    *,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Begin queues by hand, where a broker waits for others that it was told of and that never answer."""
    answer = _ask("queues.found", {}, connection)
    print(json.dumps(answer) if as_json else f"{number_of(answer['arcs'], 'arc')} founded")
