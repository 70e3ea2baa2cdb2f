"""The network as a drawing that can be worked with by mouse, finger and keyboard, and be read out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui.element import Element


class Topology(Element, component="topology.js"):
    def __init__(self, caption: str, *, empty: str, on_open: Callable[[str], Any]) -> None:
        super().__init__()
        self._props["caption"] = caption
        self._props["empty"] = empty
        self._props["nodes"] = []
        self._props["edges"] = []
        self._props["selected"] = ""
        self.on("open", lambda event: on_open(str(event.args)))

    def show(
        self, nodes: Sequence[dict[str, Any]], edges: Sequence[dict[str, Any]], *, selected: str = ""
    ) -> None:
        for name, value in (("nodes", list(nodes)), ("edges", list(edges)), ("selected", selected)):
            if self._props[name] != value:
                self._props[name] = value
