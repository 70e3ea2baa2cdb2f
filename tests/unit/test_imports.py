"""The seam: cores decide, drivers touch the world. A core imports nothing that does I/O or tells time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "postroad"
FORBIDDEN = {
    *("asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "selectors", "signal", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uvloop"),
}
CORES = [
    *("errors.py", "units.py", "ids.py", "clocks.py", "delays.py", "seam", "events", "selectors", "wire"),
    *("links", "overlay", "streams", "clients", "durable", "tracking", "history", "broker"),
    *(f"client/{name}.py" for name in ("core", "effects", "inbox", "outbox", "settings", "streams")),
]
DRIVERS = {"net", "sim", "cli", "storage", "bench"}


def core_files() -> list[Path]:
    files: list[Path] = []
    for name in CORES:
        path = SOURCE / name
        files += sorted(path.glob("**/*.py")) if path.is_dir() else [path]
    return files


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_cores_are_pure(path: Path) -> None:
    modules = imported(path)
    assert not {module.split(".")[0] for module in modules} & FORBIDDEN
    rooms = {module.split(".")[1] for module in modules if module.startswith("postroad.")}
    assert not rooms & DRIVERS
