"""Habits that nothing else would notice the loss of: pinned packages, strict tools, one way to run them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_FUNCTION_LINES = 70


def test_every_package_is_pinned_with_its_hashes_and_no_index_is_named() -> None:
    text = (ROOT / "constraints.txt").read_text()
    entries = re.split(r"^(?=\S)", text.replace("\\\n", " "), flags=re.MULTILINE)
    pinned = [entry for entry in entries if entry.strip() and not entry.startswith("#")]
    assert len(pinned) > 30
    for entry in pinned:
        assert re.match(r"[a-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry, re.DOTALL), entry[:80]
    assert not re.search(r"https?:|--(extra-)?index-url|--find-links|^-[if]", text, re.MULTILINE)


def test_a_broker_alone_is_set_up_with_the_same_versions() -> None:
    entries = re.compile(r"^([a-z0-9._-]+)==[^\n]*\n(?:    [^\n]*\n)+", re.MULTILINE)
    every, broker = (
        {entry[1]: entry[0] for entry in entries.finditer((ROOT / name).read_text())}
        for name in ("constraints.txt", "constraints-broker.txt")
    )
    assert broker.items() <= every.items()
    asked = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["discovery"],
        *PROJECT["build-system"]["requires"],
    ]
    assert {re.split(r"[\[<>=]", package)[0].lower() for package in asked} <= broker.keys()
    assert "pyspark" not in broker


def test_all_that_the_package_asks_for_is_pinned() -> None:
    pinned = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"spark", "dev"} <= extras.keys()
    asked = [*PROJECT["project"]["dependencies"], *(one for extra in extras.values() for one in extra)]
    assert {re.split(r"[\[<>=]", one)[0].lower() for one in asked} <= pinned


def test_the_tools_are_strict() -> None:
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"] == ["error"]


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().endswith("exec make test")
    assert re.search(r"^test: lint types unit$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_licence() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_no_test_imports_from_another_test_file() -> None:
    """What tests share is in tests/worlds/."""
    imported = {name for path in (ROOT / "tests").rglob("*.py") for name in imports_of_tests(path)}
    assert "tests.worlds.brokers.Net" in imported
    assert [name for name in sorted(imported) if re.search(r"\.(test_\w+|conftest)\b", name)] == []


def imports_of_tests(path: Path) -> list[str]:
    """`tests.folder.module.name` of all that a file imports from tests, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            names += [".".join((*above, *filter(None, (node.module, alias.name)))) for alias in node.names]
    return [name for name in names if name.split(".")[0] == "tests"]


def test_no_function_is_longer_than_seventy_lines() -> None:
    functions = [
        (path.relative_to(ROOT), node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 5_000
    assert [(str(path), name, lines) for path, name, lines in functions if lines > MAX_FUNCTION_LINES] == []


# Names that say nothing of what they name. `what` is a field of REQUEST and QUERY, and may stay.
EMPTY_NAMES = {"one", "found", "held", "met", "told", "again", "know_nothing", "them", "those", "whom"}
# Commands (`queues again`, `queues found`: the verb) and a client's argument: users write these.
PUBLIC_NAMES = {
    "cli/queues.py": {"again", "found"},
    "client/application.py": {"again"},
    "client/blocking_application.py": {"again"},
}
# In queues `found` is what is done to a chain, `Held` the state that a replica has, `Told` what a core says.
QUEUES = {"found", "held", "told"}


def test_names_say_what_they_name() -> None:
    source = ROOT / "src" / "postroad"
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        allowed = PUBLIC_NAMES.get(str(place), set()) | (QUEUES if place.parts[0] == "queues" else set())
        given = {name.strip("_") for name in names_given(ast.parse(path.read_text()))}
        assert given & EMPTY_NAMES <= allowed, place


def names_given(tree: ast.AST) -> set[str]:
    """What a file calls its variables, arguments, attributes, functions and classes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
    return names


def test_the_search_for_names_sees_all_kinds() -> None:
    text = (
        "import a as b\ndef c(d, *e):\n f.g = [h for h in i]\n"
        "class j:\n k: int = 1\nmatch l:\n case [m, *n]:\n  pass"
    )
    assert names_given(ast.parse(text)) == set("bcdeghjkmn")
