"""Names and what they stand for, a line each."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui


class Facts:
    def __init__(self) -> None:
        self._box = ui.element("dl").classes("pr-facts")
        self._labels: dict[str, ui.label] = {}

    def show(self, facts: Sequence[tuple[str, str]]) -> None:
        if list(self._labels) != [name for name, _ in facts]:
            self._box.clear()
            self._labels = {}
            with self._box:
                for name, _ in facts:
                    with ui.element("div"):
                        with ui.element("dt"):
                            ui.label(name)
                        with ui.element("dd"):
                            self._labels[name] = ui.label()
        for name, value in facts:
            self._labels[name].set_text(value)
