"""Discovery by multicast only (Pallickara et al., section 9, figure 12).

Five real broker processes, linked in a line, and real searches, all on the loopback interface of this machine
and in a multicast group of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Final

from postroad.config import parse_address
from postroad.discovery.search import SearchResult
from postroad.errors import UnavailableError
from postroad.lab.discovery_figures import draw_pairs
from postroad.lab.durable_network import Broker
from postroad.net.finding import LOOPBACK, Where, find
from postroad.units import MILLISECOND_US

SECONDS: Final = 10.0
BROKERS: Final = 5
GROUP: Final = "239.255.74.120:7320"
TRIES: Final = 100  # until all brokers are found, half a second each
MAX_SEARCHES: Final = 500
PAPER: Final = {"mean_ms": 41.3129, "deviation_ms": 6.0714, "max_ms": 71.416, "min_ms": 34.303}
NOTES: Final = (
    "The paper's brokers were machines of one laboratory; here they are processes of one machine, which share"
    " its cores with the searches.",
)

Figures = dict[str, float]


def run(seconds: float, out: Path | None, progress: Callable[[str], None]) -> tuple[Figures, Figures]:
    progress(f"starting {BROKERS} brokers")
    measured = measure(seconds, progress)
    if out is not None:
        draw_pairs(measured, PAPER, list(PAPER), "Figure 12. Discovery by multicast only", out, "figure12")
    return measured, dict(PAPER)


def measure(seconds: float, progress: Callable[[str], None], brokers: int = BROKERS) -> Figures:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        before: tuple[str, int] | None = None
        for number in range(brokers):
            broker = Broker(f"b{number}", Path(folder), before, f'[discovery]\ngroup = "{GROUP}"\n')
            broker.start()
            stack.callback(broker.end)
            broker.wait_ready()
            before = broker.address
        progress(f"searching for {seconds:.0f} s")
        return asyncio.run(_measure(seconds, brokers))


async def _measure(seconds: float, brokers: int) -> Figures:
    where = Where(interface=LOOPBACK, remember=False, group=parse_address(GROUP))
    for _ in range(TRIES):
        if len((await find(where)).candidates) == brokers:
            break
        await asyncio.sleep(0.5)
    else:
        raise UnavailableError(f"not all of {brokers} brokers were found")
    rows: list[SearchResult] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until and len(rows) < MAX_SEARCHES:
        rows.append(await find(replace(where)))
        await asyncio.sleep(0.05)
    totals = [search.phases_us["total"] / MILLISECOND_US for search in rows]
    if len(totals) < 2:
        raise UnavailableError(f"{seconds:g} s are too short for two searches")
    return {
        "mean_ms": fmean(totals),
        "median_ms": median(totals),
        "deviation_ms": stdev(totals),
        "max_ms": max(totals),
        "min_ms": min(totals),
        "searches": len(totals),
        "all_found_share": sum(len(search.candidates) == brokers for search in rows) / len(rows),
        "waiting_ms": fmean(
            (search.phases_us["request"] + search.phases_us["responses"]) / MILLISECOND_US for search in rows
        ),
        "ping_ms": fmean(search.phases_us["ping"] / MILLISECOND_US for search in rows),
    }
