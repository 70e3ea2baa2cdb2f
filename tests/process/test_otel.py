"""Traces of applications go on through brokers: a real collector over HTTP, which decodes what it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import cli, everywhere, linked, run
from tests.worlds.processes import Brokers, configured, wait_until

import postroad
from postroad.errors import UsageError
from postroad.net.configure import configure

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

TRACER = TracerProvider().get_tracer("test")
EVENTS = 2_000


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_arguments: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                facts: dict[str, Any] = {pair.key: pair.value.string_value for pair in span.attributes}
                facts |= {"trace": span.trace_id.hex(), "parent": span.parent_span_id.hex()}
                facts |= {"name": span.name, "service": named["service.name"]}
                facts |= {"took_ns": span.end_time_unix_nano - span.start_time_unix_nano}
                self.spans.append(facts)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


async def traced(publisher: postroad.Client, events: Any) -> tuple[str, str, str]:
    """One event within a span; the ids of the trace, the span and the message."""
    await publisher.publish("t/x", b"untraced", {"traceparent": "no such thing"})
    with TRACER.start_as_current_span("order") as span:
        receipt = await publisher.publish("t/x", b"1", postroad.otel.attributes({"price": 1}))
    await anext(events)
    event = await anext(events)
    assert event.attributes["price"] == 1
    received = trace.get_current_span(postroad.otel.context_of(event)).get_span_context()
    sent = span.get_span_context()
    assert (received.trace_id, received.span_id) == (sent.trace_id, sent.span_id)
    return f"{sent.trace_id:032x}", f"{sent.span_id:016x}", str(receipt.id)


def test_the_hops_of_an_event_are_spans_of_its_publishers_trace(brokers: Brokers) -> None:
    with collecting() as collector:
        extra = configured(brokers.folder, f'[otel]\nendpoint = "{collector.endpoint}"\n')
        first = brokers.start("b1", extra=extra)
        second = brokers.start("b2", first.address, extra=extra)
        expected: list[tuple[str, str, str]] = []

        async def scenario() -> None:
            await linked(first, second)
            async with (
                postroad.connect(first.address, name="shop") as publisher,
                postroad.connect(second.address) as reader,
                everywhere(reader, "t/#") as events,
            ):
                expected.append(await traced(publisher, events))

        run(scenario())
        wait_until(lambda: len(collector.spans) == 2, "both hops are exported")
        spans = sorted(collector.spans, key=lambda span: str(span["postroad.broker"]))
        ways = [(span["postroad.broker"], span["postroad.from"]) for span in spans]
        assert ways == [("b1", "shop"), ("b2", "b1")]
        assert [span["name"] for span in spans] == ["publish t/x", "forward t/x"]
        for span in spans:
            assert (span["trace"], span["parent"], span["messaging.message.id"]) == expected[0]
            assert span["service"] == "postroad"
            assert span["took_ns"] >= 0
        assert first.stop() == 0


def test_without_a_collector_spans_are_dropped_and_counted_and_nobody_waits(brokers: Brokers) -> None:
    nobody = configured(brokers.folder, '[otel]\nendpoint = "http://127.0.0.1:9/v1/traces"\n')
    broker = brokers.start("b1", extra=nobody)
    bearing = {"traceparent": f"00-{1:032x}-{1:016x}-01"}

    async def scenario() -> None:
        async with (
            asyncio.timeout(60),
            postroad.connect(broker.address) as client,
            client.subscribe("t/#") as events,
        ):
            await client.publish_many([("t/x", str(number), bearing) for number in range(EVENTS)])
            for number in range(EVENTS):
                event = await anext(events)
                assert isinstance(event, postroad.Event)
                assert int(event.payload) == number

    run(scenario())

    answer = json.loads(cli(broker.address, "status", "--json").stdout)["metrics"]
    assert answer["hops_told_total"] > 0
    assert answer["hops_told_total"] + answer["hops_left_out_total"] == EVENTS
    log = broker.log
    wait_until(lambda: "does not take spans: they are dropped" in log.read_text(), "the log says so")


def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Path) -> None:
    _, file = configured(tmp_path, '[otel]\nendpoint = "localhost:4318"\n')
    with pytest.raises(UsageError, match="is not a URL such as"):
        configure({}, Path(file))
