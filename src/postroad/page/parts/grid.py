"""A table that is told its rows again and again, and moves nothing that did not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from nicegui.element import Element

MAX_ROWS: Final = 200  # drawn; views say how many there are beside these


class Grid(Element, component="grid.js"):
    """`columns`: titles; those of figures end in `#`, which is not shown."""

    def __init__(
        self,
        caption: str,
        columns: Sequence[str],
        *,
        empty: str,
        titled: bool = False,
        on_open: Callable[[str], Any] | None = None,
        on_act: Callable[[str, str], Any] | None = None,
    ) -> None:
        super().__init__()
        self._props["caption"] = caption
        self._props["titled"] = titled
        self._props["columns"] = [
            {"title": title.removesuffix("#"), "number": title.endswith("#")} for title in columns
        ]
        self._props["rows"] = []
        self._props["empty"] = empty
        self._props["selectable"] = on_open is not None
        self._props["selected"] = ""
        self._props["loading"] = False
        if on_open is not None:
            self.on("open", lambda event: on_open(str(event.args)))
        if on_act is not None:
            self.on("act", lambda event: on_act(*_two(event.args)))

    def show(self, rows: Sequence[dict[str, Any]], *, selected: str = "", loading: bool = False) -> None:
        """`loading`: nothing was heard yet, which is not the same as nothing is there."""
        if self._props["loading"] != loading:
            self._props["loading"] = loading
        shown = list(rows[:MAX_ROWS])
        if self._props["selected"] != selected:
            self._props["selected"] = selected
        if self._props["rows"] != shown:
            self._props["rows"] = shown


def too_many(rows: Sequence[object], left_out: str = "") -> str:
    """What is said below a table that is cut off."""
    cut = f"The first {MAX_ROWS} of {len(rows):,}: search for others." if len(rows) > MAX_ROWS else ""
    return f"{cut} {left_out}".strip()


def _two(arguments: Any) -> tuple[str, str]:
    """What a browser sent: anything at all."""
    if isinstance(arguments, list) and len(arguments) == 2:
        return str(arguments[0]), str(arguments[1])
    return "", ""
