"""What is around every view: the name, the ways to the views, who is signed in, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nicegui import ui

from postroad.errors import PostroadError
from postroad.page.core.figures import duration, per_second
from postroad.page.core.reading import shown
from postroad.page.site import Site, Viewer
from postroad.page.views import clients, discovery, network, publish, queues, repair, subscriptions, trace

View = Callable[[Viewer], None]
VIEWS: Final[dict[str, tuple[str, View]]] = {
    "/": ("Network", network.build),
    "/trace": ("Trace", trace.build),
    "/subscriptions": ("Subscriptions", subscriptions.build),
    "/queues": ("Queues", queues.build),
    "/repair": ("Repair", repair.build),
    "/discovery": ("Discovery", discovery.build),
    "/clients": ("Clients", clients.build),
    "/publish": ("Publish", publish.build),
}
THEMES: Final[dict[bool | None, tuple[str, str]]] = {
    None: ("brightness_auto", "as the system"),
    False: ("light_mode", "light"),
    True: ("dark_mode", "dark"),
}


def build(site: Site) -> None:
    """One open page. It is built once; the views in it change."""
    viewer = Viewer(site)
    ui.colors(primary="#1f5fbf")
    ui.page_title("Postroad")
    with ui.header(elevated=False).classes("pr-header"):
        ui.link("Skip to content", "#content").classes("pr-skip")
        with ui.element("div").classes("pr-top"):
            with ui.element("div").classes("pr-brand"):
                ui.label("Postroad").classes("pr-name")
                summary = ui.label().classes("pr-summary")
            with ui.element("div").classes("pr-tools"):
                _theme(viewer)
                _sign_in(viewer)
        links = _navigation()
    ui.on("hidden", lambda event: viewer.look_away(hidden=bool(event.args)))
    trouble = ui.label().classes("pr-trouble")
    trouble.props["role"] = "alert"

    def refresh() -> None:
        summary.set_text(_summary(viewer))
        text = _trouble(viewer)
        trouble.set_text(text)
        trouble.set_visibility(bool(text))

    viewer.always(refresh)
    refresh()

    def shower(path: str, view: View) -> Callable[[], None]:
        def show() -> None:
            for to, link in links.items():
                if to == path:
                    link.props["aria-current"] = "page"
                else:
                    link.props.pop("aria-current", None)
            ui.page_title(f"{VIEWS[path][0]} · Postroad")
            view(viewer)
            if viewer.client.has_socket_connection:  # who came by keyboard goes on in the new view
                ui.run_javascript("document.getElementById('content').focus({preventScroll: true})")

        return show

    with ui.element("div").classes("pr-content").props("id=content tabindex=-1"):
        ui.sub_pages({path: shower(path, view) for path, (_, view) in VIEWS.items()})


def _navigation() -> dict[str, ui.link]:
    with ui.element("nav").classes("pr-nav").props("aria-label=Views"):
        return {path: ui.link(title, path) for path, (title, _) in VIEWS.items()}


def _summary(viewer: Viewer) -> str:
    model = viewer.model
    if model.heard_s is None:
        return "no broker answers" if model.trouble else "asking the network …"
    published = model.totals["published"].last
    brokers = len(model.up)
    return f"{brokers} broker{'' if brokers == 1 else 's'} · {per_second(published)} published"


def _trouble(viewer: Viewer) -> str:
    """One line, in words; "" if all is well."""
    model = viewer.model
    if model.trouble:
        if model.heard_s is None:
            return f"No broker answers at {viewer.site.door.broker}: {model.trouble}. Trying again."
        age = duration(viewer.site.poller.now_s() - model.heard_s)
        return f"No broker answers: {model.trouble}. What you see is {age} old. Trying again."
    silent = sorted(broker.name for broker in model.brokers.values() if broker.state == "silent")
    if silent:
        names = ", ".join(shown(name, 40) for name in silent[:5]) + (" and others" if len(silent) > 5 else "")
        return f"{names} {'does' if len(silent) == 1 else 'do'} not answer."
    return ""


def _theme(viewer: Viewer) -> None:
    dark = ui.dark_mode(viewer.site.themes.get(viewer.visitor))
    button = ui.button(color=None).props("flat round dense")

    def name() -> None:
        icon, words = THEMES[dark.value]
        button.props["icon"] = icon
        button.props["aria-label"] = f"Colours: {words}. Change"

    def change() -> None:
        order = list(THEMES)
        dark.value = order[(order.index(dark.value) + 1) % len(order)]
        viewer.site.remember_theme(viewer.visitor, dark.value)
        name()

    button.on_click(change)
    name()


def _sign_in(viewer: Viewer) -> None:
    with ui.dialog() as dialog, ui.card().classes("pr-dialog"):
        dialog.props["aria-label"] = "Sign in"
        ui.label("Sign in as an operator").classes("pr-title")
        ui.label(
            "With a token of the broker's. Its rights are what the broker gives it; the page keeps it in"
            " memory for an hour, and nowhere else. Leave it empty where brokers ask for none."
        )
        token = ui.input("Token", password=True).props("outlined autofocus autocomplete=off")
        problem = ui.label().classes("pr-problem")
        problem.props["role"] = "alert"
        with ui.element("div").classes("pr-buttons"):
            ui.button("Cancel", on_click=dialog.close).props("flat")
            go = ui.button("Sign in")
    who = ui.label().classes("pr-who")
    button = ui.button(color=None).props("outline dense").classes("pr-sign")

    async def sign_in() -> None:
        problem.set_text("")
        go.disable()
        try:
            await viewer.site.operators.sign_in(viewer.visitor, str(token.value or ""))
        except (PostroadError, TimeoutError, OSError) as error:
            problem.set_text(shown(str(error) or "the broker did not answer", 300))
        else:
            dialog.close()
            viewer.refresh()
        finally:
            token.value = ""
            go.enable()

    async def pressed() -> None:
        if viewer.operator is None:
            dialog.open()
        else:
            await viewer.site.operators.sign_out(viewer.visitor)
            viewer.refresh()

    def refresh() -> None:
        operator = viewer.operator
        who.set_text("" if operator is None else f"Operator: {shown(operator.principal, 40)}")
        button.set_text("Sign in" if operator is None else "Sign out")

    go.on_click(sign_in)
    token.on("keydown.enter", sign_in)
    button.on_click(pressed)
    viewer.always(refresh)
    refresh()
