"""The page as a process: it prints `ready page ADDRESS` once it serves, and ends on SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from nicegui import app as nicegui_app
from nicegui import ui

from postroad.config import format_address, parse_address
from postroad.errors import UsageError
from postroad.net.finding import Where
from postroad.page import frame
from postroad.page.core.model import Model
from postroad.page.door import Door
from postroad.page.guard import Guard, Names
from postroad.page.operators import Operators
from postroad.page.poller import Poller
from postroad.page.searches import Searches
from postroad.page.site import Site

HERE: Final = Path(__file__).parent
RECONNECT_S: Final = 60.0  # a browser that lost its connection finds its page as it was for so long
STOP_S: Final = 2
ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<path d="M6 24 L13 9 L21 21 L26 8" fill="none" stroke="#1f5fbf" stroke-width="3"/>'
    '<circle cx="6" cy="24" r="4" fill="#1f5fbf"/><circle cx="13" cy="9" r="4" fill="#d9822b"/>'
    '<circle cx="21" cy="21" r="4" fill="#2b9a66"/><circle cx="26" cy="8" r="4" fill="#1f5fbf"/></svg>'
)


HEAD: Final = """<link rel="stylesheet" href="/style.css">
<script>document.addEventListener("visibilitychange", () => emitEvent("hidden", document.hidden));</script>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    listen: str
    door: Door
    where: Where
    names: tuple[str, ...] = ()
    open_browser: bool = False


def run_page(config: PageConfig) -> None:
    asyncio.run(_serve(config))


async def _serve(config: PageConfig) -> None:
    listener = _listen(config.listen)
    host, port = listener.getsockname()[:2]
    address = format_address(host, port)
    server = _Server(
        uvicorn.Config(
            Guard(_application(config), Names(parse_address(config.listen)[0], config.names)),
            log_level="warning",
            ws_max_size=1 << 20,
            timeout_graceful_shutdown=STOP_S,
            lifespan="on",
            server_header=False,
        ),
        address,
        open_browser=config.open_browser,
    )
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Says when it serves."""

    def __init__(self, config: uvicorn.Config, address: str, *, open_browser: bool) -> None:
        super().__init__(config)
        self._address = address
        self._open_browser = open_browser

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """To be told to stop is no failure: uvicorn would raise the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(f"ready page {self._address}\n")
            sys.stdout.flush()
        if self.started and self._open_browser and _has_desktop():
            await asyncio.to_thread(webbrowser.open, f"http://{self._address}/")


def _has_desktop() -> bool:
    """Elsewhere Python would start a browser of text, in the terminal that the command runs in."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise UsageError(f"the page cannot listen on {address}: {reason}; choose another --listen") from None
    return listener


def _ended(work: asyncio.Task[None]) -> None:
    """A page that asks no more would show what is long past: our bug ends it, and says so."""
    if not work.cancelled() and (error := work.exception()) is not None:
        asyncio.get_running_loop().call_exception_handler({"message": "the page ended", "exception": error})
        signal.raise_signal(signal.SIGTERM)


def _application(config: PageConfig) -> FastAPI:
    model = Model()
    site = Site(
        door=config.door,
        searches=Searches(config.where),
        model=model,
        poller=Poller(config.door, model),
        operators=Operators(config.door, model.addresses),
    )

    @contextlib.asynccontextmanager
    async def polling(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (site.poller.run(), site.operators.keep_expiring())]
        for task in tasks:
            task.add_done_callback(_ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await site.operators.close()

    app = FastAPI(lifespan=polling, docs_url=None, redoc_url=None, openapi_url=None)
    nicegui_app.add_static_file(local_file=HERE / "style.css", url_path="/style.css")
    ui.add_head_html(HEAD, shared=True)
    cookie: dict[str, Any] = {"session_cookie": "postroad-page", "same_site": "strict", "max_age": None}
    ui.run_with(
        app,
        root=lambda: frame.build(site),
        title="Postroad",
        favicon=ICON,
        dark=None,
        language="en-US",
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_S,
        tailwind=False,
        storage_secret=secrets.token_hex(32),
        session_middleware_kwargs=cookie,
        show_welcome_message=False,
    )
    return app
