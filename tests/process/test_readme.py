"""The README does what it says: its tour is typed here, command by command, and so are the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.worlds.pages import ROOT, Block, Desk, blocks

if TYPE_CHECKING:
    from tests.worlds.processes import BrokerProcess, Brokers

BLOCKS = blocks("README.md")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def test_it_opens_with_two_commands_that_there_are() -> None:
    commands = [line.split("#")[0].split() for line in BLOCKS[0].text.splitlines()]
    assert commands == [["make", "up"], ["make", "test"]]
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"up", "test", "demo", "soak", "site"} <= set(made)


def test_the_tour(desk: Desk, until: Callable[..., None]) -> None:
    printed: dict[str, str] = {}  # by the last command of each kind
    for block in of("sh"):
        for line in block.text.splitlines():
            printed[line.split()[1]] = desk.command(line)
    everything, dear = (reader.output for reader in desk.readers)

    def shows(output: Path, *payloads: str) -> bool:
        lines = output.read_text().splitlines()
        return [line.split("  ")[1] for line in lines] == list(payloads)

    dear_ones = ("just right", "from the other side", "not to be lost")
    until(lambda: shows(everything, '{"n":1}', "too cheap", *dear_ones), "the first subscriber has all")
    until(lambda: shows(dear, *dear_ones[:2]), "the second what its condition asks for")
    assert {"b1", "b2"} <= {*re.findall(r"\w+", printed["status"])}
    assert printed["subs"].startswith("billing  orders/#  ")
    assert printed["inbox"] == "shop  reserve A1\n"
    assert printed["queues"].startswith("inventory  0 messages")
    assert {"b1", "inventory"} <= {*re.findall(r"\w+", printed["trace"])}


def test_a_mistake_is_shown_as_in_the_readme(desk: Desk) -> None:
    (block,) = (block for block in of("text") if block.text.startswith("$ "))
    command, expected = block.text.removeprefix("$ ").split("\n", 1)
    desk.type(of("sh")[0])  # there is a broker then
    done = desk.run(command)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_the_program(desk: Desk) -> None:
    (program,) = of("python")
    desk.type(program)
    assert desk.printed.endswith("orders/eu {'price': 120} b'...'\n")


def run_program(broker: BrokerProcess, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert broker.running
    return done.stdout


def test_the_examples(brokers: Brokers) -> None:
    b1 = brokers.start("b1")
    said = {
        path.stem: run_program(b1, str(path), b1.address, *(["20000"] if path.stem == "throughput" else []))
        for path in sorted((ROOT / "examples").glob("*.py"))
    }
    assert set(said) == {"orders", "prices", "throughput", "without_event_loop"}
    assert "shop: reserve rice, attempt 2" in said["orders"].splitlines()
    assert said["orders"].endswith("billing: charge 6\nmail: thank you\n")
    assert [line.split("  ")[2] for line in said["prices"].splitlines()] == ["tea at 95", "tea at 100"]
    assert "jobs/backup: nightly {'priority': 7}" in said["without_event_loop"]
    assert said["without_event_loop"].endswith("b1 says goodbye\n")
    assert said["throughput"].endswith("events a second\n")
