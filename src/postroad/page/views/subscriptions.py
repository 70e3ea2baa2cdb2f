"""Subscriptions: how far every durable subscription is, over time; delete one, or let it read again."""

from __future__ import annotations

from datetime import UTC, datetime

from nicegui import ui

from postroad.client.aio import Client
from postroad.errors import PostroadError, UsageError
from postroad.links.access import owning
from postroad.page.core import tables
from postroad.page.core.reading import Answer, text
from postroad.page.operators import Operator
from postroad.page.parts.asking import confirm
from postroad.page.parts.grid import Grid, too_many
from postroad.page.parts.lines import Lines
from postroad.page.site import Viewer

ABOUT = (
    "Durable subscriptions of all brokers, those furthest behind first. One that keeps up is served from its "
    "broker's consolidated stream, one that comes back has a catchup stream until it has caught up."
)
NO_DRAWING = "Choose a subscription above to see how it moves."


def build(viewer: Viewer) -> None:
    model = viewer.model
    selected = ""

    def choose(key: str) -> None:
        nonlocal selected
        selected = "" if key == selected else key
        refresh()

    def act(what: str, key: str) -> None:
        listed = tables.find_subscription(model, key)
        if listed is not None and what == "Delete":
            _delete(viewer, *listed)
        elif listed is not None and what == "Replay":
            _replay(viewer, *listed)

    ui.label("Subscriptions").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        search = (
            ui.input("Search names, topics, brokers").props("outlined dense clearable").classes("pr-search")
        )
        grid = Grid(
            "Durable subscriptions",
            tables.SUBSCRIPTION_COLUMNS,
            empty="There is no durable subscription. `postroad sub TOPIC --durable NAME` makes one.",
            on_open=choose,
            on_act=act,
        )
        more = ui.label().classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        title = ui.label(NO_DRAWING).classes("pr-subtitle").props("role=heading aria-level=2")
        lines = Lines("latestDelivered and released over time", of_time=True, height_px=300)

    def refresh() -> None:
        rows = tables.matching(
            tables.subscriptions(model, acts=viewer.operator is not None), search.value or ""
        )
        grid.show(rows, selected=selected, loading="subs" not in model.answers)
        left_out = tables.left_out(model.answers.get("subs", {}), "postroad subs")
        more.set_text(too_many(rows, left_out))
        listed = tables.find_subscription(model, selected)
        title.set_text(NO_DRAWING if listed is None else f"{text(listed[1], 'name')} at {listed[0]}")
        lines.show(tables.progress(model, selected))

    search.on_value_change(refresh)
    viewer.show(refresh, "subs")


def _delete(viewer: Viewer, broker: str, row: Answer) -> None:
    name = str(row.get("name", ""))

    async def delete(operator: Operator) -> str:
        await operator.request("subs.delete", viewer.spot_of(broker), name=name)
        return f"{text(row, 'name')} is deleted"

    confirm(
        f"Delete {text(row, 'name')}?",
        "Nothing is kept for it any more. Its consumers get an error when they read on.",
        "Delete",
        lambda: viewer.act(delete),
    )


def _replay(viewer: Viewer, broker: str, row: Answer) -> None:
    """It is made anew, from then on: what a broker keeps of a subscription only ever goes forward."""
    with ui.dialog(value=True) as dialog, ui.card().classes("pr-dialog"):
        dialog.props["aria-label"] = "Replay"
        ui.label(f"Replay {text(row, 'name')}").classes("pr-subtitle")
        ui.label(
            "Its consumers get everything since this time again, as far as it is kept; what is gone is a Gap."
            " Stop them first: the subscription is made anew."
        )
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M")
        since = ui.input("Since (UTC)", value=now).props("outlined type=datetime-local")
        with ui.element("div").classes("pr-buttons"):
            ui.button("Cancel", on_click=dialog.close).props("flat")
            ui.button("Replay", on_click=lambda: go())

    def go() -> None:
        dialog.close()
        written = str(since.value or "")

        async def replay(operator: Operator) -> str:
            return await _renew(viewer, operator, broker, row, written)

        viewer.act(replay)


async def _renew(viewer: Viewer, operator: Operator, broker: str, row: Answer, written: str) -> str:
    try:
        since = datetime.fromisoformat(written).replace(tzinfo=UTC)
    except ValueError:
        raise UsageError(f"{written!r} is no time such as 2026-11-18T14:00") from None
    name, owner = str(row.get("name", "")), str(row.get("principal", ""))
    if row.get("connected"):
        raise UsageError(f"{name} is being read: stop its consumers first")
    if row.get("ack") == "token":
        raise UsageError(f"{name} keeps its own token: its consumer says where it begins")
    if owner != owning(operator.principal):  # it would belong to who makes it anew
        raise UsageError(f"{name} belongs to {owner or 'nobody in particular'}: replay it as its owner")

    async def renew(client: Client) -> None:
        await client.request("subs.delete", name=name)
        try:
            async with client.subscribe(
                str(row.get("topic", "")),
                str(row.get("where", "")),
                durable=name,
                ack=str(row.get("ack", "auto")),
                since=since,
                shared=bool(row.get("shared")),
                key=str(row.get("key", "")),
            ):
                pass
        except PostroadError as error:
            raise type(error)(f"{name} is deleted, and could not be made again: {error}") from None

    await operator.act(renew, viewer.spot_of(broker))
    return f"{text(row, 'name')} begins again at {since:%Y-%m-%d %H:%M} UTC"
