"""The options that every command with a client takes, and the client they describe.

`@connecting` gives them to a command in place of its parameter `connection`. What a flag says wins over the
environment, that over the context, and where nothing is said a broker on this machine is taken, or found.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postroad.cli import contexts
from postroad.cli.contexts import Options
from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.client.aio import Client

_PANEL: Final = "Connection"

BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="HOST:PORT",
        envvar="POSTROAD_BROKER",
        rich_help_panel=_PANEL,
        help="Which broker; several separated by commas."
        " Without it, localhost:7420 if one is there, else one that is found.",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="POSTROAD_TOKEN",
        rich_help_panel=_PANEL,
        help="The token the broker asks for. Others can see a flag; prefer --token-file.",
    ),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file", metavar="FILE", rich_help_panel=_PANEL, help="The token is this file's first line."
    ),
]
TlsCaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-ca", metavar="FILE", rich_help_panel=_PANEL, help="Who signed the broker's certificate."
    ),
]
TlsCertOption = Annotated[
    str | None,
    typer.Option(
        "--tls-cert", metavar="FILE", rich_help_panel=_PANEL, help="A certificate to show the broker."
    ),
]
TlsKeyOption = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", rich_help_panel=_PANEL, help="The certificate's key."),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        envvar="POSTROAD_CONTEXT",
        rich_help_panel=_PANEL,
        help="What `postroad context add` called the rest of these; without it, the one in use.",
    ),
]
RecordsOption = Annotated[
    bool,
    typer.Option("--records", help="Best effort: records on events and requests to other receivers alone."),
]
ScopeOption = Annotated[
    str, typer.Option("--scope", metavar="NAME", help="Best effort: ask and repair within this scope alone.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]

DEFAULT_BROKER: Final = "localhost:7420"
OPTIONS: Final[dict[str, object]] = {
    "broker": BrokerOption,
    "token": TokenOption,
    "token_file": TokenFileOption,
    "tls_ca": TlsCaOption,
    "tls_cert": TlsCertOption,
    "tls_key": TlsKeyOption,
}


def connecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the connection options in place of its keyword parameter `connection: Options`."""
    named = {**OPTIONS, "context": ContextOption}

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        asked = {name: values.pop(name) for name in named}
        return command(connection=_resolved(asked.pop("context"), Options(**asked)), **values)

    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "connection":
            parameters += [
                parameter.replace(name=name, annotation=named[name], default=None) for name in named
            ]
        else:
            parameters.append(parameter)
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _resolved(context: str | None, asked: Options) -> Options:
    """With what the context adds, and with the token that a file holds."""
    if context is not None:
        asked = asked.over(contexts.load().get(context))
    elif (kept := contexts.load()).current:
        asked = asked.over(kept.get(kept.current))
    if asked.token and asked.token_file:
        raise UsageError("give --token (or POSTROAD_TOKEN) or --token-file, not both")
    if asked.tls_key and not asked.tls_cert:
        raise UsageError("a TLS key needs its certificate: add --tls-cert")
    if asked.token_file is None:
        return asked
    from postroad.net.configure import token_from

    return Options(
        broker=asked.broker,
        token=token_from(asked.token_file),
        tls_ca=asked.tls_ca,
        tls_cert=asked.tls_cert,
        tls_key=asked.tls_key,
    )


def client_for(to: Options) -> Client:
    """A client not yet connected: `async with` it. Any of the TLS files means TLS.

    Where no broker was named and none is at the default address, it looks for one, and says so.
    """
    from postroad.client.addresses import tls
    from postroad.client.aio import connect

    context = tls(ca=to.tls_ca, certificate=to.tls_cert, key=to.tls_key) if to.tls_ca or to.tls_cert else None
    client = connect(to.broker or DEFAULT_BROKER, token=to.token, tls=context)
    if to.broker is None:
        mutual = (to.tls_cert, to.tls_key or "", to.tls_ca) if to.tls_cert and to.tls_ca else None
        client.look_further(mutual)
    client._notice = lambda text: print(f"postroad: {text}", file=sys.stderr, flush=True)
    return client
