"""Trace: the path of a message over the topology, with what is doubtful about it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from nicegui import ui

from postroad.errors import PostroadError
from postroad.page.core import picture, tables
from postroad.page.core.reading import shown
from postroad.page.parts.grid import Grid
from postroad.page.parts.topology import Topology
from postroad.page.site import Viewer
from postroad.page.tail import Tail

ABOUT = "Paste the id of a message, or pick one from the live tail."


PATIENCE_S: Final = 15.0


class Trail:
    """A drawn path and its two tables."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._trail: dict[str, Any] = {}
        self._said = ui.label("No message is traced yet.").classes("pr-subtitle")
        self._said.props["role"] = "status"
        self._drawing = Topology(
            "The path of the message", empty="No broker has answered yet.", on_open=lambda _: None
        )
        with ui.element("div").classes("pr-pair"):
            self._route = Grid("Route", tables.ROUTE_COLUMNS, empty="No route is known.", titled=True)
            self._receivers = Grid(
                "Receivers", tables.RECEIVER_COLUMNS, empty="No receiver is known.", titled=True
            )

    async def ask(self, message: str) -> bool:
        """Trace this id; whether the path is known whole."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._viewer.site.tracing:
                client = await self._viewer.site.poller.client()
                result = await client.trace(message.strip())
        except (PostroadError, TimeoutError, OSError) as error:
            self._trail = {}
            self._said.set_text(shown(str(error) or "the broker does not answer", 300))
            self.refresh()
            return False
        self._trail = result.to_json()
        self._said.set_text(tables.verdict(self._trail))
        self.refresh()
        return result.verdict == "complete"

    @property
    def receivers(self) -> int:
        return len(self._trail.get("receivers", ()))

    def refresh(self) -> None:
        model, site = self._viewer.model, self._viewer.site
        edges = picture.traced(picture.edges(model), self._trail) if self._trail else picture.edges(model)
        nodes = picture.visited(
            picture.nodes(model, site.places.find(model.brokers, model.links)), self._trail
        )
        self._drawing.show(nodes, edges)
        self._route.show(tables.route(self._trail))
        self._receivers.show(tables.receivers(self._trail))


def build(viewer: Viewer) -> None:
    tail = Tail(viewer.site)

    async def trace() -> None:
        await trail.ask(str(message.value or ""))

    async def pick(key: str) -> None:
        message.value = key
        await trail.ask(key)
        ui.run_javascript("window.scrollTo({top: 0})")  # the path is above the tail

    def toggle() -> None:
        if tail.running:
            tail.stop()
        else:
            tail.start(str(topic.value or ""), str(where.value or ""), viewer.operator)
        refresh()

    ui.label("Trace").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        with ui.element("div").classes("pr-bar"):
            message = ui.input("Id of a message").props("outlined dense clearable").classes("pr-mono")
            message.on("keydown.enter", trace)
            ui.button("Trace", on_click=trace)
        trail = Trail(viewer)
    with ui.element("section").classes("pr-panel"):
        with ui.element("div").classes("pr-bar"):
            topic = ui.input("Topic of the tail", value="#").props("outlined dense")
            where = ui.input("Condition").props("outlined dense").classes("pr-mono")
            button = ui.button("Start tail", on_click=toggle)
        said = ui.label().classes("pr-note")
        said.props["role"] = "status"
        grid = Grid(
            "The last messages", tables.TAIL_COLUMNS, empty="No message yet.", titled=True, on_open=pick
        )

    def refresh() -> None:
        button.set_text("Stop tail" if tail.running else "Start tail")
        said.set_text(tail.said)
        grid.show([tables.tailed(event) for event in tail.events])
        trail.refresh()

    viewer.show(refresh)
    ui.timer(1.0, refresh)
    viewer.when_left(tail.stop)
