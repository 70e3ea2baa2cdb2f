"""Network: the topology, live, and one broker of it more closely."""

from __future__ import annotations

from typing import Final

from nicegui import ui

from postroad.page.core import picture, tables
from postroad.page.parts.facts import Facts
from postroad.page.parts.grid import Grid
from postroad.page.parts.lines import Lines
from postroad.page.parts.topology import Topology
from postroad.page.site import Viewer

NARROW_PX: Final = 700  # where what is opened is below what can be seen


def build(viewer: Viewer) -> None:
    model, site = viewer.model, viewer.site
    selected = ""

    def open_broker(name: str) -> None:
        nonlocal selected
        selected = "" if name == selected or name not in model.brokers else name
        viewer.need(*(["clients"] if selected else []))
        refresh()
        if selected:
            ui.run_javascript(f"if (innerWidth < {NARROW_PX}) getHtmlElement({detail.id}).scrollIntoView()")

    ui.label("Network").classes("pr-title").props("role=heading aria-level=1")
    with ui.element("div").classes("pr-split"):
        with ui.element("section").classes("pr-panel pr-wide"):
            drawing = Topology(
                "Topology of the network", empty="No broker has answered yet.", on_open=open_broker
            )
            _legend()
        with ui.element("section").classes("pr-panel"):
            ui.label("events a second").classes("pr-chart")
            traffic = Lines("Events a second in the whole network")
            ui.label("load, of a core").classes("pr-chart")
            load = Lines("Load of the selected broker, or of all, as a share of a core")
    with ui.element("section").classes("pr-panel") as detail:
        title = ui.label().classes("pr-subtitle").props("role=heading aria-level=2")
        facts = Facts()
        links = Grid("Links of this broker", tables.LINK_COLUMNS, empty="It has no links.", titled=True)
        clients = Grid(
            "Clients connected here", tables.CLIENT_COLUMNS, empty="No client is connected here.", titled=True
        )
        readers = Grid(
            "Subscriptions connected here", tables.SUBSCRIBER_COLUMNS, empty="Nobody reads here.", titled=True
        )
        streams = Grid(
            "Streams that pass here", tables.STREAM_COLUMNS, empty="No stream passes here.", titled=True
        )
    with ui.element("section").classes("pr-panel"):
        grid = Grid(
            "Brokers", tables.BROKER_COLUMNS, empty="No broker has answered yet.", on_open=open_broker
        )

    def refresh() -> None:
        places = site.places.find(model.brokers, model.links)
        drawing.show(picture.nodes(model, places), picture.edges(model), selected=selected)
        grid.show(tables.brokers(model), selected=selected)
        broker = model.brokers.get(selected)
        of = model.totals if broker is None else broker.lines
        traffic.show({name: of[name] for name in ("published", "delivered", "forwarded")})
        busiest = sorted(model.brokers.values(), key=lambda each: -(each.load or 0))[:6]
        shown = sorted(busiest, key=lambda each: each.name) if broker is None else [broker]
        load.show({each.name: each.lines["load"] for each in shown})
        detail.set_visibility(broker is not None)
        if broker is not None:
            title.set_text(f"Broker {broker.name}")
            facts.show(tables.facts(broker))
            links.show(tables.links_of(model, selected))
            of_broker = tables.clients(model, acts=False, at=selected)
            clients.show(of_broker, loading="clients" not in model.answers)
            readers.show(tables.subscribers(broker.status))
            streams.show(tables.streams(broker.status, site.poller.now_s() * 1e6))

    viewer.show(refresh)


def _legend() -> None:
    with ui.element("div").classes("pr-legend"):
        for tone, words in (
            ("calm", f"load under {picture.BUSY:.0%}"),
            ("busy", f"under {picture.HOT:.0%}, or a link that loses"),
            ("hot", f"more, or a link that loses over {picture.LOSES_MUCH:.0%}"),
            ("gone", "does not answer"),
        ):
            with ui.element("span").classes("pr-key"):
                ui.element("i").classes(f"dot tone-{tone}").props("aria-hidden=true")
                ui.label(words)
