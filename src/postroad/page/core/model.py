"""What is known of the network: the last answer of every broker, rates, and lines over time.

A broker is known by the name under which its answer comes. One that does not answer stays in the picture,
with what it said last, until it has been silent for FORGET_S: whoever looks for what broke wants to see it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from postroad.page.core.figures import Counters, Line, Share
from postroad.page.core.reading import MOST, Answer, number, rows, shown, text, within

FORGET_S: Final = 600.0
MAX_BROKERS: Final = 500
MAX_LINKS: Final = 5_000
MAX_WATCHED: Final = 2_000  # lines of subscriptions; then the one looked at longest ago is forgotten
MAX_CLIENTS: Final = 20_000  # whose rates are kept

State = Literal["up", "silent", "refused"]
RATES: Final = {  # what is drawn of a broker over time, and the counter it grows with
    "published": "events_in_total",
    "delivered": "deliveries_total",
    "forwarded": "events_forwarded_total",
    "bytes": "bytes_in_total",
    "lost": "repair_losses_detected",
    "recovered": "repair_recovered",
    "requests": "repair_requests",
    "repairs": "repair_repairs_sent",
}


@dataclass(slots=True)
class Broker:
    name: str
    status: Answer = field(default_factory=dict)  # the last that it answered
    state: State = "up"
    why: str = ""  # it refused
    heard_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    lines: dict[str, Line] = field(default_factory=lambda: {name: Line() for name in (*RATES, "load")})

    @property
    def metrics(self) -> Answer:
        return within(self.status, "metrics")

    @property
    def load(self) -> float | None:
        """Of one core, by this process."""
        usage = within(within(self.status, "discovery"), "usage")
        if "process_cpu_share" in usage:
            return number(usage, "process_cpu_share")
        return number(usage, "cpu_share") if "cpu_share" in usage else None

    def rate(self, name: str) -> float | None:
        return self.counters.rate(RATES[name]) if self.state == "up" else None


@dataclass(slots=True)
class Link:
    """Between two brokers, in the order of their names. Traffic is by direction: to the first, the second."""

    ends: tuple[str, str]
    up: bool = True
    heard_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    shares: tuple[Share, Share] = field(default_factory=lambda: (Share(), Share()))
    rows: dict[str, Answer] = field(default_factory=dict)  # what each end says of it

    @property
    def traffic(self) -> float | None:
        """Bytes a second, both ways; None where neither end counts them."""
        rates = [rate for end in self.ends if (rate := self.counters.rate(end)) is not None]
        return sum(rates) if rates and self.up else None

    @property
    def lost(self) -> float | None:
        """The worse of both directions, of best-effort events."""
        lost = [share.lost for share in self.shares if share.lost is not None]
        return max(lost) if lost and self.up else None

    @property
    def round_trip_ms(self) -> float | None:
        trips = [number(row, "rtt_ms") for row in self.rows.values() if row.get("rtt_ms") is not None]
        return min(trips) if trips else None


class Model:
    """One for all viewers. `revision` grows with everything that is taken in."""

    def __init__(self) -> None:
        self.revision = 0
        self.brokers: dict[str, Broker] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.asked = ""  # the broker that the page is connected to
        self.heard_s: float | None = None  # the last answer of any
        self.trouble = ""  # why there is no answer now
        self.answers: dict[str, dict[str, Answer]] = {}  # what -> broker -> the last answer to it
        self.queues: Answer = {}
        self.client_rates: OrderedDict[tuple[str, str], Counters] = OrderedDict()
        self.watched: OrderedDict[tuple[str, str, str], Line] = OrderedDict()
        self.totals: dict[str, Line] = {name: Line() for name in RATES}

    # ---- taking in

    def take(self, what: str, answer: Answer, asked: str, now_s: float) -> None:
        """What the request `network` answered."""
        self.revision += 1
        self.asked, self.heard_s, self.trouble = asked, now_s, ""
        answers = {shown(name): of for name, of in within(answer, "answers").items() if _is_answer(of)}
        self.answers[what] = dict(list(answers.items())[:MAX_BROKERS])
        if what == "status":
            silent = [shown(name) for name in answer.get("silent", []) if isinstance(name, str)]
            refused = {shown(name): str(why) for name, why in within(answer, "refused").items()}
            self._take_status(self.answers[what], silent, refused, now_s)
        elif what == "subs":
            self._watch(now_s)
        elif what == "clients":
            self._take_clients(now_s)

    def take_queues(self, answer: Answer) -> None:
        self.revision += 1
        self.queues = answer

    def fail(self, why: str, now_s: float) -> None:
        """No broker answers the page."""
        self.revision += 1
        self.trouble = shown(why)
        for broker in self.brokers.values():
            broker.state = "silent"
            self._draw(broker, now_s)
        for link in self.links.values():
            link.up = False

    def _take_status(
        self, answers: Mapping[str, Answer], silent: list[str], refused: Mapping[str, str], now_s: float
    ) -> None:
        for name, status in answers.items():
            broker = self.brokers.setdefault(name, Broker(name))
            broker.status, broker.state, broker.why, broker.heard_s = status, "up", "", now_s
            broker.counters.take(now_s, {key: number(broker.metrics, key) for key in broker.metrics})
        for name in (*silent, *refused):
            self.brokers.setdefault(name, Broker(name, heard_s=now_s))
        for name, broker in list(self.brokers.items()):
            if name not in answers:
                broker.state, broker.why = (
                    ("refused", shown(refused[name])) if name in refused else ("silent", "")
                )
            if now_s - broker.heard_s > FORGET_S or len(self.brokers) > MAX_BROKERS:
                del self.brokers[name]
                continue
            self._draw(broker, now_s)
        for total, line in self.totals.items():
            rates = [rate for broker in self.brokers.values() if (rate := broker.rate(total)) is not None]
            line.add(now_s, sum(rates) if rates else None)
        self._take_links(now_s)

    def _draw(self, broker: Broker, now_s: float) -> None:
        for name in RATES:
            broker.lines[name].add(now_s, broker.rate(name))
        broker.lines["load"].add(now_s, broker.load if broker.state == "up" else None)

    def _take_links(self, now_s: float) -> None:
        """Of those that answered. A link is up where both ends answer, and one says so."""
        names = {text(b.status, "number"): name for name, b in self.brokers.items()}
        for name, broker in self.brokers.items():
            if broker.state != "up":
                continue
            for row in rows(broker.status, "links"):
                other = names.get(text(row, "number")) or text(row, "broker")
                ends = (min(name, other), max(name, other))
                if other and (ends in self.links or len(self.links) < MAX_LINKS):
                    link = self.links.setdefault(ends, Link(ends))
                    link.rows[name], link.heard_s = row, now_s
        for ends, link in list(self.links.items()):
            both = [self.brokers[end] for end in ends if end in self.brokers]
            link.rows = {
                each.name: link.rows[each.name]
                for each in both
                if link.rows.get(each.name) in rows(each.status, "links")
            }
            states = [each.state for each in both]
            link.up = link.heard_s == now_s and states == ["up", "up"]
            if now_s - link.heard_s > FORGET_S or len(states) < 2:
                del self.links[ends]
                continue
            self._count(link, now_s)

    def _count(self, link: Link, now_s: float) -> None:
        if not link.up:
            return
        counted = {end: number(row, "bytes_in") for end, row in link.rows.items() if "bytes_in" in row}
        link.counters.take(now_s, counted)
        for at, sender in enumerate(link.ends):
            receiver = link.ends[1 - at]
            sent = _effort(self.brokers[sender].status, self.brokers[receiver].status, "sent")
            received = _effort(self.brokers[receiver].status, self.brokers[sender].status, "received")
            if sent is not None and received is not None:
                link.shares[at].take(now_s, sent, received)

    def _watch(self, now_s: float) -> None:
        """The lines of the paper's figures: released, of a subscription, and latestDelivered, of its broker's
        consolidated stream; both for every pubend, in seconds. Tick 0 is before all events, and no time."""
        for name, answer in self.answers["subs"].items():
            for stream in rows(answer, "constreams"):
                key = (name, "", text(stream, "pubend"))
                if latest := number(stream, "latest_delivered"):
                    self._watched(key).add(now_s, latest / 1e6)
            for row in rows(answer, "subscriptions"):
                for pubend, tick in within(row, "released").items():
                    if isinstance(tick, int) and 0 < tick <= MOST:
                        self._watched((name, text(row, "name"), shown(pubend))).add(now_s, tick / 1e6)

    def _watched(self, key: tuple[str, str, str]) -> Line:
        line = self.watched.pop(key, None) or Line()
        self.watched[key] = line
        while len(self.watched) > MAX_WATCHED:
            self.watched.popitem(last=False)
        return line

    def _take_clients(self, now_s: float) -> None:
        for name, answer in self.answers["clients"].items():
            delivered: dict[str, float] = {}
            for row in rows(within(self.answers.get("status", {}), name), "subscriptions"):
                connection = str(row.get("connection"))
                delivered[connection] = delivered.get(connection, 0.0) + number(row, "delivered")
            for row in rows(answer, "clients"):
                connection = str(row.get("connection"))
                counters = self.client_rates.pop((name, connection), None) or Counters()
                counters.take(
                    now_s,
                    {"bytes_in": number(row, "bytes_in"), "delivered": delivered.get(connection, 0.0)},
                )
                self.client_rates[name, connection] = counters
        while len(self.client_rates) > MAX_CLIENTS:
            self.client_rates.popitem(last=False)

    # ---- asking

    @property
    def up(self) -> list[Broker]:
        return [broker for broker in self.brokers.values() if broker.state == "up"]

    def pubend_name(self, pubend: str) -> str:
        """By the broker that it is at."""
        number_, _, rest = pubend.partition("-")
        for broker in self.brokers.values():
            if text(broker.status, "number") == number_:
                return broker.name if not rest.strip("0") else f"{broker.name}-{rest}"
        return pubend

    def addresses(self) -> list[str]:
        """Where brokers say that they listen."""
        return [address for broker in self.brokers.values() if (address := text(broker.status, "address"))]


def _is_answer(value: Any) -> bool:
    return isinstance(value, Mapping)


def _effort(of: Answer, to: Answer, way: str) -> float | None:
    """How many best-effort events a broker counted with a neighbour."""
    for row in rows(of, "best_effort_links"):
        if text(row, "number") == text(to, "number"):
            return number(row, way)
    return None
