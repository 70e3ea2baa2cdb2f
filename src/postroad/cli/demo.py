"""`postroad demo`: a local network of brokers with live traffic, gone without a trace when it ends.

The brokers are real `postroad up` processes in a temporary folder, linked in a ring with a chord across it.
Each has one publisher, of prices in its region, and one subscriber, who asks for dear things from anywhere.
Now and then one of the messages is traced.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postroad.cli.page import GET_IT
from postroad.errors import UnavailableError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from postroad.client.aio import Client
    from postroad.client.subscription import Subscription
    from postroad.ids import MessageId
    from postroad.tracking.query.verdict import TraceResult

READY_S: Final = 30.0
STOP_S: Final = 5.0
RATE: Final = 200  # events a second of each publisher
TURNS: Final = 20  # a second: each publishes RATE / TURNS events
DEAR: Final = 75
CONDITION: Final = f"price > {DEAR}"
TRACE_S: Final = 2.0  # between two traces
ARRIVED_S: Final = 1.0  # a message this old has arrived wherever it goes
REGIONS: Final = ("eu", "us", "asia", "africa", "oceania")
LATENCIES: Final = 2000  # of the last deliveries, for the median


@dataclass(slots=True)
class Station:
    """One broker of the demo and its two clients."""

    name: str
    links: tuple[str, ...]  # names of the brokers it dials
    address: str = ""
    process: asyncio.subprocess.Process | None = None
    published: int = 0
    received: int = 0
    gaps: int = 0
    dear: MessageId | None = None  # the last message of its publisher that all readers want
    latencies_us: deque[int] = field(default_factory=lambda: deque(maxlen=LATENCIES))

    @property
    def median_us(self) -> int:
        return sorted(self.latencies_us)[len(self.latencies_us) // 2] if self.latencies_us else 0


@dataclass(slots=True)
class Traced:
    """The last message whose path was asked for."""

    result: TraceResult | None = None

    @property
    def text(self) -> str:
        from postroad.tracking.query.render import tree

        return "" if self.result is None else tree(self.result)


@dataclass(slots=True)
class Site:
    """The page of the demo."""

    wanted: bool
    process: asyncio.subprocess.Process | None = None
    says: str = ""  # where it is, or why there is none


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    brokers: Annotated[int, typer.Option(min=1, max=50, help="How many.")] = 5,
    seconds: Annotated[float | None, typer.Option(min=0, help="Until Ctrl-C unless given.")] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve the page, and open it where there is a desktop.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="No live view; a summary as JSON at the end.")
    ] = False,
) -> None:
    """Run a local network of brokers with live traffic."""
    import uvloop

    stations, traced = plan(brokers), Traced()
    site = Site(wanted=page and not as_json)
    elapsed_s = uvloop.run(_demo(stations, traced, site, seconds, live=not as_json))
    summary = _summary(stations, traced, elapsed_s)
    if as_json:
        print(json.dumps(summary))
    else:
        if traced.result is not None:
            print(traced.text)
        print(
            f"{summary['published']:,} events published, {summary['received']:,} delivered, "
            f"{summary['gaps']} gaps; all brokers are stopped"
        )


def plan(count: int) -> list[Station]:
    """A ring, and a chord from its middle to its first."""
    stations = []
    for number in range(1, count + 1):
        links = [number - 1] if number > 1 else []
        if count > 2 and number == count:
            links.append(1)
        if count > 3 and number == count // 2 + 1:
            links.append(1)
        stations.append(Station(name=f"b{number}", links=tuple(f"b{link}" for link in links)))
    return stations


def _summary(stations: list[Station], traced: Traced, elapsed_s: float) -> dict[str, Any]:
    return {
        "brokers": [
            {
                "broker": station.name,
                "address": station.address,
                "links": list(station.links),
                "published": station.published,
                "received": station.received,
                "latency_ms": round(station.median_us / 1000, 3),
            }
            for station in stations
        ],
        "published": sum(station.published for station in stations),
        "received": sum(station.received for station in stations),
        "gaps": sum(station.gaps for station in stations),
        "seconds": round(elapsed_s, 1),
        "trace": None if traced.result is None else traced.result.to_json(),
    }


# --- the network


async def _demo(
    stations: list[Station], traced: Traced, site: Site, seconds: float | None, *, live: bool
) -> float:
    """Run it; for how many seconds there was traffic. Ctrl-C is how it is meant to end."""
    task = asyncio.current_task()
    if task is not None:  # being terminated ends the brokers too
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="postroad-demo-") as folder:
        try:
            await _start(stations, Path(folder), live=live)
            await _serve_page(site, stations, Path(folder))
            started = time.monotonic()
            with contextlib.suppress(asyncio.CancelledError):
                await _traffic(stations, traced, site, seconds, live=live)
            return time.monotonic() - started
        finally:
            processes = [site.process, *(station.process for station in stations)]
            await _stop([process for process in processes if process is not None])


async def _start(stations: list[Station], folder: Path, *, live: bool) -> None:
    """One after the other, since each links to brokers whose ports it must know."""
    from rich.console import Console

    by_name = {station.name: station for station in stations}
    with Console(stderr=True).status("starting brokers") if live else contextlib.nullcontext():
        for station in stations:
            links = [by_name[name].address for name in station.links]
            station.process = await _spawn(station.name, folder, links)
            station.address = await _ready(station, folder)


async def _spawn(name: str, folder: Path, links: list[str]) -> asyncio.subprocess.Process:
    arguments = ["--name", name, "--listen", "127.0.0.1:0", "--data", str(folder / name), "--metrics", "off"]
    for link in links:
        arguments += ["--link", link]
    with (folder / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "postroad", "up", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            # Ctrl-C goes to the whole foreground group; the brokers are to be stopped by us, in order.
            start_new_session=True,
        )


async def _ready(station: Station, folder: Path) -> str:
    process = station.process
    if process is None or process.stdout is None:
        raise UnavailableError(f"broker {station.name} was not started")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            words = (await process.stdout.readline()).decode().split()
            if words[:1] == ["ready"]:
                return words[2]
    log = (folder / f"{station.name}.log").read_text(errors="replace").strip().splitlines()
    raise UnavailableError(f"broker {station.name} did not start: {log[-1] if log else 'it said nothing'}")


async def _serve_page(site: Site, stations: list[Station], folder: Path) -> None:
    """The page of this network; without the extra `page` the demo does without, and says how to get it."""
    if not site.wanted:
        return
    if importlib.util.find_spec("nicegui") is None:
        site.says = GET_IT
        return
    addresses = ",".join(station.address for station in stations)
    arguments = ["--listen", "127.0.0.1:0", "--broker", addresses, "--open"]
    with (folder / "page.log").open("wb") as log:
        site.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "postroad", "page", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    site.says = "the page is starting"


async def _await_page(site: Site) -> None:
    """It takes a while to start; the traffic does not wait for it."""
    if site.process is None or site.process.stdout is None:
        return
    words = (await site.process.stdout.readline()).decode().split()
    site.says = f"The page: http://{words[2]}/" if words[:1] == ["ready"] else "the page did not start"


async def _stop(running: list[asyncio.subprocess.Process]) -> None:
    for end in ("terminate", "kill"):
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    getattr(process, end)()
        waits = [asyncio.ensure_future(process.wait()) for process in running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=STOP_S)
            for wait in late:
                wait.cancel()
            if not late:
                return


# --- the traffic


async def _traffic(
    stations: list[Station], traced: Traced, site: Site, seconds: float | None, *, live: bool
) -> None:
    from postroad.client.aio import connect

    async with contextlib.AsyncExitStack() as stack:
        work = []
        publishers = []
        for station in stations:
            subscriber = await stack.enter_async_context(
                connect(station.address, name=f"{station.name}-reader")
            )
            events = await stack.enter_async_context(subscriber.subscribe("prices/#", CONDITION))
            work.append(_receive(station, events))
        for number, station in enumerate(stations):
            publisher = await stack.enter_async_context(
                connect(station.address, name=f"{station.name}-writer")
            )
            work.append(_publish(station, publisher, REGIONS[number % len(REGIONS)], number))
            publishers.append(publisher)
        work.append(_trace(stations, publishers, traced))
        work.append(_await_page(site))
        if live:
            work.append(_show(stations, traced, site))
        tasks = [asyncio.ensure_future(job) for job in work]
        try:
            async with _patience(seconds):
                await asyncio.gather(*tasks)
            if traced.result is None:  # it was a short one
                await _trace_one(stations[0], publishers[-1], traced)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _patience(seconds: float | None) -> AsyncIterator[None]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


async def _publish(station: Station, client: Client, region: str, number: int) -> None:
    loop = asyncio.get_running_loop()
    due, price = loop.time(), number
    while True:
        for _ in range(RATE // TURNS):
            price = (price * 37 + 11) % 101  # wanders over 0..100 and never settles
            receipt = await client.publish(
                f"prices/{region}",
                f"{station.name} offers at {price}",
                attributes={"price": price, "sent_us": time.time_ns() // 1000},
            )
            station.published += 1
            if price > DEAR:
                station.dear = receipt.id
        due += 1 / TURNS
        await asyncio.sleep(max(0.0, due - loop.time()))


async def _trace(stations: list[Station], clients: list[Client], traced: Traced) -> None:
    """A message of each broker in turn."""
    for number in itertools.count():
        await asyncio.sleep(TRACE_S - ARRIVED_S)
        await _trace_one(stations[number % len(stations)], clients[(number + 1) % len(clients)], traced)


async def _trace_one(station: Station, client: Client, traced: Traced) -> None:
    """Asked for at another broker: any of them can tell."""
    message = station.dear
    await asyncio.sleep(ARRIVED_S)
    if message is not None:
        with contextlib.suppress(UnavailableError):
            traced.result = await client.trace(message)


async def _receive(station: Station, events: Subscription) -> None:
    from postroad.events import Gap

    async for event in events:
        if isinstance(event, Gap):
            station.gaps += 1
            continue
        station.received += 1
        sent_us = event.attributes.get("sent_us")
        if isinstance(sent_us, int):
            station.latencies_us.append(max(0, time.time_ns() // 1000 - sent_us))


# --- the view


async def _show(stations: list[Station], traced: Traced, site: Site) -> None:
    from rich.live import Live

    rates = [_Rates(station) for station in stations]
    with Live(_view(stations, rates, traced, site), refresh_per_second=4, transient=True) as live:
        while True:
            await asyncio.sleep(0.5)
            for rate in rates:
                rate.measure(time.monotonic())
            live.update(_view(stations, rates, traced, site))


class _Rates:
    """Events a second since the last look."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._at = time.monotonic()
        self._seen = (station.published, station.received)
        self.published = 0.0
        self.received = 0.0

    def measure(self, now: float) -> None:
        seen = (self._station.published, self._station.received)
        passed = max(1e-3, now - self._at)
        self.published = (seen[0] - self._seen[0]) / passed
        self.received = (seen[1] - self._seen[1]) / passed
        self._at, self._seen = now, seen


def _view(stations: list[Station], rates: list[_Rates], traced: Traced, site: Site) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{len(stations)} brokers; readers ask for prices/# where {CONDITION}",
        title_justify="left",
    )
    table.add_column("broker")
    table.add_column("address")
    table.add_column("links")
    for title in ("published/s", "delivered/s", "delivered", "median ms", "gaps"):
        table.add_column(title, justify="right")
    neighbours = _neighbours(stations)
    for station, rate in zip(stations, rates, strict=True):
        table.add_row(
            station.name,
            station.address,
            " ".join(neighbours[station.name]),
            f"{rate.published:,.0f}",
            f"{rate.received:,.0f}",
            f"{station.received:,}",
            f"{station.median_us / 1000:.2f}",
            str(station.gaps),
        )
    hint = "Ctrl-C ends it. Try: postroad sub 'prices/#' --broker ADDRESS"
    return Group(table, Text(site.says), Text(hint, style="dim"), Text(traced.text))


def _neighbours(stations: list[Station]) -> dict[str, list[str]]:
    neighbours: dict[str, list[str]] = {station.name: [] for station in stations}
    for station in stations:
        for link in station.links:
            neighbours[station.name].append(link)
            neighbours[link].append(station.name)
    return {name: sorted(links) for name, links in neighbours.items()}
