"""`postroad page`: the network in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from postroad.cli.connection import DEFAULT_BROKER, connecting
from postroad.cli.contexts import Options
from postroad.cli.discover import BdnOption, InterfaceOption
from postroad.errors import UsageError

GET_IT = "the page needs the extra `page`: pip install 'postroad[page]', or make setup"


def register(app: typer.Typer) -> None:
    app.command("page")(connecting(page))


def page(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve it; port 0 for any.")
    ] = "127.0.0.1:7480",
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which browsers reach it, as behind a proxy; may be given several times."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    bdn: BdnOption = None,
    interface: InterfaceOption = None,
    *,
    connection: Options,
) -> None:
    """Serve a live page of the network: topology, traces, subscriptions, queues, repair, clients.

    Everybody who reaches it reads what its own connection may read. Who signs in, with a token of the
    broker's, acts with the rights of that token. Prints `ready page HOST:PORT` once it serves.
    """
    try:
        import nicegui  # noqa: F401 -- whether it is there
    except ImportError:
        raise UsageError(GET_IT) from None
    from postroad.client.addresses import tls
    from postroad.config import is_loopback, parse_address
    from postroad.net.finding import Where, from_environment
    from postroad.page.door import Door
    from postroad.page.server import PageConfig, run_page

    to = connection
    context = tls(ca=to.tls_ca, certificate=to.tls_cert, key=to.tls_key) if to.tls_ca or to.tls_cert else None
    private = is_loopback(parse_address(listen)[0]) and not name
    where = from_environment(Where(nodes=tuple(bdn or ()), interface=interface or "", token=to.token or ""))
    run_page(
        PageConfig(
            listen=listen,
            door=Door(broker=to.broker or DEFAULT_BROKER, token=to.token or "", tls=context, private=private),
            where=where,
            names=tuple(name or ()),
            open_browser=show,
        )
    )
