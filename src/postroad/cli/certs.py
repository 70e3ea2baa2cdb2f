"""`postroad certs`: an authority of one's own, and certificates for brokers and clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from postroad.cli.connection import JsonOption

if TYPE_CHECKING:
    from postroad.net.certificates import Files

FolderOption = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Where the authority is and certificates go.")
]
DaysOption = Annotated[int, typer.Option(min=1, max=3_650, help="How long it is valid.")]
RenewOption = Annotated[bool, typer.Option("--renew", help="Make it anew, with the key that it has.")]
NameArgument = Annotated[str, typer.Argument(help="The principal: rules and logs call it so.")]
HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="A name or address under which others reach the broker; may be given several times."
        " \\[default: localhost and 127.0.0.1]",
    ),
]
_FOLDER = Path("certs")

certs = typer.Typer(
    help="An authority of your own, and the certificates it signs for brokers and clients.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    app.add_typer(certs, name="certs")


@certs.command()
def authority(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Make an authority. Peers are given authority.pem; authority.key stays where certificates are made."""
    from postroad.net.certificates import make_authority

    made = make_authority(folder)
    if as_json:
        _print_json(made)
        return
    print(f"{made.certificate}  for everybody (--tls-ca)")
    print(f"{made.key}  keep it secret: whoever has it can make certificates")


@certs.command()
def broker(
    name: NameArgument,
    host: HostOption = None,
    folder: FolderOption = _FOLDER,
    days: DaysOption = 365,
    renew: RenewOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a broker's certificate. A broker that runs takes it in on SIGHUP."""
    _make(name, host or ["localhost", "127.0.0.1"], folder, days, renew, as_json)


@certs.command()
def client(
    name: NameArgument,
    folder: FolderOption = _FOLDER,
    days: DaysOption = 365,
    renew: RenewOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a client's certificate."""
    _make(name, [], folder, days, renew, as_json)


def _make(name: str, hosts: list[str], folder: Path, days: int, renew: bool, as_json: bool) -> None:
    from postroad.net.certificates import make_certificate

    made = make_certificate(folder, name, hosts=hosts, days=days, renew=renew)
    if as_json:
        _print_json(made)
        return
    print(f"{made.certificate}  (--tls-cert), valid for {days} days")
    print(f"{made.key}  (--tls-key), keep it secret")


def _print_json(made: Files) -> None:
    print(json.dumps({"certificate": str(made.certificate), "key": str(made.key)}))
