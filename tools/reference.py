"""Writes the pages of docs/reference that say what the code says: commands, settings, metrics, errors.

`make reference` runs it. Tests fail where a page that is committed differs from what it writes.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import typer
from tools import evidence

import postroad
import postroad.events  # GapError is there
from postroad import errors
from postroad.cli import app
from postroad.errors import UsageError
from postroad.net import configure
from postroad.units import duration_us, size

T = TypeVar("T")
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- Made by tools/reference.py from the code: `make reference` writes it anew. -->\n"
CONNECTION = "Connection"  # the panel of options that every command with a client has


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in lines)


# ---- commands


def commands() -> str:
    """Every command with its arguments, one a row."""
    top = typer.main.get_command(app)
    found = list(_walk(top, ["postroad"]))
    shared = next(options for _, command in found if (options := _options(command, CONNECTION)))
    parts = [
        MADE,
        "# Commands\n\nEvery failure is one line that says what to do. Exit codes: 0 done, 1 failed,"
        " 2 asked wrongly, 70 a bug, 130 interrupted, 141 nobody reads the output any more.\n",
        f"## Connection options\n\nEvery command that talks to a broker takes these.\n\n{_rows(shared)}",
    ]
    for words, command in found:
        about, _, more = inspect.cleandoc(command.help or "").partition("\n\n")
        parts.append(f"## {' '.join(words)}\n\n{' '.join(about.split())}\n")
        if more:
            parts.append("\n\n".join(" ".join(part.split()) for part in more.split("\n\n")) + "\n")
        if command.epilog:
            parts.append(f"Example: `{command.epilog.removeprefix('Example: ')}`\n")
        own = _options(command, None)
        if own:
            parts.append(_rows(own))
        if _options(command, CONNECTION):
            parts.append("It takes the [connection options](#connection-options) too.\n")
    return "\n".join(parts)


def _walk(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    inner = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield words, command
    for name, child in inner.items():
        yield from _walk(child, [*words, name])


def _options(command: Any, panel: str | None) -> list[Any]:
    return [
        option
        for option in command.params
        if getattr(option, "rich_help_panel", None) == panel and not option.hidden and option.name != "help"
    ]


def _rows(options: list[Any]) -> str:
    return "\n" + table(("argument", "default", "meaning"), [_row(option) for option in options])


def _row(option: Any) -> tuple[str, ...]:
    flags = [f"`{flag}`" for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")]
    value = "" if getattr(option, "is_flag", False) else f" {option.metavar or ''}".rstrip()
    name = ", ".join(flags) + (f" `{value.strip()}`" if value else "")
    if not flags:
        name = f"`{option.metavar or option.name.upper()}`"
    default = option.default
    if option.required:
        shown = "required"
    elif default is None or default is False or default == "" or callable(default):
        shown = ""
    else:
        shown = f"`{', '.join(map(str, default)) if isinstance(default, list | tuple) else default}`"
    meaning, _, said = (option.help or "").partition("\\[default:")  # a default that depends on something
    if said:
        shown = said.strip().removesuffix("]")
    if option.envvar:
        meaning += f" Or `{option.envvar}` in the environment."
    if option.multiple and "several times" not in meaning:
        meaning += " May be given several times."
    return name, shown, meaning


# ---- settings


class Recorder(configure._Table):
    """Reads nothing, and notes every key that is asked for with its default."""

    def __init__(self, where: str, found: dict[str, object]) -> None:
        super().__init__({}, where)
        self._found = found

    def take(self, key: str, read: Callable[[Any], T], default: T) -> T:
        self._found[self.path(key)] = default
        return super().take(key, read, default)

    def table(self, key: str) -> Recorder:
        return Recorder(self.path(key), self._found)


def settings() -> str:
    """Every key of a broker's file: its default from the code, its meaning from the documented file."""
    found: dict[str, object] = {}
    configure._node(Recorder("", found))
    document = (FOLDER / "configuration.md").read_text()
    example = document.split("```toml\n")[1].split("```")[0]
    meanings, written = _comments(example), tomllib.loads(example)
    flags = {
        key: flag for flag, key in re.findall(r"^\| `(--[a-z-]+).*?\| `([a-z_.]+)", document, re.MULTILINE)
    }
    up = getattr(typer.main.get_command(app), "commands")["up"]  # noqa: B009
    helps = {option: parameter.help for parameter in up.params for option in parameter.opts}
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key, default in found.items():
        meaning = meanings.get(key) or helps.get(flags.get(key, ""), "")
        if not meaning:
            raise UsageError(
                f"{key} has no meaning: write it behind the key in docs/reference/configuration.md"
            )
        flag = f"`{flags[key]}`" if key in flags else ""
        section = key.rpartition(".")[0]
        row = (f"`{key}`", flag, _default(default, _at(written, key)), meaning[0].upper() + meaning[1:])
        sections.setdefault(section, []).append(row)
    parts = [
        MADE,
        "# Settings\n\nEvery key of the file that `postroad up --config FILE` reads, with its flag where"
        " it has one."
        " [Configuration](configuration.md) has a whole file, and says who is served.\n",
    ]
    for section, rows in sections.items():
        title = f"## [{section}]\n\n" if section else "## At the top\n\n"
        parts.append(title + table(("key", "flag", "default", "meaning"), rows))
    return "\n".join(parts)


def _comments(example: str) -> dict[str, str]:
    """The comment behind each key of a TOML file."""
    found: dict[str, str] = {}
    section = ""
    for line in example.splitlines():
        if header := re.match(r"\[+([a-z_.]+)\]+", line):
            section = f"{header[1]}."
            found[header[1]] = line.partition("# ")[2]
        elif key := re.match(r"([a-z_]+) =", line):
            found[section + key[1]] = line.rpartition("# ")[2] if "# " in line else ""
    return found


def _at(tree: Any, key: str) -> object:
    for word in key.split("."):
        tree = tree.get(word) if isinstance(tree, dict) else None
    return tree


def _default(default: object, written: object) -> str:
    """As the example has it, where that is the default."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int | float):
        if isinstance(written, str):
            with contextlib.suppress(UsageError):
                if default in (_read(duration_us, written), _read(size, written)):
                    return f"`{written}`"
        return f"{default:,}"
    return f"`{default}`" if default else ""


def _read(reader: Callable[[str], int], text: str) -> int | None:
    try:
        return reader(text)
    except UsageError:
        return None


# ---- errors


def error_page() -> str:
    """Every error, what it means and what to do: the two paragraphs of its class."""
    rows = []
    for kind in _kinds(errors.PostroadError):
        meaning, _, remedy = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        if not remedy:
            raise UsageError(f"{kind.__name__} does not say what to do: add a second paragraph to its text")
        bases = [base.__name__ for base in kind.__bases__ if issubclass(base, errors.PostroadError)]
        rows.append(
            (
                f"`{kind.__name__}`",
                f"`{kind.code}`",
                ", ".join(f"`{base}`" for base in bases),
                meaning,
                remedy,
            )
        )
    intro = (
        "# Errors\n\nWhat the clients raise, and what commands print as one line."
        " `except postroad.PostroadError`"
        " catches all of them. The code is what travels on the wire.\n"
    )
    return "\n".join([MADE, intro, table(("error", "code", "is a", "means", "what to do"), rows)])


def _kinds(kind: type[errors.PostroadError]) -> Iterator[type[errors.PostroadError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__ or hasattr(postroad, child.__name__):
            yield from _kinds(child)


# ---- metrics

# How names begin, by subject; the first that fits holds.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Load": ("events_", "publish_frames", "deliveries", "delivery_frames", "frames_in", "bytes_in", "turn"),
    "Durable events and the disk": ("durable_", "log_", "history_"),
    "Subscribers": ("subscriptions", "delivery_", "dropped_", "slow_consumer", "interest_"),
    "Streams": ("streams", "nacks", "lost_spans", "ticks", "plain_", "cache_", "publishers"),
    "Queues and their ring": ("queue_", "ring_"),
    "Tracking": ("tracking_", "trace"),
    "Best effort and repair": ("best_effort_", "repair_"),
    "Datagrams and discovery": ("datagram", "discovery_"),
    "Connections": (
        "socket_",
        "clients",
        "links",
        "brokers_",
        "direct_",
        "dial_",
        "stalled",
        "feeds",
        "quota_",
    ),
    "Delays": (),
}


def metrics(scraped: str) -> str:
    """What a broker said on /metrics, in groups."""
    kinds = dict(re.findall(r"^# TYPE postroad_(\S+) (\S+)$", scraped, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP postroad_(\S+) (.*)$", scraped, re.MULTILINE))
    groups: dict[str, list[str]] = {title: [] for title in (*SUBJECTS, "The rest")}
    for name in sorted(kinds):
        subject = (title for title, begins in SUBJECTS.items() if name.startswith(begins))
        groups["Delays" if kinds[name] == "histogram" else next(subject, "The rest")].append(name)
    parts = [
        MADE,
        "# Metrics\n\n`/metrics` of a broker has these in the Prometheus format, each with the prefix"
        " `postroad_`. What ends in `_total` counts since the start."
        " Delays are histograms with buckets from 0.1 ms to 60 s."
        " Beside them are `process_...` of the process and `python_gc_...` of its garbage collector.\n",
    ]
    for title, names in groups.items():
        rows = [(f"`{name}`", kinds[name], helps[name]) for name in names]
        parts.append(f"## {title}\n\n" + table(("metric", "kind", "meaning"), rows))
    return "\n".join(parts)


def scrape() -> str:
    """/metrics of a broker that has a durable subscription and an inbox: both have metrics of their own."""
    with tempfile.TemporaryDirectory() as folder:
        place = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--data", f"{folder}/data"]
        line = [sys.executable, "-m", "postroad", "up", "--name", "b1", "--log", "error", *place]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as broker:
            try:
                assert broker.stdout is not None
                address = broker.stdout.readline().split()[2]
                with postroad.sync.connect(address) as client, client.subscribe("a", durable="d"):
                    client.application("a").send("b", b"")
                    where = client.request("status")["metrics_address"]
                    with urllib.request.urlopen(f"http://{where}/metrics", timeout=30) as answer:
                        return str(answer.read().decode())
            finally:
                broker.terminate()


PAGES: dict[str, Callable[[], str]] = {
    "evidence.md": lambda: evidence.render((FOLDER / "evidence.md").read_text()),
    "commands.md": commands,
    "settings.md": settings,
    "errors.md": error_page,
    "metrics.md": lambda: metrics(scrape()),
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
        sys.stdout.write(f"docs/reference/{name}\n")
