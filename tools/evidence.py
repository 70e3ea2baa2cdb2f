"""Which tests show which row of the specification: those whose text names the row, such as `Q7`.

docs/reference/evidence.md keeps what only people know: what a row is, commands, figures, words. Behind the
mark in a row, `make reference` writes the tests. Whoever adds a test to a row writes the row's id into the
test's docstring.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "<!-- by id -->"
_ROW = re.compile(rf"^\| ([A-Z]\d+) \| (.*?)\s*{MARK}.*\|$", re.MULTILINE)
_ID = re.compile(r"\b[TDQVBP]\d{1,2}\b")


def cited() -> dict[str, list[str]]:
    """Tests by the ids in their docstrings."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for row in sorted(set(_ID.findall(ast.get_docstring(node) or ""))):
                    found[row].append(f"`{path.relative_to(ROOT)}::{node.name}`")
    return found


def render(text: str) -> str:
    """The page with the tests of today."""
    tests = cited()

    def row(match: re.Match[str]) -> str:
        known = match[2]
        listed = [test for test in tests.get(match[1], []) if test not in known]
        return f"| {match[1]} | {known} {MARK} {', '.join(listed)} |".replace("  |", " |")

    return _ROW.sub(row, text)
