"""What all viewers share, and what each has of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from nicegui import app, background_tasks, ui

from postroad.errors import PostroadError, UsageError
from postroad.page.core.model import Model
from postroad.page.core.picture import Places
from postroad.page.core.reading import shown, text
from postroad.page.door import Door, can_be_dialled
from postroad.page.operators import Operator, Operators, Spot
from postroad.page.poller import Poller
from postroad.page.searches import Searches

REFRESH_S: Final = 0.5  # how often a viewer looks whether the poller has heard something
MAX_VIEWERS: Final = 200
MAX_TRACES: Final = 4  # at a time: a trace asks many brokers, and anybody who sees the page may ask
MAX_THEMES: Final = 1_000  # browsers whose choice of light and dark is remembered


@dataclass(slots=True)
class Site:
    door: Door
    model: Model
    poller: Poller
    operators: Operators
    searches: Searches
    tails: int = 0  # that run
    tracing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TRACES))
    places: Places = field(default_factory=Places)
    themes: dict[str, bool | None] = field(default_factory=dict)  # by browser: dark, light, or as the system

    def remember_theme(self, visitor: str, dark: bool | None) -> None:
        self.themes.pop(visitor, None)
        self.themes[visitor] = dark
        while len(self.themes) > MAX_THEMES:
            del self.themes[next(iter(self.themes))]


class Viewer:
    """One open page."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.model = site.model
        self.client = ui.context.client
        self.visitor = str(app.storage.browser["id"])
        self._wanted: frozenset[str] = frozenset({"status"})
        self._refresh: Callable[[], None] = lambda: None
        self._left: Callable[[], None] = lambda: None
        self._revision = -1
        self._always: list[Callable[[], None]] = []  # of the frame around the view
        self._signed_in = self.operator is not None
        self.client.on_connect(self._come)
        self.client.on_disconnect(lambda: site.poller.leave(self.client.id))
        self.client.on_delete(self._leave)
        ui.timer(REFRESH_S, self._look)

    # ---- what is shown

    def show(self, refresh: Callable[[], None], *wanted: str) -> None:
        """The view that is open now: how it is refreshed, and what it needs beside the status."""
        self._leave()
        self._refresh = refresh
        self.need(*wanted)
        refresh()

    def need(self, *wanted: str) -> None:
        """What is to be asked for from now on, beside the status."""
        self._wanted = frozenset({"status", *wanted})
        if self.client.has_socket_connection:
            self._come()

    def when_left(self, then: Callable[[], None]) -> None:
        """When another view is opened, or the page is gone."""
        self._left = then

    def _leave(self) -> None:
        left, self._left = self._left, lambda: None
        left()

    def always(self, refresh: Callable[[], None]) -> None:
        self._always.append(refresh)

    def look_away(self, *, hidden: bool) -> None:
        """A tab behind others is not looked at."""
        if hidden:
            self.site.poller.leave(self.client.id)
        else:
            self._come()

    def _come(self) -> None:
        if self.site.poller.viewers < MAX_VIEWERS:
            self.site.poller.look(self.client.id, self._wanted)

    def _look(self) -> None:
        signed_in = self.operator is not None
        if self._revision != self.model.revision or self._signed_in != signed_in:
            self._revision, self._signed_in = self.model.revision, signed_in
            self.refresh()

    def refresh(self) -> None:
        for refresh in (*self._always, self._refresh):
            refresh()

    # ---- what is done

    @property
    def operator(self) -> Operator | None:
        return self.site.operators.get(self.visitor)

    def spot_of(self, broker: str) -> Spot:
        """Where to do something that only this broker can do."""
        known = self.model.brokers.get(broker)
        number = "" if known is None else text(known.status, "number")
        if known is None or not number:
            raise UsageError(f"{broker} is not known any more")
        address = text(known.status, "address")
        return Spot(broker, number, address if can_be_dialled(address) else "")

    def act(self, work: Callable[[Operator], Awaitable[str]]) -> None:
        """Do something as the operator; the viewer is told what came of it."""
        background_tasks.create(self._act(work), context=self.client.content)

    async def _act(self, work: Callable[[Operator], Awaitable[str]]) -> None:
        operator = self.operator
        if operator is None:
            self.tell("Sign in first: only operators change anything", good=False)
            return
        try:
            outcome = await work(operator)
        except (PostroadError, TimeoutError, OSError) as error:
            self.tell(str(error) or "the broker did not answer in time", good=False)
        else:
            self.tell(outcome)
        self.site.poller.hurry()

    def tell(self, what: str, *, good: bool = True) -> None:
        options: dict[str, Any] = {"position": "bottom", "close_button": "Close", "timeout": 6_000}
        with self.client.content:
            ui.notify(shown(what, 300), classes="pr-good" if good else "pr-bad", **options)
