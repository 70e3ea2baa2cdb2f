"""One network, one page and one browser for all tests of a file; a browser window of its own for each.

The browser is of a file, and no longer: while it is driven, no other test of the process has an event loop.

A test fails if its window had an error in the console, or asked any other host for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.worlds.page_network import PageNetwork

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-default-apps", "--disable-sync", "--no-first-run", "--metrics-recording-only"),
)
OFFLINE = "net::ERR_INTERNET_DISCONNECTED"  # where a test wanted it so
PATIENCE_MS = 30_000

Window = Callable[..., Page]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageNetwork]:
    started = PageNetwork(tmp_path_factory.mktemp("page"))
    try:
        started.begin_traffic()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def window(network: PageNetwork, browser: Browser) -> Iterator[Window]:
    """`window(path, width=1400, theme="light")` opens the page."""
    contexts = []
    wrong: list[str] = []

    def opened(path: str = "/", *, width: int = 1400, height: int = 900, theme: str = "light") -> Page:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=theme)  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda message: note(message.type, message.text))
        page.on("request", lambda request: asked(request.url))
        page.goto(network.url + path)
        return page

    def note(kind: str, text: str) -> None:
        if kind in ("error", "warning") and OFFLINE not in text:
            wrong.append(f"{kind}: {text}")

    def asked(url: str) -> None:
        if not url.startswith((network.url, network.url.replace("http", "ws"), "data:", "blob:")):
            wrong.append(f"asked for {url}")

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
