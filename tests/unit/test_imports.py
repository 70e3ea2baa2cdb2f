"""Which room may import which, and that cores do no I/O and tell no time.

A room is a folder of src/postroad, or a file that stands there alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "postroad"
IMPURE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "selectors", "signal", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uvloop"),
}
VOCABULARY = {"errors", "units", "ids", "delays", "clocks"}
TRAVELS = {"kernel", "wire", "events"}  # what is in a frame
SEAM = VOCABULARY | TRAVELS | {"seam"}
# Each room, and what it may import beside itself. Rooms come after those that they import.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "ids": {"errors"},
    "delays": {"units"},
    "clocks": {"units"},
    "kernel": {"errors"},
    "wire": {"errors"},
    "events": VOCABULARY | {"kernel", "wire"},
    "seam": VOCABULARY | {"wire"},
    "selectors": VOCABULARY | TRAVELS,
    "links": SEAM,
    "overlay": SEAM | {"selectors"},
    "tracking": SEAM | {"overlay"},
    "streams": SEAM | {"selectors", "links", "overlay", "tracking"},
    "clients": SEAM | {"selectors", "links", "overlay", "tracking", "streams"},
    "besteffort": SEAM | {"selectors", "links", "overlay", "tracking", "streams", "clients"},
    "durable": SEAM | {"selectors", "links", "overlay", "tracking", "streams", "clients"},
    "ring": SEAM | {"links", "overlay"},
    "queues": SEAM | {"links", "overlay", "tracking", "ring"},
    "discovery": SEAM | {"links", "overlay"},
    "history": SEAM | {"overlay", "tracking", "durable"},
    "config": VOCABULARY
    | {"wire", "links", "tracking", "streams", "durable", "besteffort", "discovery", "queues"},
}
ROOMS = SEAM | MAY_IMPORT.keys()
MAY_IMPORT["broker"] = set(ROOMS)
# The rest touches the world. No core imports any of it.
MAY_IMPORT["storage"] = SEAM | {"tracking"}
MAY_IMPORT["net"] = ROOMS | {"broker", "storage"}
MAY_IMPORT["client"] = SEAM | {"selectors", "links", "tracking", "config", "net", "discovery"}
MAY_IMPORT["sim"] = ROOMS | {"broker", "storage", "client"}
MAY_IMPORT["spark"] = SEAM | {"selectors", "tracking", "history", "client"}
MAY_IMPORT["bench"] = SEAM | {"selectors", "tracking", "client", "spark"}
MAY_IMPORT["lab"] = ROOMS | {"storage", "sim", "bench", "net", "client"}
MAY_IMPORT["page"] = VOCABULARY | {"events", "links", "config", "net", "discovery", "client"}
MAY_IMPORT["cli"] = SEAM | {
    "tracking",
    "config",
    "discovery",
    "storage",
    "net",
    "client",
    "sim",
    "spark",
    "lab",
    "bench",
    "page",
}
MAY_IMPORT["sync"] = {"client"}
MAY_IMPORT["otel"] = {"errors", "events"}
MAY_IMPORT["__init__"] = {"errors", "ids", "events", "client", "otel", "sync"}
MAY_IMPORT["__main__"] = {"cli"}
PURE = {*ROOMS - {"config", "kernel"}, "broker"}
PURE_FILES = {
    f"client/{name}.py"
    for name in ("core", "effects", "inbox", "outbox", "places", "receiver", "sender", "settings", "streams")
}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "postroad":
            modules |= {f"postroad.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def rooms_imported(path: Path) -> set[str]:
    rooms = {module.split(".")[1] for module in imported(path) if module.startswith("postroad.")}
    return rooms - {room_of(path), "__version__"}


FILES = sorted(SOURCE.glob("**/*.py"))
PURE_FILES |= {
    str(path.relative_to(SOURCE))
    for pure in ("client/repair", "page/core")
    for path in SOURCE.glob(f"{pure}/*.py")
}
CORES = [p for p in FILES if room_of(p) in PURE or str(p.relative_to(SOURCE)) in PURE_FILES]


@pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES}))
def test_a_room_imports_only_the_rooms_that_it_may(room: str) -> None:
    for path in FILES:
        if room_of(path) == room:
            assert rooms_imported(path) <= MAY_IMPORT[room], path


def test_every_room_that_may_be_imported_comes_first() -> None:
    order = list(MAY_IMPORT)
    for at, room in enumerate(order):
        assert MAY_IMPORT[room] - {room} <= {*order[:at]}, room


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_cores_do_no_io_and_tell_no_time(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported(path)} & IMPURE
