"""Exports the hops of events as spans: OTLP over HTTP, in a thread of its own, at its leisure.

The broker waits for nothing here. What waits has a bound; beyond it, and where the collector does not take
what it is sent, spans are dropped and counted. Each span is a child of the application's that published the
event.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from postroad import __version__
from postroad.errors import UsageError
from postroad.ids import MessageId
from postroad.net.log import complain
from postroad.seam.effects import Hop

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MAX_WAITING: Final = 10_000  # spans
BATCH: Final = 512
SEND_S: Final = 5  # that a collector has to answer
PAUSE_S: Final = 0.5  # so that spans gather


class SpanExporter:
    """`name` is the broker's."""

    def __init__(self, endpoint: str, name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
        except ModuleNotFoundError:
            raise UsageError("[otel] needs OpenTelemetry: pip install 'postroad[otel]'") from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what fails is counted and said here
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._success = SpanExportResult.SUCCESS
        self._endpoint = endpoint
        self._resource = Resource(
            {"service.name": "postroad", "service.instance.id": name, "service.version": __version__}
        )
        self._broker = name
        self._waiting: deque[tuple[Hop, int]] = deque()  # with the time when it was handled
        self._ended = threading.Event()
        self.exported = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="otel", daemon=True)
        self._thread.start()

    def add(self, hop: Hop, done_us: int) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
        else:
            self._waiting.append((hop, done_us))

    def metrics(self) -> dict[str, int]:
        return {
            "spans_exported_total": self.exported,
            "spans_dropped_total": self.dropped,
            "spans_waiting": len(self._waiting),
        }

    def close(self) -> None:
        """What waits is sent once more, for as long as a collector has to answer."""
        self._ended.set()
        self._thread.join(SEND_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            count = min(BATCH, len(self._waiting))
            self._send([self._waiting.popleft() for _ in range(count)])

    def _send(self, hops: Sequence[tuple[Hop, int]]) -> None:
        if self._exporter.export([self._span(hop, done_us) for hop, done_us in hops]) is self._success:
            self.exported += len(hops)
        else:
            self.dropped += len(hops)
            complain("warning", f"{self._endpoint} does not take spans: they are dropped")

    def _span(self, hop: Hop, done_us: int) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        _, trace, parent, flags = hop.traceparent.split("-")
        given = TraceFlags(int(flags, 16))
        return ReadableSpan(
            name=f"{'publish' if hop.published else 'forward'} {hop.topic}",
            context=SpanContext(
                int(trace, 16), secrets.randbits(64) or 1, is_remote=False, trace_flags=given
            ),
            parent=SpanContext(int(trace, 16), int(parent, 16), is_remote=True, trace_flags=given),
            resource=self._resource,
            attributes={
                "messaging.system": "postroad",
                "messaging.message.id": str(MessageId.from_bytes(hop.id)),
                "messaging.destination.name": hop.topic,
                "postroad.broker": self._broker,
                "postroad.from": hop.came_from,
            },
            kind=SpanKind.CONSUMER,
            start_time=hop.at_us * 1000,
            end_time=max(done_us, hop.at_us) * 1000,
            instrumentation_scope=InstrumentationScope("postroad", __version__),
        )
