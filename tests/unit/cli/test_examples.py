"""Every command's --help ends with an example, which can be typed as it stands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from postroad.cli import app
from postroad.cli.examples import EXAMPLES


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All that can be run, by what is typed."""
    inner = getattr(command, "commands", {})
    for name, child in inner.items():
        yield from commands(child, (*path, name))
    if path and (not inner or command.invoke_without_command):
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_every_command_has_one() -> None:
    assert {path for path in COMMANDS if path not in EXAMPLES} == set()
    assert EXAMPLES.keys() <= COMMANDS.keys(), "an example of no command"


@pytest.mark.parametrize("path", EXAMPLES)
def test_it_can_be_typed(path: str) -> None:
    command = COMMANDS[path]
    begins = f"Example: postroad {path}"
    assert command.epilog.startswith(begins)
    arguments = shlex.split(command.epilog.removeprefix(begins))
    assert command.make_context(path, arguments).params
