"""One search for a broker: the requester's side of discovery, without I/O and clock (paper 3 and 6; spec V4,
V7).

GATHERING: the request goes to the discovery nodes; to the multicast group and to the brokers of last time
where there are no nodes, or where none has said a word for `retransmit_us`. Whoever is asked sends a cookie
first, which shows it that we receive here, and shows us how far its clock is from ours. The request is
repeated after silence, later and later and at random times: where a crowd asks a node more than it answers,
those who were dropped must not come back all at once. It is enough when as many have answered as the
discovery node, or those who answered, say there are; or the most that we asked for; or when nothing new came
for a while. Without a discovery node others may be about to send their first cookie: that is waited for as
long as the slowest cookie took, which has mostly passed by the time that responses come.

PINGING: the target set is pinged, all of it at once and several times. Who has not answered when the limit of
"as near as the nearest" has passed is not that near, unless its pings were lost: those whose estimated delay
says that they could be nearer are pinged again.

Every search ends within `timeout_us`, with a choice or with a reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from postroad.clocks import ClockOffset
from postroad.discovery.envelopes import Envelopes
from postroad.discovery.policy import credential
from postroad.discovery.selection import Candidate, choose, near_limit_us, shortlist, weigh
from postroad.discovery.settings import MAX_NODES, SearchSettings
from postroad.errors import BugError, UnavailableError
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.units import MILLISECOND_US
from postroad.wire.discovery import (
    MAX_ATTEMPTS,
    UUID_BYTES,
    Acknowledge,
    Cookie,
    Message,
    Ping,
    Pong,
    Request,
    Response,
)

MAX_CONTACTS: Final = 256  # nodes and brokers that are asked by one search
MAX_KNOWN: Final = 32  # brokers of last time that are asked
PERSISTENT: Final = 3  # attempts, before those who should answer and do not are given up
GATHER_SHARE: Final = 0.9  # of the timeout: what is left is for the pings
QUIET_US: Final = 2 * MILLISECOND_US  # at least, without news before nobody else is expected
PING_EVERY_US: Final = MILLISECOND_US // 4
GRACE_US: Final = 2 * MILLISECOND_US  # machines are busy, too
MORE_ROUNDS: Final = 6  # of pings, for those who did not answer the first ones
SILENT_ROUND_US: Final = 150 * MILLISECOND_US  # between rounds while nobody has answered
DOUBT_SHARE: Final = 0.2  # of an estimated delay: clocks and paths are not what they seem
DOUBT_US: Final = 2 * MILLISECOND_US  # and that
TRANSPORTS: Final = ("tcp", "udp")


class Stage(Enum):
    GATHERING = "gathering"
    PINGING = "pinging"
    OVER = "over"


@dataclass(slots=True)
class _Contact:
    """A node or a broker that the request goes to."""

    is_node: bool
    cookie: bytes = b""
    key: bytes = b""
    clock: ClockOffset = field(default_factory=ClockOffset)
    acknowledged: int = 0  # the latest attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`candidates`: the chosen one, then the rest of the target set in the order in which to try it, then
    all others that answered."""

    candidates: tuple[Candidate, ...]
    pinged: int  # of them, from the first
    phases_us: dict[str, int]  # how long each phase took

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


class Search:
    """`nodes` are discovery nodes, `known` brokers to ask without one; `me` is not to be found; `draw(n)`
    gives a random number in 0..n-1."""

    def __init__(
        self,
        settings: SearchSettings,
        *,
        nodes: Sequence[Endpoint],
        group: Endpoint | None,
        known: Sequence[Endpoint],
        draw: Callable[[int], int],
        envelopes: Envelopes,
        token: str = "",
        me: int = 0,
    ) -> None:
        self._settings = settings
        self._group = group
        self._known = tuple(dict.fromkeys(known))[:MAX_KNOWN]
        self._draw = draw
        self._envelopes = envelopes
        self._token = token
        self._me = me
        self._uuid = draw(1 << 8 * UUID_BYTES).to_bytes(UUID_BYTES, "big")
        self._contacts = {node: _Contact(True) for node in tuple(nodes)[:MAX_NODES]}
        self._group_asked = False
        self._candidates: dict[int, Candidate] = {}  # by broker
        self._expected = 0  # as discovery nodes say
        self._targets: list[Candidate] = []
        self._pinged: dict[int, dict[int, int]] = {}  # broker -> when pings were sent, each to 1 if answered
        self._attempt = 0
        self._asked_us: list[int] = []  # when each attempt began, at most MAX_ATTEMPTS
        self._slowest_us = 0  # of the responses, since their attempts began
        self._slowest_cookie_us = self._cookie_us = 0  # likewise of the cookies; when the last one came
        self._rounds = 0  # of pings
        self._started_us = self._attempt_us = self._news_us = self._round_us = self._ticked_us = 0
        self._repeat_us = self._answered_us = 0  # the next attempt; the first response
        self._marks: dict[str, int] = {}  # phase -> when it was over
        self._out: list[SendTo] = []
        self.stage = Stage.GATHERING
        self.found: Found | None = None  # OVER: unless there is an error
        self.error: UnavailableError | None = None

    # ---- the driver's side

    def start(self, now_us: int) -> list[SendTo]:
        self._started_us = self._news_us = now_us
        if not self._contacts and self._group is None and not self._known:
            self._fail("there is nobody to ask: no discovery node, no multicast, no broker of last time")
            return []
        self._ask(now_us)
        return self._take()

    def datagram(self, datagram: Datagram, now_us: int) -> list[SendTo]:
        """PeerError if it is malformed; what does not belong to this search is dropped."""
        if self.stage is not Stage.OVER:
            message = self._envelopes.unpack(datagram.data, now_us).message
            self._heard(message, datagram.source, now_us)
            self._tick(now_us)
        return self._take()

    def also(self, endpoint: Endpoint, now_us: int) -> list[SendTo]:
        """There may be a broker, too."""
        if self.stage is Stage.GATHERING and len(self._contacts) < MAX_CONTACTS:
            contact = self._contacts.setdefault(endpoint, _Contact(False))
            self._out.append(SendTo(endpoint, self._request(contact, now_us)))
        return self._take()

    def tick(self, now_us: int) -> list[SendTo]:
        self._tick(now_us)
        return self._take()

    def next_deadline(self) -> int | None:
        """When `tick` is due although nothing comes in."""
        if self.stage is Stage.OVER:
            return None
        over_us = self._started_us + self._settings.timeout_us
        if self.stage is Stage.PINGING:
            return min(over_us, self._round_over_us())
        due = [over_us, self._repeat_us]
        if self._candidates:
            due += [self._met_us(), self._quiet_us(), self._gathered_us()]
        # What has passed without ending anything waits for something else.
        return min((one for one in due if one > self._ticked_us), default=over_us)

    def _tick(self, now_us: int) -> None:
        self._ticked_us = now_us
        if self.stage is Stage.GATHERING:
            if self._enough(now_us):
                self._begin_pinging(now_us)
            elif now_us >= self._started_us + self._settings.timeout_us:
                self._fail(self._nobody())
            elif now_us >= self._repeat_us:
                self._ask(now_us)
        elif self.stage is Stage.PINGING:
            if now_us >= self._started_us + self._settings.timeout_us:
                self._decide(now_us)
            else:
                self._ping_on(now_us)

    # ---- asking

    def _ask(self, now_us: int) -> None:
        """The next attempt."""
        self._attempt += 1
        self._attempt_us = now_us
        self._asked_us.append(now_us)
        self._repeat_us = self._next_repeat_us(now_us)
        answered = any(contact.cookie for contact in self._contacts.values())
        if not answered and (self._attempt > 1 or not self._contacts):
            for endpoint in self._known:
                if len(self._contacts) < MAX_CONTACTS:
                    self._contacts.setdefault(endpoint, _Contact(False))
            self._group_asked = self._group is not None
        if self._group_asked and self._group is not None:
            self._out.append(SendTo(self._group, self._request(_Contact(False), now_us)))
        for endpoint, contact in self._contacts.items():
            self._out.append(SendTo(endpoint, self._request(contact, now_us)))

    def _request(self, contact: _Contact, now_us: int) -> bytes:
        request = Request(
            uuid=self._uuid,
            attempt=self._attempt,
            sent_us=now_us,
            offset_us=contact.clock.offset_us,
            cookie=contact.cookie,
            credential=credential(self._token, self._uuid, contact.cookie),
            transports=TRANSPORTS,
            key=self._envelopes.key,
        )
        return self._envelopes.pack(request, contact.key)

    def _next_repeat_us(self, now_us: int) -> int:
        """Half to one and a half times `retransmit_us` from now; after some attempts later and later."""
        if self._attempt >= MAX_ATTEMPTS:
            return self._started_us + self._settings.timeout_us
        wait_us = self._settings.retransmit_us
        return now_us + (wait_us // 2 + self._draw(wait_us)) * max(1, self._attempt - PERSISTENT)

    # ---- what comes

    def _heard(self, message: Message, source: Endpoint, now_us: int) -> None:
        if isinstance(message, Pong):
            self._on_pong(message, now_us)
        elif isinstance(message, Cookie | Acknowledge | Response) and message.uuid == self._uuid:
            if isinstance(message, Cookie):
                self._on_cookie(message, source, now_us)
            elif isinstance(message, Acknowledge):
                self._on_acknowledge(message, source, now_us)
            else:
                self._on_response(message, source, now_us)

    def _on_cookie(self, message: Cookie, source: Endpoint, now_us: int) -> None:
        contact = self._contacts.get(source)
        if contact is None:
            if not self._group_asked or len(self._contacts) >= MAX_CONTACTS:
                return
            contact = self._contacts[source] = _Contact(False)
        contact.clock.measured(message.sent_us, message.time_us, now_us)
        if contact.cookie != message.cookie and self.stage is Stage.GATHERING:
            contact.cookie, contact.key = message.cookie, message.key
            self._cookie_us = now_us
            self._slowest_cookie_us = max(self._slowest_cookie_us, now_us - self._attempt_us)
            self._out.append(SendTo(source, self._request(contact, now_us)))

    def _on_acknowledge(self, message: Acknowledge, source: Endpoint, now_us: int) -> None:
        contact = self._contacts.get(source)
        if contact is not None and contact.is_node:
            contact.acknowledged = max(contact.acknowledged, message.attempt)
            self._expected = max(self._expected, message.brokers)
            self._marks.setdefault("request", now_us)

    def _on_response(self, message: Response, source: Endpoint, now_us: int) -> None:
        if message.broker == self._me:
            return
        self._marks.setdefault("request", now_us)
        delay_us = now_us - message.sent_us
        before = self._candidates.get(message.broker)
        if before is not None:
            before.delay_us = min(before.delay_us, delay_us)
        elif len(self._candidates) < self._settings.responses and self.stage is Stage.GATHERING:
            self._news_us = now_us
            self._answered_us = self._answered_us or now_us
            began_us = self._asked_us[min(message.attempt, self._attempt) - 1]
            self._slowest_us = max(self._slowest_us, now_us - began_us)
            host, port = source
            self._candidates[message.broker] = Candidate(
                response=message,
                endpoint=source,
                address=message.address or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"),
                delay_us=delay_us,
                weight=weigh(message.usage, delay_us, self._settings.weights),
            )

    # ---- enough of them

    def _enough(self, now_us: int) -> bool:
        count = len(self._candidates)
        if not count:
            return False
        if count >= self._settings.responses or now_us >= self._gathered_us():
            return True
        networks: dict[int, int] = {}
        for one in self._candidates.values():
            network = one.response.network
            networks[network] = max(networks.get(network, 1), one.response.members)
        if count >= max(self._expected, sum(networks.values())):
            acknowledged = any(contact.acknowledged for contact in self._contacts.values())
            return acknowledged or now_us >= (self._met_us() if self._all_met() else self._quiet_us())
        return self._attempt > PERSISTENT and now_us >= self._quiet_us()

    def _gathered_us(self) -> int:
        """When those who have not answered are no longer waited for, and there is still time to ping."""
        settings = self._settings
        last_us = self._started_us + int(settings.timeout_us * GATHER_SHARE)
        return min(self._answered_us + settings.gather_us, last_us)

    def _all_met(self) -> bool:
        """Whether all who sent a cookie are brokers that have answered; a discovery node will say how many
        there are."""
        answered = {one.endpoint for one in self._candidates.values()}
        return all(endpoint in answered for endpoint, contact in self._contacts.items() if contact.cookie)

    def _met_us(self) -> int:
        """When everybody who is going to send a cookie should have."""
        return max(self._cookie_us, self._attempt_us) + max(QUIET_US, self._slowest_cookie_us)

    def _quiet_us(self) -> int:
        """When everybody who is going to answer this attempt should have."""
        return max(self._news_us, self._attempt_us) + max(QUIET_US, self._slowest_us)

    def _nobody(self) -> str:
        asked = [f"{host}:{port}" for (host, port) in self._contacts]
        if self._group_asked and self._group is not None:
            asked.append(f"multicast {self._group[0]}:{self._group[1]}")
        return (
            f"no broker answered within {self._settings.timeout_us / 1e6:g} s; asked: {', '.join(asked)}."
            " Start one with `postroad up`, or name one with --broker HOST:PORT"
        )

    def _fail(self, reason: str) -> None:
        self.stage = Stage.OVER
        self.error = UnavailableError(reason)

    # ---- pinging

    def _begin_pinging(self, now_us: int) -> None:
        self._marks["responses"] = now_us
        self._targets = shortlist(list(self._candidates.values()), self._settings.targets)
        self._pinged = {one.response.broker: {} for one in self._targets}
        self.stage = Stage.PINGING
        self._marks["selection"] = now_us
        self._ping(self._targets, now_us)

    def _ping(self, targets: Sequence[Candidate], now_us: int) -> None:
        self._rounds += 1
        self._round_us = now_us
        for one in targets:
            self._pinged[one.response.broker].setdefault(now_us, 0)
            ping = Ping(key=one.response.ping_key, sent_us=now_us)
            self._out.append(SendTo(one.endpoint, self._envelopes.pack(ping)))

    def _on_pong(self, message: Pong, now_us: int) -> None:
        for one in self._targets:
            sent = self._pinged[one.response.broker]
            if one.response.ping_key == message.key and sent.get(message.sent_us) == 0:
                sent[message.sent_us] = 1
                one.round_trips_us.append(max(0, now_us - message.sent_us))

    def _best_us(self) -> int | None:
        return min((min(one.round_trips_us) for one in self._targets if one.round_trips_us), default=None)

    def _round_over_us(self) -> int:
        """When the last round of pings has told what it can."""
        best_us = self._best_us()
        if self._rounds < self._settings.pings:
            return self._round_us + PING_EVERY_US
        return self._round_us + (SILENT_ROUND_US if best_us is None else near_limit_us(best_us) + GRACE_US)

    def _ping_on(self, now_us: int) -> None:
        if self._rounds >= self._settings.pings and all(all(sent.values()) for sent in self._pinged.values()):
            self._decide(now_us)
        elif now_us >= self._round_over_us():
            if self._rounds < self._settings.pings:
                self._ping(self._targets, now_us)
                return
            silent = [one for one in self._targets if self._may_be_nearest(one)]
            if silent and self._rounds < self._settings.pings + MORE_ROUNDS:
                self._ping(silent, now_us)
            else:
                self._decide(now_us)

    def _may_be_nearest(self, one: Candidate) -> bool:
        """It has not answered a ping, and what is known of its delay does not say that it is far."""
        best_us = self._best_us()
        if one.round_trips_us:
            return False
        least_us = one.delay_us * (1 - DOUBT_SHARE) - DOUBT_US
        return best_us is None or 2 * least_us <= near_limit_us(best_us)

    def _decide(self, now_us: int) -> None:
        self.stage = Stage.OVER
        ranked = choose(self._targets, self._settings.weights, self._draw)
        others = [one for one in self._candidates.values() if one not in ranked]
        marks = self._marks
        self.found = Found(
            candidates=(*ranked, *shortlist(others, len(others))),
            pinged=len(ranked),
            phases_us={
                "request": marks["request"] - self._started_us,
                "responses": marks["responses"] - marks["request"],
                "selection": marks["selection"] - marks["responses"],
                "ping": now_us - marks["selection"],
                "total": now_us - self._started_us,
            },
        )

    # ---- helpers

    def _take(self) -> list[SendTo]:
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """BugError unless the collections are as their comments say."""
        if len(self._contacts) > MAX_CONTACTS or len(self._candidates) > self._settings.responses:
            raise BugError("a search has more contacts or candidates than it may")
        if self.stage is Stage.OVER and (self.found is None) == (self.error is None):
            raise BugError("a search is over with neither a choice nor a reason, or with both")
