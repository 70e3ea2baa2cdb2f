"""What deploy/ has is right, as far as a machine without a container runtime can tell."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.worlds.process_clients import run

import postroad
from postroad.cli.up import up

if TYPE_CHECKING:
    from tests.worlds.processes import Brokers

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "postroad.service").read_text()
    program = tmp_path / "postroad"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    # systemd looks for the program where the unit says it is installed.
    here = tmp_path / "postroad.service"
    here.write_text(unit.replace("/opt/postroad/venv/bin/postroad", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(here) not in done.stderr


def services() -> dict[str, list[str]]:
    """The command of each service of the compose file."""
    found = re.findall(
        r"^  (b\d):\n.*?command: \[(.*?)\]", (DEPLOY / "compose.yaml").read_text(), re.M | re.S
    )
    return {name: command.split(", ") for name, command in found}


def test_the_three_brokers_of_the_compose_file_link_and_ask_for_its_secrets(
    brokers: Brokers, tmp_path: Path
) -> None:
    secrets = {"postroad-token": "clients only", "postroad-link-token": "brokers only"}
    for name, secret in secrets.items():
        (tmp_path / name).write_text(secret)
    places: dict[str, str] = {}
    commands = services()
    assert list(commands) == ["b1", "b2", "b3"]
    for name, command in commands.items():
        flags = dict(word.split("=", 1) for word in command if not word.startswith("--link=") and "=" in word)
        links = [word.removeprefix("--link=") for word in command if word.startswith("--link=")]
        assert sorted(links) == sorted(f"{other}:7420" for other in commands if other != name)
        assert flags["--name"] == name
        assert flags["--listen"] == f"{name}:7420"
        extra = []
        for flag in ("--token-file", "--link-token-file"):
            extra += [flag, flags[flag].replace("/run/secrets", str(tmp_path))]
        known = [places[link] for link in links if link in places]
        places[f"{name}:7420"] = brokers.start(name, *known, extra=tuple(extra)).address

    async def test() -> None:
        async with postroad.connect(places["b3:7420"], token="clients only") as client:
            while len((await client.request("status"))["brokers"]) != 3:  # noqa: ASYNC110 -- other processes
                await asyncio.sleep(0.05)
        with pytest.raises(postroad.DeniedError):
            async with postroad.connect(places["b1:7420"]):
                pass

    run(test())


def test_the_image_is_made_of_files_that_there_are_and_runs_a_command_that_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    command = re.search(r"^CMD \[(.*)\]$", text, re.M)
    assert command is not None
    words = command.group(1).replace('"', "").split(", ")
    assert words[0] == up.__name__
    options = {f"--{name.replace('_', '-')}" for name in up.__annotations__}
    assert {word for word in words if word.startswith("--")} <= options
