"""Pages of the documents, and somebody who types what stands in them.

The language of a block says what it is. `sh` and `python` are run, in the order of the page, by the test
that `RUN_BY` names; `output` is what the block before it prints, `...` standing for anything; `console` has
commands for another machine, or for hours, of which a test checks that they exist; all others are not typed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.worlds import fork_server
from tests.worlds.fork_server import ForkedProcess
from tests.worlds.processes import SOURCE, BrokerProcess, Brokers, wait_until

import postroad
from postroad import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TYPED = ("sh", "python")
LANGUAGES = (*TYPED, "output", "console", "text", "toml", "sql", "json", "hex", "yaml")
PAGES_TEST = "tests/process/test_pages.py"
# The pages with something to type, and the test that types all of it.
RUN_BY = {
    "README.md": "tests/process/test_readme.py",
    "docs/how-to/read-the-lake.md": "tests/spark/test_read_the_lake.py",
    "docs/how-to/secure-a-network.md": "tests/process/test_secure_network.py",
    "docs/reference/pipeline.md": "tests/spark/test_lake_pages.py",
    "docs/tutorial/first-lake.md": "tests/spark/test_lake_pages.py",
    "docs/tutorial/queues.md": "tests/process/test_queues_tutorial.py",
}
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = re.compile(r"\b(?:localhost|127\.0\.0\.1):(\d{4,5})\b")
_SHELL = set("|><$;&`")
DEFAULT_PORT = "7420"
ALONE = {"certs", "context", "plan", "bench", "lab", "sim"}  # commands that talk to no broker
SOME_ID = "0000002a-00000007-0193c1d2e3f4-0001"  # in pages, the id that the last `pub` or `send` printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str  # its path from the root of the repository
    line: int
    language: str  # the first word behind the fence
    section: str  # the heading it stands under
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        headings = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                language=(match[1].split() or [""])[0],
                section=headings[-1] if headings else "",
                text=match[2],
            )
        )
    return found


def pages_to_type() -> list[str]:
    """Pages with something to type that have no test of their own."""
    every = [str(path.relative_to(ROOT)) for path in pages()]
    return [
        page
        for page in every
        if page not in RUN_BY and any(block.language in TYPED for block in blocks(page))
    ]


def matches(expected: str, printed: str) -> bool:
    """Whether this is what the page shows."""
    parts = [re.escape(part) for part in expected.strip().split("...")]
    return re.fullmatch(r".*?".join(parts), printed.strip(), re.DOTALL) is not None


@dataclass
class Reader:
    """`postroad sub` in a terminal of its own."""

    process: ForkedProcess
    output: Path


@dataclass
class Desk:
    """Types what pages say, in a folder of its own, at brokers that have other addresses than in the text."""

    brokers: Brokers
    places: dict[str, str] = field(default_factory=dict)  # port in the text -> address here
    names: dict[str, Any] = field(default_factory=dict)  # what blocks of Python have defined
    readers: list[Reader] = field(default_factory=list)
    printed: str = ""  # by the last command or block
    last_id: str = SOME_ID
    configuration: Path | None = None  # where contexts are kept
    inside: frozenset[str] = frozenset()  # commands that this process runs, since it has what they need
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _runner: asyncio.Runner | None = None

    @property
    def folder(self) -> Path:
        return self.brokers.folder

    def type_page(self, page: str) -> None:
        for block in blocks(page):
            self.type(block)

    def type(self, block: Block) -> None:
        where = f"{block.page}:{block.line}"
        if block.language == "sh":
            for line in _lines(block.text):
                self.command(line, where)
        elif block.language == "python":
            self.python(block.text, where)
        elif block.language == "output":
            self._compare(block.text, where)

    def _compare(self, expected: str, where: str) -> None:
        if self.readers and not self.printed:
            output = self.readers[-1].output
            wait_until(lambda: matches(expected, output.read_text()), f"{where}: {expected}", 20)
            return
        assert matches(expected, self.printed), (
            f"{where} shows\n{expected}\nand this was printed:\n{self.printed}"
        )

    def _need_broker(self) -> None:
        """The broker that everybody means who names none: many pages take it as there."""
        if DEFAULT_PORT not in self.places:
            self._up([])

    # ---- commands

    def command(self, line: str, where: str = "") -> str:
        words = shlex.split(line.removesuffix("&"), comments=True)
        if words[:2] == ["postroad", "up"]:
            self.printed = self._up(words[2:]).address
        elif words[:2] == ["postroad", "bdn"]:
            self.printed = self._node(words[words.index("--listen") + 1])
        elif words[:2] == ["postroad", "sub"] and not {"--count", "--timeout"} & {*words}:
            self.printed = ""
            self._need_broker()
            self._read(self._here(words[1:]))
        else:
            if {*re.findall(r"\bpostroad (\w+)", line)} - ALONE:
                self._need_broker()
            done = self.run(line)
            assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"
            self.printed = done.stdout
            if words[0] == "postroad" and words[1] in ("pub", "send") and done.stdout:
                self.last_id = done.stdout.split()[-1]
        return self.printed

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line, comments=True)
        if words[0] == "postroad" and words[1] in self.inside:
            return self._inside(self._here(words[1:]))
        if words[0] == "postroad" and not _SHELL & set(re.sub(r"'[^']*'|\"[^\"$]*\"", "", line)):
            return self._fork(self._here(words[1:]))
        return subprocess.run(
            self.here(line),
            shell=True,
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def _inside(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        at = ["--broker", self.places[DEFAULT_PORT]] if arguments[:2] == ["pipeline", "land"] else []
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = cli.main([*arguments, *at])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def _fork(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """The same program, without the half second that it takes to import."""
        out, err = self.folder / "stdout", self.folder / "stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr, contextlib.chdir(self.folder):
            process = ForkedProcess(
                arguments, stdout=stdout.fileno(), stderr=stderr.fileno(), environment=self.environment()
            )
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def here(self, text: str) -> str:
        """The text with the addresses of this test."""
        text = text.replace(SOME_ID, self.last_id)
        return _ADDRESS.sub(lambda match: self.places.get(match[1], match[0]), text)

    def _here(self, words: list[str]) -> list[str]:
        return [self.here(word) for word in words]

    def environment(self) -> dict[str, str]:
        program = self.folder / "bin" / "postroad"
        if not program.exists():
            program.parent.mkdir()
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m postroad "$@"\n')
            program.chmod(0o755)
            (program.parent / "python3").symlink_to(sys.executable)
        broker = {"POSTROAD_BROKER": self.places[DEFAULT_PORT]} if DEFAULT_PORT in self.places else {}
        return (
            os.environ
            | broker
            | {
                "PATH": f"{program.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(SOURCE),
                "PYTHONWARNINGS": "error",
                "XDG_CONFIG_HOME": str(self.configuration or self.folder / "config"),
                "COLUMNS": "200",
            }
        )

    def _up(self, words: list[str]) -> BrokerProcess:
        flags: dict[str, str] = {}
        links: list[str] = []
        extra: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--link":
                links.append(_ADDRESS.sub(lambda match: self.places[match[1]], next(rest)))
            elif word in ("--name", "--listen", "--data", "--metrics"):
                flags[word] = next(rest)
            else:
                extra.append(self.here(word))
        if "--metrics" in flags:
            extra += ["--metrics", "127.0.0.1:0"]
        name = flags.get("--name", f"b{len(self.brokers.all) + 1}")
        port = flags.get("--listen", f":{DEFAULT_PORT}").rpartition(":")[2]
        broker = next((known for known in self.brokers.all if known.name == name), None)
        if broker is None:
            data = self.folder / flags.get("--data", f"{name}-data")
            broker = BrokerProcess(name=name, data=data, links=tuple(links), extra=tuple(extra))
            self.brokers.all.append(broker)
        with contextlib.chdir(self.folder):
            broker.start()
        self.places[port] = broker.address
        if "--metrics" in flags:
            with postroad.sync.connect(broker.address) as client:
                self.places[flags["--metrics"].rpartition(":")[2]] = client.request("status")[
                    "metrics_address"
                ]
        return broker

    def _node(self, listen: str) -> str:
        """A discovery node."""
        with (self.folder / "node.log").open("wb") as log, contextlib.chdir(self.folder):
            process = fork_server.start(["bdn", "--listen", "127.0.0.1:0"], log, self.environment())
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        with process.stdout as said:
            address = said.readline().split()[2]
        self.places[listen.rpartition(":")[2]] = address
        return address

    def _read(self, arguments: list[str]) -> None:
        number = len(self.readers)
        output, errors = self.folder / f"reader-{number}", self.folder / f"reader-{number}-errors"
        with output.open("wb") as stdout, errors.open("wb") as stderr, contextlib.chdir(self.folder):
            process = ForkedProcess(
                arguments, stdout=stdout.fileno(), stderr=stderr.fileno(), environment=self.environment()
            )
        self.readers.append(Reader(process=process, output=output))
        wait_until(lambda: "subscribed to " in errors.read_text(), f"{arguments} listens")

    # ---- Python

    def python(self, text: str, where: str) -> None:
        """Blocks of a page are one program. `await` may stand where it stands in a coroutine."""
        if f":{DEFAULT_PORT}" in text:
            self._need_broker()
        code = compile(self.here(text), where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        said = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said):
            if code.co_flags & inspect.CO_COROUTINE:
                if self._runner is None:
                    self._runner = self._stack.enter_context(asyncio.Runner())
                self._runner.run(_bounded(eval(code, self.names)))
            else:
                exec(code, self.names)
        self.printed = said.getvalue()

    def close(self) -> None:
        for reader in self.readers:
            reader.process.kill()
            reader.process.wait(30)
        self._stack.close()


async def _bounded(made: Any) -> None:
    async with asyncio.timeout(60):
        await made


def _lines(text: str) -> Iterator[str]:
    """Commands. A backslash at the end of a line, and a here-document, go on in the next."""
    whole = text.replace("\\\n", " ")
    lines = iter(whole.splitlines())
    for line in lines:
        begun = re.search(r"<<\s*'?(\w+)'?", line)
        if begun:
            parts = [line]
            for part in lines:
                parts.append(part)
                if part == begun[1]:
                    break
            yield "\n".join(parts)
        elif line.strip() and not line.lstrip().startswith("#"):
            yield line
