"""Clients: who is connected where, how busy; disconnect one."""

from __future__ import annotations

from nicegui import ui

from postroad.page.core import tables
from postroad.page.operators import Operator
from postroad.page.parts.asking import confirm
from postroad.page.parts.grid import Grid, too_many
from postroad.page.site import Viewer

ABOUT = "Clients of all brokers, the busiest first. Those of others are shown to who may administer."


def build(viewer: Viewer) -> None:
    model = viewer.model

    def act(what: str, key: str) -> None:
        broker, _, connection = key.rpartition("\n")
        if what != "Disconnect":
            return

        async def kick(operator: Operator) -> str:
            await operator.request("clients.kick", viewer.spot_of(broker), connection=connection)
            return f"connection {connection} at {broker} is closed"

        confirm(
            f"Disconnect connection {connection} at {broker}?",
            "A client that is still there connects again by itself.",
            "Disconnect",
            lambda: viewer.act(kick),
        )

    ui.label("Clients").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        search = (
            ui.input("Search names, brokers, principals")
            .props("outlined dense clearable")
            .classes("pr-search")
        )
        grid = Grid("Clients", tables.CLIENT_COLUMNS, empty="No client is connected.", on_act=act)
        more = ui.label().classes("pr-note")

    def refresh() -> None:
        rows = tables.matching(tables.clients(model, acts=viewer.operator is not None), search.value or "")
        grid.show(rows, loading="clients" not in model.answers)
        left_out = tables.left_out(model.answers.get("clients", {}), "postroad clients")
        more.set_text(too_many(rows, left_out))

    search.on_value_change(refresh)
    viewer.show(refresh, "clients")
