"""Queues: what waits in every inbox, who answers for it, and its dead letters."""

from __future__ import annotations

from nicegui import ui

from postroad.page.core import tables
from postroad.page.core.reading import Answer, shown, texts
from postroad.page.operators import Operator
from postroad.page.parts.asking import confirm
from postroad.page.parts.grid import Grid, too_many
from postroad.page.site import Viewer

ABOUT = "The inboxes of the whole network, the fullest first. Operators choose one to read its dead letters."


def build(viewer: Viewer) -> None:
    model = viewer.model
    selected = ""

    def choose(inbox: str) -> None:
        nonlocal selected
        selected = "" if inbox == selected else inbox
        letters.show([])
        if selected:
            viewer.act(read)
        refresh()

    async def read(operator: Operator) -> str:
        inbox = selected
        answer: Answer = await operator.request("queues.dead", inbox=inbox)
        rows = tables.dead_letters(answer)
        letters.show(rows)
        return f"{len(rows)} dead letter{'' if len(rows) == 1 else 's'} of {shown(inbox, 60)}"

    def act(what: str, inbox: str) -> None:
        drop = what == "Drop"

        async def revive(operator: Operator) -> str:
            arguments = {"inbox": inbox, **({"drop": "yes"} if drop else {})}
            answer = await operator.request("queues.revive", **arguments)
            letters.show([])
            outcome = "thrown away" if drop else "sent again"
            return f"{answer['count']} dead letters of {shown(inbox, 60)} {outcome}"

        if what == "Send again":
            viewer.act(revive)
        elif drop:
            confirm(
                f"Drop the dead letters of {shown(inbox, 60)}?",
                "They are thrown away for good.",
                "Drop",
                lambda: viewer.act(revive),
            )

    ui.label("Queues").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        search = ui.input("Search inboxes, brokers").props("outlined dense clearable").classes("pr-search")
        grid = Grid(
            "Inboxes",
            tables.QUEUE_COLUMNS,
            empty="There is no inbox. `postroad send APPLICATION MESSAGE --from NAME` makes one.",
            on_open=choose,
            on_act=act,
        )
        more = ui.label().classes("pr-note")
        silent = ui.label().classes("pr-note")
    with ui.element("section").classes("pr-panel") as detail:
        title = ui.label().classes("pr-subtitle").props("role=heading aria-level=2")
        letters = Grid("Dead letters", tables.DEAD_COLUMNS, empty="None was read.")

    def refresh() -> None:
        rows = tables.matching(
            tables.queues(model.queues, acts=viewer.operator is not None), search.value or ""
        )
        grid.show(rows, selected=selected, loading=not model.queues)
        left_out = tables.left_out({"the network": model.queues})
        more.set_text(too_many(rows, left_out))
        names = ", ".join(texts(model.queues, "silent"))
        silent.set_text(f"No answer from {names}." if names else "")
        detail.set_visibility(bool(selected) and viewer.operator is not None)
        title.set_text(f"Dead letters of {shown(selected, 60)}")

    search.on_value_change(refresh)
    viewer.show(refresh, "queues")
