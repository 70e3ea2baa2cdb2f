"""`postroad discover` and `postroad bdn`: brokers that are found, not configured."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postroad.cli.connection import TlsCaOption, TlsCertOption, TlsKeyOption, TokenOption
from postroad.units import MILLISECOND_US, SECOND_US

if TYPE_CHECKING:
    from postroad.discovery.search import SearchResult

MAX_TIMEOUT_S: Final = 3_600
MAX_WIDTH: Final = 500  # of a table

BdnOption = Annotated[
    list[str] | None,
    typer.Option("--bdn", metavar="HOST:PORT", help="A discovery node to ask; may be given several times."),
]
InterfaceOption = Annotated[
    str | None,
    typer.Option(
        "--interface",
        metavar="ADDRESS",
        envvar="POSTROAD_INTERFACE",
        help="An address of this machine: multicast leaves by its interface. \\[default: loopback and the"
        " local network]",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("discover")(discover)
    app.command("bdn")(bdn)


def discover(
    bdn: BdnOption = None,
    interface: InterfaceOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds until there is a choice, or none.")] = 5.0,
    token: TokenOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Find the nearest and least busy broker: who answered, who was pinged, which one is chosen and why."""
    from postroad.config import TlsConfig, format_address
    from postroad.discovery.explaining import as_rows
    from postroad.discovery.settings import SearchSettings
    from postroad.errors import UsageError
    from postroad.net.finding import Where, find, from_environment
    from postroad.net.sealing import load_sealer

    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout {timeout:g}: it is more than 0 and at most {MAX_TIMEOUT_S} seconds")
    where = Where(
        nodes=tuple(bdn or ()),
        interface=interface or "",
        token=token or "",
        sealer=load_sealer(TlsConfig(certificate=tls_cert or "", key=tls_key or "", ca=tls_ca or "")),
        search=SearchSettings(timeout_us=round(timeout * SECOND_US)),
    )
    result = asyncio.run(find(from_environment(where)))
    for host, port in result.silent_nodes:
        print(f"postroad: the discovery node {format_address(host, port)} did not answer", file=sys.stderr)
    if as_json:
        print(json.dumps(as_rows(result)))
    else:
        _show(result)


def _show(result: SearchResult) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from postroad.cli.status import plain
    from postroad.discovery.explaining import why

    console = Console(highlight=False)
    table = Table(pad_edge=False, box=None)
    for name in ("broker", "address", "delay ms", "ping ms", "weight", "cpu", "clients", "links"):
        table.add_column(name, justify="left" if name in ("broker", "address") else "right", no_wrap=True)
    for row in result.candidates:
        usage = row.response.usage
        table.add_row(
            plain(row.response.name),
            plain(row.address),
            f"{row.delay_us / MILLISECOND_US:.1f}",
            "-" if row.round_trip_us is None else f"{row.round_trip_us / MILLISECOND_US:.2f}",
            f"{row.weight:.3f}",
            f"{usage.cpu_share:.0%}",
            str(max(0, usage.connections - usage.links)),
            str(usage.links),
        )
    options = console.options.update(max_width=MAX_WIDTH)
    # No column is cut off; a narrow terminal breaks the lines.
    console.width = max(console.width, Measurement.get(console, options, table).maximum)
    console.print(table)
    phases = ", ".join(f"{name} {took / MILLISECOND_US:.1f}" for name, took in result.phases_us.items())
    print(f"chosen: {result.chosen.response.name} at {result.chosen.address}, {why(result)}")
    print(f"phases in ms: {phases}")


def bdn(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve.")] = "127.0.0.1:7419",
    name: Annotated[str, typer.Option(help="What people call this node.")] = "bdn",
    token: TokenOption = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer only who has the token on its first line.")
    ] = None,
    private: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A private node: announce it to this broker; several times for several.",
        ),
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(help="Take advertisements of this geography only; may be given several times."),
    ] = None,
    realm: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Answer requests from this network only, such as 10.0.0.0/8."),
    ] = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_ca: TlsCaOption = None,
    metrics: Annotated[str, typer.Option(metavar="HOST:PORT|off", help="Metrics and health.")] = "off",
    log: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "info",
) -> int:
    """Run a discovery node. Prints `ready NAME HOST:PORT` once it serves."""
    from postroad.config import TlsConfig
    from postroad.net.bdn import BdnConfig, bdn_settings, run_bdn

    return run_bdn(
        BdnConfig(
            listen=listen,
            settings=bdn_settings(
                name=name, token=token, token_file=token_file, realms=realm or (), regions=region or ()
            ),
            announce=tuple(private or ()),
            metrics=metrics,
            log=log,
            tls=TlsConfig(certificate=tls_cert or "", key=tls_key or "", ca=tls_ca or ""),
        )
    )
