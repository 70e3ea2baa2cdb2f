"""The terminal of `postroad top`, made with Textual."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from postroad.cli.top import Source
from postroad.cli.top_rows import VIEWS, Look, Row, in_order, tables
from postroad.errors import PostroadError

LOOK_S: Final = 10.0  # a look takes no longer
Cells = DataTable[Text]


class Top(App[None]):
    """Looks every `interval` seconds."""

    TITLE = "postroad top"
    CSS = (
        "Screen { overflow: hidden; } Static#state { height: 1; padding: 0 1; }"
        " TabbedContent { height: 1fr; } DataTable { height: 1fr; }"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{view}')", view, show=True)
            for number, view in enumerate(VIEWS, start=1)
        ),
        Binding("s", "sort", "sort by next column"),
        Binding("r", "turn", "turn order"),
        Binding("p", "pause", "pause"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, source: Source, interval: float) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._order = dict.fromkeys(VIEWS, (0, False))  # column, backwards
        self._rows: dict[str, list[Row]] = {view: [] for view in VIEWS}
        self._before: Look | None = None
        self._paused = False

    def compose(self) -> ComposeResult:
        yield Static("asking ...", id="state")
        with TabbedContent(id="views"):
            for view in VIEWS:
                with TabPane(view, id=view):
                    yield DataTable(id=f"table-{view}", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        for view in VIEWS:
            self._draw(view)
        self.run_worker(self._keep_looking(), exclusive=True)

    async def _keep_looking(self) -> None:
        async with self._source:
            while True:
                if not self._paused:
                    await self._look()
                await asyncio.sleep(self._interval)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                look = await self._source.look()
        except (PostroadError, TimeoutError) as error:
            self._say(f"nobody answers, shown is what was last known: {error or 'no answer'}", "bold red")
            return
        self._rows = tables(look, self._before)
        self._before = look
        for view in VIEWS:
            self._draw(view)
        silent = f"; no answer from {', '.join(look.silent)}" if look.silent else ""
        self._say(f"{len(look.status)} brokers answer{silent}", "bold yellow" if silent else "green")

    def _say(self, text: str, style: str) -> None:
        self.query_one("#state", Static).update(Text(text, style))

    def _draw(self, view: str) -> None:
        """Texts of others are shown as they are, never as markup."""
        table: Cells = self.query_one(f"#table-{view}", DataTable)
        at = table.cursor_row
        column, backwards = self._order[view]
        table.clear(columns=True)
        for number, name in enumerate(VIEWS[view]):
            mark = (" v" if backwards else " ^") if number == column else ""
            table.add_column(f"{name}{mark}", key=name)
        for row in in_order(self._rows[view], column, backwards=backwards):
            table.add_row(*map(_cell, row))
        if self._rows[view]:
            table.move_cursor(row=min(at, len(self._rows[view]) - 1))

    @property
    def view(self) -> str:
        return self.query_one(TabbedContent).active

    def action_show(self, view: str) -> None:
        self.query_one(TabbedContent).active = view
        self.query_one(f"#table-{view}", DataTable).focus()

    def action_sort(self) -> None:
        column, backwards = self._order[self.view]
        self._order[self.view] = ((column + 1) % len(VIEWS[self.view]), backwards)
        self._draw(self.view)

    def action_turn(self) -> None:
        column, backwards = self._order[self.view]
        self._order[self.view] = (column, not backwards)
        self._draw(self.view)

    def action_pause(self) -> None:
        self._paused = not self._paused
        if self._paused:
            self._say("paused: p goes on", "bold")


def _cell(value: str | float) -> Text:
    return Text(str(value), justify="left" if isinstance(value, str) else "right")
