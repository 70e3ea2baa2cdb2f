"""Repair: what best-effort subscribers lost, asked for and got again, and what caches hold."""

from __future__ import annotations

from nicegui import ui

from postroad.page.core import tables
from postroad.page.parts.facts import Facts
from postroad.page.parts.grid import Grid, too_many
from postroad.page.parts.lines import Lines
from postroad.page.site import Viewer

ABOUT = (
    "Best-effort events are datagrams. Subscribers that repair find out what they missed, and ask the "
    "publisher or each other for it. Figures are since each of them subscribed."
)


def build(viewer: Viewer) -> None:
    model = viewer.model
    ui.label("Repair").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("div").classes("pr-pair"):
        with ui.element("section").classes("pr-panel"):
            facts = Facts()
        with ui.element("section").classes("pr-panel"):
            ui.label("a second, in the whole network").classes("pr-chart")
            lines = Lines("Losses, requests and repairs a second")
    with ui.element("section").classes("pr-panel"):
        grid = Grid(
            "Subscribers that repair",
            tables.REPAIR_COLUMNS,
            empty="Nobody repairs. `postroad sub TOPIC --repair` subscribes so.",
        )
        more = ui.label().classes("pr-note")

    def refresh() -> None:
        facts.show(tables.repair_facts(model))
        lines.show({name: model.totals[name] for name in ("lost", "recovered", "requests", "repairs")})
        rows = tables.repair(model)
        grid.show(rows, loading=model.heard_s is None)
        more.set_text(too_many(rows))

    viewer.show(refresh)
