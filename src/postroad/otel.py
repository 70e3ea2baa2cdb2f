"""OpenTelemetry in applications (extra `otel`): events bear the trace that they are published in.

Publish with `attributes=postroad.otel.attributes({"price": 120})`, and at the receiver continue with
`tracer.start_as_current_span("handle", context=postroad.otel.context_of(event))`. Brokers with `[otel]`
export their hops as spans of the same trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from postroad.errors import UsageError
from postroad.events import Event, Value

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_FIELDS = ("traceparent", "tracestate")


def attributes(given: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """These attributes, and those that tell of the current span, if there is one."""
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return {**carrier, **(given or {})}


def context_of(event: Event) -> Context:
    """The context of the span that the event was published in; an empty one if it bears none."""
    carried = {field: str(event.attributes[field]) for field in _FIELDS if field in event.attributes}
    return _propagator().extract(carried)


def _propagator() -> TraceContextTextMapPropagator:
    try:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ModuleNotFoundError:
        raise UsageError("postroad.otel needs OpenTelemetry: pip install 'postroad[otel]'") from None
    return TraceContextTextMapPropagator()
