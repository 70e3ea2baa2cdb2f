"""Publish: send a test message as the operator, and see who gets it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from nicegui import ui

from postroad.client.aio import Client
from postroad.errors import UsageError
from postroad.page.operators import Operator
from postroad.page.site import Viewer
from postroad.page.views.trace import Trail

ABOUT = "Sends one message with the rights of the operator, then traces it."
MODES: Final = {"plain": "plain", "durable": "durable", "best-effort": "best effort"}
MAX_PAYLOAD: Final = 64 << 10
LOOKS_S: Final = (0.3, 1.0, 2.0, 4.0)  # when its path is asked for: it takes a while to be known


def build(viewer: Viewer) -> None:
    async def publish(operator: Operator) -> str:
        client_work = _publishing(
            str(topic.value or ""), str(payload.value or ""), str(attributes.value or ""), str(mode.value)
        )
        identity: str = await operator.act(client_work)
        said.set_text(identity)
        known = -1
        for pause_s in LOOKS_S:
            await asyncio.sleep(pause_s)
            whole = await trail.ask(identity)
            if whole and trail.receivers == known:
                break  # as it was the last time
            known = trail.receivers
        count = trail.receivers
        return f"Published; {count or 'nobody'} got it" if count != 1 else "Published; one subscriber got it"

    ui.label("Publish").classes("pr-title").props("role=heading aria-level=1")
    ui.label(ABOUT).classes("pr-note")
    with ui.element("section").classes("pr-panel"):
        with ui.element("div").classes("pr-bar"):
            topic = ui.input("Topic", value="test/page").props("outlined dense")
            attributes = ui.input("Attributes, as JSON", placeholder='{"price": 120}')
            attributes.props("outlined dense").classes("pr-mono")
            mode = ui.select(MODES, value="plain", label="Mode").props("outlined dense options-dense")
        payload = (
            ui.textarea("Payload", value="hello")
            .props("outlined dense autogrow")
            .classes("pr-mono pr-payload")
        )
        with ui.element("div").classes("pr-bar"):
            button = ui.button("Publish", on_click=lambda: viewer.act(publish))
            hint = ui.label().classes("pr-note")
            said = ui.label().classes("pr-mono")
    with ui.element("section").classes("pr-panel"):
        trail = Trail(viewer)

    def refresh() -> None:
        signed_in = viewer.operator is not None
        button.set_enabled(signed_in)
        hint.set_text("" if signed_in else "Sign in to publish.")
        trail.refresh()

    viewer.show(refresh)


def _publishing(topic: str, payload: str, attributes: str, mode: str) -> Any:
    try:
        given = json.loads(attributes) if attributes.strip() else {}
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError('attributes are a JSON object such as {"price": 120}')
    if len(payload) > MAX_PAYLOAD:
        raise UsageError(f"a test message has up to {MAX_PAYLOAD:,} characters")

    async def publish(client: Client) -> str:
        receipt = await client.publish(topic, payload, given, mode=mode)
        await client.flush()
        return str(receipt.id)

    return publish
