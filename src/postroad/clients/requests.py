"""Requests: what clients ask a broker, about itself and the network, and ask it to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from postroad.durable.publisher.publishing import DurablePublishing
from postroad.durable.retiring import Retiring
from postroad.durable.subscriber.subscribers import DurableHosting
from postroad.errors import DeniedError, UnavailableError, UsageError, shorten
from postroad.history.history import History
from postroad.ids import pubend_text
from postroad.links.links import Links
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.streams.routing import Routing
from postroad.tracking.tracer import Tracer
from postroad.wire.frames import Reply, Request, encode, json_within_frame

RESTATE: Final = "restate"
_ADMIN: Final = frozenset({"subs.delete", "subs.retire"})  # requests that change something


class Requests:
    """Its effects go to `out`, the broker's. `status` is that of the whole broker."""

    def __init__(
        self,
        *,
        me: int,
        topology: Topology,
        inquiries: Inquiries,
        history: History,
        links: Links,
        routing: Routing,
        durable: DurablePublishing,
        tracer: Tracer,
        retiring: Retiring,
        host: DurableHosting | None,
        status: Callable[[int], Mapping[str, object]],
        out: list[Effect],
    ) -> None:
        self._me = me
        self._topology = topology
        self._inquiries = inquiries
        self._history = history
        self._links = links
        self._routing = routing
        self._durable = durable
        self._tracer = tracer
        self._retiring = retiring
        self._host = host
        self._status = status
        self._out = out
        inquiries.serve(RESTATE, self._restate)

    def request(self, connection: int, message: Request, now_us: int) -> None:
        """An answer follows: at once, or when others have answered."""
        try:
            if message.what in _ADMIN and not self._links.may_admin(connection):
                raise DeniedError(f"{message.what} needs the right `admin` at this broker")
            if message.what == "trace":
                self._out += self._tracer.request(connection, message)
            elif message.what == "subs.retire":
                self._out += self._retiring.request(connection, message, now_us)
            elif message.what == "publisher.last":
                prefix = message.arguments.get("prefix", "")
                self._durable.ask_last_id(connection, message.number, prefix)
            elif message.what in ("subs", "subs.delete") and self._host is not None:
                self._out += self._host.desk.request(connection, message, now_us)
            else:
                reply = Reply(number=message.number, code="", body=self._body(message, now_us))
                self._out.append(Send(connection, encode(reply)))
        except (UsageError, UnavailableError) as error:
            reply = Reply(number=message.number, code=error.code, body=str(error))
            self._out.append(Send(connection, encode(reply)))

    def _body(self, message: Request, now_us: int) -> str:
        if message.what == "status":
            return json_within_frame(self._status(now_us))
        if message.what == "heads":
            known = self._routing.durable_heads().items()
            heads = {one: tick for one, tick in known if not self._retiring.gone(one >> 32)}
            away = [pubend_text(one) for one in heads if self._routing.away(one) is not None]
            return json_within_frame(
                {"heads": {pubend_text(one): tick for one, tick in heads.items()}, "away": away}
            )
        if message.what == "history.restate":
            return json_within_frame({"asked": self._restate_all(now_us)})
        raise UsageError(f"this broker cannot answer {shorten(message.what, 40)!r}")

    # ---- the network's history

    def _restate_all(self, now_us: int) -> list[str]:
        """Every broker that can be reached tells its state again; nobody waits for them."""
        self._history.restate(now_us)
        asked = [self._me]
        for other in self._topology.reachable():
            effects = None if other == self._me else self._inquiries.ask(other, RESTATE, b"", _heard)
            if effects is not None:
                self._out += effects
                asked.append(other)
        return [f"{number:08x}" for number in sorted(asked)]

    def _restate(self, broker: int, number: int, _body: bytes, now_us: int) -> list[Effect]:
        self._history.restate(now_us)
        return self._inquiries.respond(broker, number, b"")


def _heard(_body: bytes, _now_us: int) -> list[Effect]:
    return []
