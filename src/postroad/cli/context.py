"""`postroad context`: names for brokers, tokens and certificates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer

from postroad.cli import contexts
from postroad.cli.connection import (
    BrokerOption,
    JsonOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenFileOption,
)
from postroad.cli.contexts import MAX_NAME, Options
from postroad.errors import UsageError

NameArgument = Annotated[str, typer.Argument(help="What to call it.")]

context = typer.Typer(
    help="Names for brokers, tokens and certificates, for all commands that connect.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    app.add_typer(context, name="context")


@context.command()
def add(
    name: NameArgument,
    broker: BrokerOption = None,
    token: Annotated[
        str | None, typer.Option("--token", help="Kept in the file of contexts; prefer --token-file.")
    ] = None,
    token_file: TokenFileOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a context, or replace it. The first one is used from then on."""
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise UsageError(f"a context has a name of 1 to {MAX_NAME} printable characters")
    if token and token_file:
        raise UsageError("give --token or --token-file, not both")
    if broker is not None:
        from postroad.client.addresses import parse_addresses

        parse_addresses(broker)
    options = Options(
        broker=broker,
        token=token,
        token_file=_whole(token_file),
        tls_ca=_whole(tls_ca),
        tls_cert=_whole(tls_cert),
        tls_key=_whole(tls_key),
    )
    if options == Options():
        raise UsageError("a context says at least one of --broker, --token-file, --token and the TLS files")
    kept = contexts.load()
    kept.by_name[name] = options
    kept.current = kept.current or name
    contexts.save(kept)
    _tell(kept, name, f"{contexts.place()}: {name}{', in use' if kept.current == name else ''}", as_json)


def _tell(kept: contexts.Contexts, name: str, text: str, as_json: bool) -> None:
    print(json.dumps({"name": name, "in_use": kept.current == name}) if as_json else text)


def _whole(file: str | None) -> str | None:
    """The file wherever a command is run."""
    from pathlib import Path

    if file is None:
        return None
    path = Path(file).expanduser().resolve()
    if not path.exists():
        raise UsageError(f"no such file: {file}")
    return str(path)


@context.command()
def use(name: NameArgument, as_json: JsonOption = False) -> None:
    """Use this context where a command names none. `-` for none."""
    kept = contexts.load()
    if name != "-":
        kept.get(name)
    kept.current = "" if name == "-" else name
    contexts.save(kept)
    _tell(kept, name, f"{name} is in use" if kept.current else "no context is in use", as_json)


@context.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the contexts; the one in use has a star."""
    kept = contexts.load()
    for name, options in sorted(kept.by_name.items()):
        shown = replace(options, token="(kept here)" if options.token else None)
        said = {option: value for option, value in asdict(shown).items() if value is not None}
        if as_json:
            print(json.dumps({"name": name, "in_use": name == kept.current, **said}))
        else:
            listed = "  ".join(f"--{option.replace('_', '-')} {value}" for option, value in said.items())
            print(f"{'*' if name == kept.current else ' '} {name}  {listed}")


@context.command()
def remove(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove a context."""
    kept = contexts.load()
    kept.get(name)
    del kept.by_name[name]
    kept.current = "" if kept.current == name else kept.current
    contexts.save(kept)
    _tell(kept, name, f"{name} is removed", as_json)
