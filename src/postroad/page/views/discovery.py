"""Discovery: which broker a client on this machine would be sent to, and why."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from postroad.errors import PostroadError
from postroad.page.core import tables
from postroad.page.core.reading import number, shown, text, within
from postroad.page.parts.grid import Grid
from postroad.page.site import Viewer

ABOUT = (
    "A search from the machine that serves this page: who answered, how heavy each weighs, who was pinged. "
    "It asks discovery nodes (--bdn, POSTROAD_BDN), multicast, and the brokers of last time."
)


def build(viewer: Viewer) -> None:
    answer: dict[str, Any] = {}

    async def search() -> None:
        nonlocal answer
        button.disable()
        said.set_text("Searching …")
        try:
            answer = await viewer.site.searches.search()
        except (PostroadError, OSError) as error:
            answer = {}
            said.set_text(shown(str(error), 300))
        else:
            phases = ", ".join(
                f"{shown(name, 40)} {number(within(answer, 'phases_ms'), name):.1f} ms"
                for name in within(answer, "phases_ms")
            )
            said.set_text(
                f"Chosen: {text(answer, 'chosen')} at {text(answer, 'address')}, {text(answer, 'why')}."
                f" {phases}"
            )
        finally:
            button.enable()
            grid.show(tables.responses(answer))

    ui.label("Discovery").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        with ui.element("div").classes("pr-bar"):
            button = ui.button("Search now", on_click=search)
            said = ui.label("Nothing was searched for yet.")
            said.props["role"] = "status"
        grid = Grid("Brokers that answered", tables.RESPONSE_COLUMNS, empty="No answers.")
    with ui.element("section").classes("pr-panel"):
        ui.label("Where brokers advertise").classes("pr-subtitle").props("role=heading aria-level=2")
        nodes = Grid(
            "Discovery of each broker", tables.ADVERTISED_COLUMNS, empty="No broker has answered yet."
        )

    viewer.show(lambda: nodes.show(tables.advertised(viewer.model)))
