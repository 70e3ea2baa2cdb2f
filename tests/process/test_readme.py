"""The README does what it says: its tour is typed here, command by command, and so are the examples."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worlds.processes import BrokerProcess, Brokers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SOME_ID = "0000002a-00000007-0193c1d2e3f4-0001"  # what the README has in place of an id
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ENVIRONMENT,
    )


def blocks(text: str) -> list[str]:
    return re.findall(r"^```(?:python)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Terminal:
    """Runs what somebody types, at brokers that have other addresses than in the README."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._addresses = {"127.0.0.1:7420": brokers.start("b1").address}
        self._stack = contextlib.ExitStack()
        self.readers: list[tuple[subprocess.Popen[str], Path]] = []
        self.printed: list[str] = []  # by each command that ended
        self.published: list[str] = []  # ids that `pub` printed

    def type(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        assert words.pop(0) == "postroad"
        if words[0] == "up":
            self._up(words)
        elif words[0] == "sub" and "--count" not in words:
            self._read(words)  # in a terminal of its own: the next line is typed once it is subscribed
        else:
            self.printed.append(self.run(words))
            if words[0] == "pub":
                self.published += self.printed[-1].split()

    def _up(self, words: list[str]) -> None:
        flags = dict(zip(words[1::2], words[2::2], strict=True))
        broker = self._brokers.start(flags["--name"], self._addresses[flags["--link"]])
        self._addresses[flags["--listen"]] = broker.address

    def here(self, words: list[str]) -> list[str]:
        """The words at the brokers of this test, and with an id of this test."""
        if "--broker" not in words:
            words = [*words, "--broker", "127.0.0.1:7420"]
        return [self.published[-1] if word == SOME_ID else self._addresses.get(word, word) for word in words]

    def run(self, words: list[str]) -> str:
        done = run("-m", "postroad", *self.here(words))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _read(self, words: list[str]) -> None:
        output = self._brokers.folder / f"reader-{len(self.readers)}"
        with output.open("wb") as file:
            reader = self._stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "postroad", *self.here(words)],
                    stdout=file,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=ENVIRONMENT,
                )
            )
        self._stack.callback(reader.terminate)
        assert reader.stderr is not None
        said = reader.stderr.readline()
        assert said.startswith("subscribed to "), said
        self.readers.append((reader, output))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def terminal(brokers: Brokers) -> Iterator[Terminal]:
    started = Terminal(brokers)
    try:
        yield started
    finally:
        started.close()


def test_it_opens_with_two_commands_that_there_are() -> None:
    commands = [line.split("#")[0].split() for line in blocks(TEXT)[0].splitlines()]
    assert commands == [["make", "up"], ["make", "test"]]
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"up", "test", "demo", "soak"} <= set(made)


def test_the_tour(terminal: Terminal, until: Callable[..., None]) -> None:
    tour = TEXT.split("## Two minutes")[1].split("**From Python.**")[0]
    mistakes = [block for block in blocks(tour) if block.startswith("$ ")]
    for block in blocks(tour):
        if block not in mistakes:
            for line in block.splitlines():
                terminal.type(line)
    (_, everything), (_, dear) = terminal.readers

    def shows(output: Path, *payloads: str) -> bool:
        lines = output.read_text().splitlines()
        return [line.split("  ")[1] for line in lines] == list(payloads)

    dear_ones = ("just right", "from the other side", "not to be lost")
    until(lambda: shows(everything, '{"n":1}', "too cheap", *dear_ones), "the first subscriber has all")
    until(lambda: shows(dear, *dear_ones[:2]), "the second what its condition asks for")
    status, _, durable, subs, _, inbox, queues, trace = terminal.printed[-8:]
    assert durable.split("  ")[1] == dear_ones[2]
    assert inbox == "shop  reserve A1\n"
    assert queues.startswith("inventory  0 messages")
    assert "b1" in status
    assert "b2" in status
    assert subs.startswith("billing  orders/#  ")
    assert "b1" in trace
    assert "billing" in trace


def test_a_mistake_is_shown_as_in_the_readme(terminal: Terminal) -> None:
    (block,) = [block for block in blocks(TEXT) if block.startswith("$ ")]
    command, expected = block.removeprefix("$ postroad ").split("\n", 1)
    done = run("-m", "postroad", *terminal.here(shlex.split(command)))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def run_program(broker: BrokerProcess, *arguments: str) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert broker.running
    return done.stdout


def test_the_program(brokers: Brokers) -> None:
    b1 = brokers.start("b1")
    (program,) = [block for block in blocks(TEXT) if block.startswith("import asyncio")]
    said = run_program(b1, "-c", program.replace("localhost:7420", b1.address))
    assert said.endswith("orders/eu {'price': 120} b'...'\n")


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
