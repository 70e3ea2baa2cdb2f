"""`postroad backup` and `postroad restore`: a broker's data folder, copied and put back."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import JsonOption, client_for, connecting
from postroad.cli.contexts import Options
from postroad.errors import UsageError
from postroad.units import MIB, SECOND_US

if TYPE_CHECKING:
    from postroad.storage.backup import Manifest

DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The broker's folder. Without it, the broker that runs is asked for it."
    ),
]


def register(app: typer.Typer) -> None:
    app.command("backup")(connecting(backup))
    app.command("restore")(restore)


def backup(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder for the backup.")],
    *,
    data: DataOption = None,
    connection: Options,
    as_json: JsonOption = False,
) -> None:
    """Back up a broker's data, also while it runs. Be on its machine, as the user it runs as."""
    from postroad.storage.backup import back_up

    folder = asyncio.run(_folder_of(connection)) if data is None else data
    if not os.path.isdir(folder):
        raise UsageError(
            f"{folder} is not a folder here: run this on the broker's machine, or name it with --data"
        )
    _say(back_up(folder, target, _Progress("backed up")), target, "backed up to", as_json=as_json)


def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="What `postroad backup` made.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder for the broker.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Make a broker's data folder of a backup. Each file is proved first; start it with `postroad up --data`.

    The broker goes on from the time of the backup. Durable events that it took since are gone, and their
    subscribers are told so by a Gap; what was acknowledged since comes again as far as it is in the backup;
    subscriptions made since are gone, and those deleted since are back. Others tell it from its earlier
    starts by the time of its start, so its clock must not be behind. Never run the old folder as well.

    Queue messages are on several brokers. Those that went on know more than the backup, so the restored
    broker joins them as a new one. If no broker of the network went on, `postroad queues rescue` brings back
    what the backups hold.
    """
    from postroad.storage.backup import restore as restore_

    _say(restore_(source, data, _Progress("restored")), data, "restored to", as_json=as_json)
    if not as_json:
        print(f"start it with: postroad up --data {data}")
        print("if no other broker of its network went on, bring its queues back: postroad queues rescue")


async def _folder_of(connection: Options) -> Path:
    async with client_for(connection) as client:
        return Path((await client.request("status"))["data"])


class _Progress:
    """On a terminal, one line that is written over."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        share = 100 * done // total if total else 100
        if sys.stderr.isatty() and share != self._shown:
            self._shown = share
            end = "\n" if share == 100 else ""
            print(f"\r{self._verb} {share}% of {total / MIB:.1f} MiB", end=end, file=sys.stderr, flush=True)


def _say(manifest: Manifest, folder: Path, verb: str, *, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "broker": manifest.broker,
        "folder": str(folder),
        "taken_s": manifest.taken_us / SECOND_US,
        "files": len(manifest.files),
        "bytes": manifest.size,
    }
    size = f"{len(manifest.files)} files, {manifest.size / MIB:.1f} MiB"
    print(json.dumps(facts) if as_json else f"{manifest.broker} is {verb} {folder}: {size}")
