"""docs/reference/evidence.md names only what exists, and leaves no row of the specification out."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from postroad.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reference" / "evidence.md").read_text()
ROWS = {"T": 13, "D": 13, "Q": 12, "V": 12, "B": 12, "P": 11}  # letter -> last number in its specification
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
TESTS = [text for text in QUOTED if "::" in text]
COMMANDS = [text for text in QUOTED if text.startswith("postroad ")]
TARGETS = [text.split()[1] for text in QUOTED if text.startswith("make ")]
FILES = [
    text
    for text in QUOTED
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)+|[A-Z]+(\.md)?|Makefile|\w+\.(txt|toml)", text)
]


@cache
def collected(path: str) -> frozenset[str]:
    """`name`, and `Class::name` for methods, of everything pytest would collect."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in found if re.match(r"test_|Test", name.split("::")[-1]))


@pytest.mark.parametrize("name", TESTS)
def test_every_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file()
    assert test in collected(path)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_option_exists(line: str) -> None:
    command = typer.main.get_command(app)
    options: set[str] = set()
    for word in shlex.split(line)[1:]:
        inner = getattr(command, "commands", {})
        if inner:
            assert word in inner, f"{word} is no command"
            command = inner[word]
            options = {option for parameter in command.params for option in parameter.opts}
        elif word.startswith("--"):
            assert word in options, f"{word} is no option"
    assert not getattr(command, "commands", {}), "a group of commands, not one"


def test_every_target_exists() -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert TARGETS
    assert set(TARGETS) <= made


@pytest.mark.parametrize("path", FILES)
def test_every_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_row_of_the_specification_is_here_once() -> None:
    expected = [f"{letter}{number}" for letter, last in ROWS.items() for number in range(1, last + 1)]
    found = re.findall(r"^\| ([A-Z]\d+) \|", TEXT, re.MULTILINE)
    assert found == expected


def test_every_row_shows_something_or_says_that_it_does_not() -> None:
    for line in TEXT.splitlines():
        if re.match(r"\| ([A-Z]\d+|\d) ", line):
            assert "`" in line or "not yet" in line, line


def test_every_command_that_prints_has_json() -> None:
    """DESIGN: all but those that serve, whose one line is for programs already."""
    without: list[str] = []

    def walk(command: typer.core.click.Command, words: str) -> None:
        inner = getattr(command, "commands", {})
        for name, one in inner.items():
            walk(one, f"{words} {name}".strip())
        if not inner and not any("--json" in parameter.opts for parameter in command.params):
            without.append(words)

    walk(typer.main.get_command(app), "")
    assert without == ["up", "bdn", "page"]
