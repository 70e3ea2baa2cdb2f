"""`postroad up`: run one broker."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

NameOption = Annotated[
    str | None, typer.Option(help="What people call this broker; kept in its data folder.")
]
ListenOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to serve; port 0 takes any free one. \\[default: 127.0.0.1:7420; with --discover, any"
        " free port where that is taken]",
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The broker's folder. \\[default: ./postroad-data; with --discover, ./postroad-data-2 and so on"
        " where another broker uses that]",
    ),
]
LinkOption = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A broker to stay linked to; may be given several times."),
]
DiscoverOption = Annotated[
    bool | None,
    typer.Option("--discover", help="Find the nearest, least busy brokers, and stay linked to two of them."),
]
BdnOption = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A discovery node to be known to; may be given several times."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="Ask clients for this token. It gives no right to link as a broker or to administer."
        " Others can see a flag; prefer --token-file.",
    ),
]
TokenFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="The token is this file's first line.")
]
LinkTokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="POSTROAD_LINK_TOKEN",
        help="The token of brokers and administrators: asked of brokers that link, presented to those"
        " linked to. Prefer --link-token-file.",
    ),
]
LinkTokenFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="The link token is this file's first line.")
]
TlsCertOption = Annotated[str | None, typer.Option(metavar="FILE", help="Serve and link with TLS.")]
TlsKeyOption = Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's key.")]
TlsCaOption = Annotated[str | None, typer.Option(metavar="FILE", help="Who signs the peers' certificates.")]
MutualOption = Annotated[
    bool | None, typer.Option("--mutual", help="Ask every peer for a certificate signed by --tls-ca.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|off",
        help="Prometheus metrics, /health and /ready. \\[default: 127.0.0.1:7421, or any free port]",
    ),
]
TrackingOption = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY",
        help="How the paths of messages are recorded: bloom, exact or none. \\[default: bloom]",
    ),
]
DrainOption = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="How long clients have to go on at other brokers after SIGTERM; 0: none. \\[default: 10 s]",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="FILE.toml", help="Settings from a file; flags win over it.")
]
LogOption = Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")]

LogFormatOption = Annotated[
    str | None, typer.Option(metavar="FORMAT", help="text, or json: one object a line. \\[default: text]")
]


def register(app: typer.Typer) -> None:
    app.command("up")(up)


def up(
    name: NameOption = None,
    listen: ListenOption = None,
    data: DataOption = None,
    link: LinkOption = None,
    discover: DiscoverOption = None,
    bdn: BdnOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    link_token: LinkTokenOption = None,
    link_token_file: LinkTokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_ca: TlsCaOption = None,
    mutual: MutualOption = None,
    metrics: MetricsOption = None,
    tracking: TrackingOption = None,
    drain: DrainOption = None,
    config: ConfigOption = None,
    log: LogOption = None,
    log_format: LogFormatOption = None,
) -> int:
    """Run a broker. Prints `ready NAME HOST:PORT` once it serves."""
    # It would end a process that does not listen to it yet, and a start may take minutes: `serve` lets it in.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from postroad.net.configure import configure
    from postroad.net.run import run

    flags: dict[str, object] = {
        "name": name,
        "listen": listen,
        "data": data,
        "links": link or None,
        "discovery.join": discover,
        "discovery.nodes": bdn or None,
        "auth.token": token if token_file is None else None,
        "auth.token_file": token_file,
        "auth.link_token": link_token if link_token_file is None else None,
        "auth.link_token_file": link_token_file,
        "tls.certificate": tls_cert,
        "tls.key": tls_key,
        "tls.ca": tls_ca,
        "tls.require_client_certificate": mutual,
        "metrics": metrics,
        "tracking.strategy": tracking,
        "drain": drain,
        "log": log,
        "log_format": log_format,
    }
    return run(partial(configure, flags, config))
