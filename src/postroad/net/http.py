"""Metrics and health over HTTP: GET /metrics, /health, /ready, nothing else.

A few dozen lines instead of a web framework: one request per connection, its head bounded in bytes and
time. /health answers while the process lives, /ready while it serves (503 before and while it stops).

Where there are MAX_REQUESTS connections, the oldest makes room for the newest: a scraper sends its request
and reads the answer at once, so whoever is there for long is not one.

Metric names ending in _total are counters, delays are histograms, all others gauges; each gets the prefix
`postroad_`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from postroad.delays import BOUNDS_US, Delays
from postroad.net.metric_texts import ABOUT
from postroad.seam.levels import Level
from postroad.units import SECOND_US

MAX_HEAD_BYTES: Final = 8192
REQUEST_S: Final = 5.0
MAX_REQUESTS: Final = 64  # at a time
FRESH_S: Final = 0.25  # for which the same figures are given to everybody: making them takes milliseconds
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Figures(Collector):
    def __init__(
        self,
        figures: Callable[[], dict[str, int | float]],
        delays: Callable[[], list[Delays]],
        levels: Callable[[], list[Level]],
        about: dict[str, str],
    ) -> None:
        self._figures = figures
        self._delays = delays
        self._levels = levels
        self._about = about

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("postroad_broker", "Who this broker is.", value=self._about)
        for name, value in sorted(self._figures().items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"postroad_{name}", ABOUT.get(name, ""), value=value)
        histograms: dict[str, HistogramMetricFamily] = {}
        for histogram in self._delays():
            if histogram.name not in histograms:
                histograms[histogram.name] = HistogramMetricFamily(
                    f"postroad_{histogram.name}", histogram.about, labels=list(histogram.labels)
                )
            histograms[histogram.name].add_metric(
                list(histogram.labels.values()),
                buckets=_buckets(histogram),
                sum_value=histogram.total_us / SECOND_US,
            )
        yield from histograms.values()
        gauges: dict[str, GaugeMetricFamily] = {}
        for level in self._levels():
            if level.name not in gauges:
                gauges[level.name] = GaugeMetricFamily(
                    f"postroad_{level.name}", level.about, labels=list(level.labels)
                )
            gauges[level.name].add_metric(list(level.labels.values()), level.value)
        yield from gauges.values()


def _buckets(delays: Delays) -> list[tuple[str, float]]:
    bounds = [f"{bound / SECOND_US:g}" for bound in BOUNDS_US] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(delays.counts)), strict=True))


class HttpServer:
    """`figures` is called for a scrape, unless the last one was just before; `ready` for every /ready."""

    def __init__(
        self,
        *,
        figures: Callable[[], dict[str, int | float]],
        delays: Callable[[], list[Delays]],
        levels: Callable[[], list[Level]],
        ready: Callable[[], bool],
        about: dict[str, str],
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Figures(figures, delays, levels, about))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._ready = ready
        self._rendered, self._rendered_until_s = b"", 0.0
        self._open: dict[asyncio.StreamWriter, None] = {}  # not answered yet, oldest first
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_REQUESTS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # nobody to answer, or nothing that deserves one
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _response(405, "only GET\n", body=True)
        wants_body = words[0] == b"GET"
        path = words[1].split(b"?", 1)[0]
        if path == b"/metrics":
            return _response(200, self._render(), kind=METRICS_TYPE, body=wants_body)
        if path == b"/health":
            return _response(200, "alive\n", body=wants_body)
        if path == b"/ready":
            ready = self._ready()
            return _response(200 if ready else 503, "ready\n" if ready else "not ready\n", body=wants_body)
        return _response(404, "try /metrics, /health or /ready\n", body=wants_body)

    def _render(self) -> bytes:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._rendered_until_s:
            self._rendered = generate_latest(self._registry)
            self._rendered_until_s = now_s + FRESH_S
        return self._rendered


_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def _response(
    status: int, content: str | bytes, *, body: bool, kind: str = "text/plain; charset=utf-8"
) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (data if body else b"")
