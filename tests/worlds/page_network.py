"""A network of five brokers with traffic of every kind, and a page in front of it, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.worlds.processes import SOURCE, STOP_S, BrokerProcess, Brokers

import postroad

OPERATOR, VIEWER, PAGE, LINKS = "ops-token", "viewer-token", "page-token", "links-token"
LINKED = {"b1": (), "b2": ("b1",), "b3": ("b2", "b1"), "b4": ("b3",), "b5": ("b4", "b1")}
HOSTILE = "<img src=x onerror=window.harmed=1>{{window.harmed=1}}`${window.harmed=1}`"
OUTPUT = Path(__file__).parents[2] / "build" / "page"  # screenshots, for people
RATE = 20  # events a second of each publisher


def configuration(folder: Path) -> Path:
    def principal(name: str, token: str) -> str:
        return f'{name} = "{hashlib.sha256(token.encode()).hexdigest()}"\n'

    def administers(name: str) -> str:
        return f'[[auth.rules]]\nprincipal = "{name}"\nallow = true\naction = "admin"\n'

    file = folder / "broker.toml"
    file.write_text(
        f'[durable]\nkeep = "1 h"\n[auth]\nanonymous = true\nlink_token = "{LINKS}"\n[auth.tokens]\n'
        + principal("ops", OPERATOR)
        + principal("viewer", VIEWER)
        + principal("page", PAGE)
        + administers("ops")
        + administers("page")
    )
    return file


class Command:
    """A `postroad` command that prints `ready NAME ADDRESS`."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.log = folder / f"{arguments[0]}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postroad", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(SOURCE)} | (environment or {}),
            )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["ready"], self.log.read_text()
        self.address = words[2]

    def end(self) -> int:
        self.process.terminate()
        code = self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class PageNetwork:
    def __init__(self, folder: Path) -> None:
        self.brokers = Brokers(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._traffic: Future[None] | None = None
        self.publishing = True  # while a test does not want silence
        config = str(configuration(folder))
        self.node = Command(folder, "bdn", "--listen", "127.0.0.1:0")
        self.by_name: dict[str, BrokerProcess] = {}
        for name, links in LINKED.items():
            addresses = [self.by_name[link].address for link in links]
            extra = ("--config", config, "--bdn", self.node.address)
            self.by_name[name] = self.brokers.start(name, *addresses, extra=extra)
        token = folder / "page.token"
        token.write_text(PAGE + "\n")
        self.page = Command(
            folder,
            *("page", "--listen", "127.0.0.1:0", "--broker", self.by_name["b3"].address),
            *("--token-file", str(token), "--bdn", self.node.address),
            environment={"XDG_STATE_HOME": str(folder / "state")},
        )
        self.url = f"http://{self.page.address}"

    def address(self, name: str) -> str:
        return self.by_name[name].address

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
        """Do something with clients, in the thread of the traffic."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def begin_traffic(self) -> None:
        ready = threading.Event()
        self._traffic = asyncio.run_coroutine_threadsafe(_traffic(self, ready.set), self._loop)
        while not ready.wait(0.1):
            if self._traffic.done():
                self._traffic.result()

    def end(self) -> None:
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()
        page_code = self.page.end()
        self.node.end()
        self.brokers.end()
        assert page_code == 0, self.page.log.read_text()
        assert not re.search("Traceback|Error", self.page.log.read_text()), self.page.log.read_text()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.asynccontextmanager
async def operating(network: PageNetwork, broker: str) -> AsyncIterator[postroad.Client]:
    async with postroad.connect(network.address(broker), name="ops-tool", token=OPERATOR) as client:
        yield client


async def _traffic(network: PageNetwork, ready: Callable[[], None]) -> None:
    """Prices from every broker to every broker, durable orders, best effort, and a queue."""
    async with contextlib.AsyncExitStack() as stack:

        async def client(broker: str, name: str, **options: Any) -> postroad.Client:
            connected = postroad.connect(network.address(broker), name=name, **options)
            return await stack.enter_async_context(connected)

        tasks = []
        publishers = []
        for name in LINKED:
            reader = await client(name, f"{name}-reader")
            tasks.append(_drain(await reader.subscribe("prices/#")))
            publishers.append(await client(name, f"{name}-writer"))
        shop = await client("b2", "shop", token=OPERATOR)
        for durable, where in (("audit", "n > 3"), ("billing", ""), ("temporary", "")):
            events = await shop.subscribe("orders/#", where, durable=durable)
            if durable == "audit":
                tasks.append(_drain(events))
            else:
                await events.close()  # nobody reads it: it falls behind
        for number in range(3):
            await shop.application("shop").send("inventory", f"reserve {number}", kind="transactional")
        tasks.append(_drain(await shop.subscribe("effort/#", repair=True)))
        tasks.append(_publish(network, publishers))
        gathered = asyncio.gather(*tasks)
        ready()
        try:
            await gathered
        finally:
            gathered.cancel()


async def _publish(network: PageNetwork, publishers: list[postroad.Client]) -> None:
    number = 0
    while True:
        await asyncio.sleep(1 / RATE)
        if not network.publishing:
            continue
        number += 1
        for at, publisher in enumerate(publishers, 1):
            with contextlib.suppress(postroad.PostroadError):  # one test kills a broker
                await publisher.publish(f"prices/{at}", f"price {number}", {"n": number % 10})
        with contextlib.suppress(postroad.PostroadError):
            await publishers[3].publish("orders/eu", "an order", {"n": number % 10}, mode="durable")
            await publishers[3].publish("effort/x", "a sample", {"n": number}, mode="best-effort")


async def _drain(events: Any) -> None:
    async for _ in events:
        pass
