"""docs/how-to/secure-a-network.md does what it says: its commands are typed here, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.worlds.processes import Brokers, wait_until

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/how-to/secure-a-network.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def shell(line: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_from_nothing_to_brokers_and_a_client_that_know_each_other(brokers: Brokers, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "postroad"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m postroad "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONWARNINGS": "error",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    places: dict[str, str] = {}  # address in the text -> here
    printed: dict[str, str] = {}

    def here(line: str) -> str:
        for address, real in places.items():
            line = line.replace(address, real)
        return line

    def up(line: str) -> None:
        words = here(line).split()
        flags = {word: value for word, value in pairwise(words) if word.startswith("--")}
        files = ("--config", "--tls-ca", "--tls-cert", "--tls-key")
        extra = [part for flag in files for part in (flag, str(tmp_path / flags[flag]))]
        links = (flags["--link"],) if "--link" in flags else ()
        broker = brokers.start(flags["--name"], *links, extra=("--mutual", *extra))
        places[flags["--listen"]] = broker.address

    typed = commands()
    assert len([line for line in typed[:10] if line]) == 10
    for line in typed:
        if line.startswith("postroad up"):
            up(line)
            continue
        done = shell(here(line), tmp_path, environment)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed[line] = done.stdout
    read = next(said for line, said in printed.items() if line.startswith("postroad sub"))
    assert "for our eyes only" in read
    log = brokers.all[0].log
    wait_until(lambda: "SIGHUP: certificates are read again" in log.read_text(), "b1 has its new certificate")
    line = f"postroad status --broker {brokers.all[0].address} --tls-ca certs/authority.pem"
    stranger = shell(line, tmp_path, environment | {"XDG_CONFIG_HOME": str(tmp_path / "other")})
    assert stranger.returncode == 1
