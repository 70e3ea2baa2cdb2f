"""A question before something that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui


def confirm(title: str, explanation: str, action: str, then: Callable[[], None]) -> None:
    def go() -> None:
        dialog.close()
        then()

    with ui.dialog(value=True) as dialog, ui.card().classes("pr-dialog"):
        dialog.props["aria-label"] = title
        ui.label(title).classes("pr-subtitle")
        ui.label(explanation)
        with ui.element("div").classes("pr-buttons"):
            ui.button("Cancel", on_click=dialog.close).props("flat autofocus")
            ui.button(action, on_click=go)
