"""`postroad doctor`: what is wrong, or will be, and what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postroad.cli.connection import DEFAULT_BROKER, JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.errors import PostroadError

if TYPE_CHECKING:
    from postroad.net.doctor import Finding

CLOCK_MS: Final = 500.0  # two clocks further apart than that are said
ASK_S: Final = 5.0
STYLES: Final = {"ok": "green", "warning": "yellow", "problem": "red bold"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(connecting(doctor))


def doctor(
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="The configuration of a broker.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The broker's folder, if not as configured.")
    ] = None,
    connection: Options,
    as_json: JsonOption = False,
) -> int:
    """Check configuration, disk, clock, ports, certificates and reachability, and say what to do.

    Changes nothing, and needs no broker that runs; with one, `--broker` is asked, too. Each check is one
    line. The exit code is 1 if there is a problem.
    """
    from postroad.net.doctor import examine

    worst = 0
    for finding in examine(config, data):
        worst |= _say(finding, as_json=as_json)
    for finding in asyncio.run(_ask(connection)):
        worst |= _say(finding, as_json=as_json)
    return worst


def _say(finding: Finding, *, as_json: bool) -> int:
    if as_json:
        row = {
            "check": finding.check,
            "result": finding.result,
            "text": finding.text,
            "advice": finding.advice,
        }
        print(json.dumps(row))
    else:
        from rich.console import Console
        from rich.text import Text

        advice = f": {finding.advice}" if finding.advice else ""
        style = STYLES[finding.result]
        line = Text.assemble((f"{finding.result:8}", style), f"{finding.check:14}{finding.text}{advice}")
        Console(soft_wrap=True).print(line)
    return int(finding.result == "problem")


async def _ask(connection: Options) -> list[Finding]:
    """What a broker that runs can tell: of itself, and of those that it is linked with."""
    from postroad.net.doctor import Finding

    named = connection.broker
    there = replace(connection, broker=named or DEFAULT_BROKER)  # nobody else's is looked for
    try:
        async with asyncio.timeout(ASK_S), client_for(there) as client:
            status = await client.request("status")
            offset_ms = client.clock_offset_ms
    except (PostroadError, TimeoutError) as error:
        if named is None:
            return [Finding("broker", "ok", "none runs here; name one with --broker to have it asked")]
        advice = "start it with `postroad up`, or name another"
        return [Finding("broker", "problem", str(error) or f"{named} does not answer", advice)]
    return list(_findings(status, offset_ms))


def _findings(status: dict[str, Any], offset_ms: float) -> Iterator[Finding]:
    from postroad import __version__
    from postroad.net.doctor import Finding

    name = status["name"]
    yield Finding("broker", "ok", f"{name} at {status['address']} answers")
    if status["version"] != __version__:
        text = f"{name} runs version {status['version']}, this command is {__version__}"
        yield Finding("broker", "warning", text, "restart it with what is installed")
    if status["kernel"] != "compiled":
        yield Finding("broker", "warning", f"{name} runs without the compiled kernel", "install a C compiler")
    linked = {link["broker"]: link["clock_offset_ms"] for link in status["links"]}
    clocks = {name: offset_ms} | {broker: ms for broker, ms in linked.items() if ms is not None}
    for broker, apart_ms in clocks.items():
        whose = "this machine's" if broker == name else f"{name}'s"
        text = f"{broker}'s is {abs(apart_ms):.0f} ms {'ahead of' if apart_ms > 0 else 'behind'} {whose}"
        if abs(apart_ms) > CLOCK_MS:
            yield Finding("clock", "warning", text, "let both follow a time server (NTP)")
        else:
            yield Finding("clock", "ok", text)
    for address in status["addresses"]:
        if address["state"] != "connected" and address["state"] != "resting":
            text = f"{name} is not linked with {address['address']} ({address['failures']} tries failed)"
            yield Finding("link", "problem", text, "start that broker, or look at the log of this one")
    short = status["metrics"].get("log_short", 0)
    if short:
        yield Finding(
            "disk space", "problem", f"{name} refuses durable events: its disk is full", "make room"
        )
