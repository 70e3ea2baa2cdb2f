"""The options that every command with a client takes, and the client they describe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client

BrokerOption = Annotated[
    str,
    typer.Option(
        "--broker",
        metavar="HOST:PORT",
        envvar="POSTROAD_BROKER",
        help="Which broker; several separated by commas. Else one on this machine, or one that is found.",
    ),
]
TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="POSTROAD_TOKEN", help="The token the broker asks for.")
]
TlsCaOption = Annotated[
    str | None, typer.Option("--tls-ca", metavar="FILE", help="Who signed the broker's certificate.")
]
TlsCertOption = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="A certificate to show the broker.")
]
TlsKeyOption = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's key.")]
RecordsOption = Annotated[
    bool,
    typer.Option("--records", help="Best effort: records on events and requests to other receivers alone."),
]
ScopeOption = Annotated[
    str, typer.Option("--scope", metavar="NAME", help="Best effort: ask and repair within this scope alone.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]

DEFAULT_BROKER = "localhost:7420"


def _certificates(ca: str | None, certificate: str | None, key: str | None) -> tuple[str, str, str] | None:
    return (certificate, key or "", ca) if certificate and ca else None


def client_for(
    broker: str, token: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> Client:
    """A client not yet connected: `async with` it. Any of the TLS files means TLS.

    Where no broker was named and none is at the default address, it looks for one, and says so.
    """
    from postroad.client.addresses import tls
    from postroad.client.aio import connect

    if tls_key and not tls_cert:
        raise UsageError("a TLS key needs its certificate: add --tls-cert")
    context = tls(ca=tls_ca, certificate=tls_cert, key=tls_key) if tls_ca or tls_cert else None
    client = connect(broker, token=token, tls=context)
    if broker == DEFAULT_BROKER:
        client.look_further(_certificates(tls_ca, tls_cert, tls_key))
    client._notice = lambda text: print(f"postroad: {text}", file=sys.stderr, flush=True)
    return client
