"""One search for a broker: the requester's side of discovery, without I/O and clock (paper 3 and 6; spec V4,
V7).

GATHERING: the request goes to the discovery nodes; to the multicast group and to the brokers of last time
where there are no nodes, or where none has said a word for `retransmit_us`. Whoever is asked sends a cookie
first, which shows it that we receive here, and shows us how far its clock is from ours. The request is
repeated while brokers are missing, then to some of those who answered, too: they spread it as a node does.
As long as nobody answers it is repeated later and later and at random times: where a crowd asks a node more
than it answers, those who were dropped must not come back all at once.

It is enough when as many have answered as the discovery node, or those who answered, say there are; or the
most that we asked for; or when a living broker would hardly have been silent for so many attempts, by the
share of them that the others answered. Without a discovery node others may be about to send their first
cookie: that is waited for as long as the slowest cookie took, which has mostly passed by the time that
responses come.

Pings go out as soon as a broker answers, while the others are waited for. PINGING: those of the target set
that were not pinged yet are. Who has not answered when the limit of "as near as the nearest" has passed is
not that near, unless its pings were lost: it is pinged again, unless its estimated delay says that it is far.
How wrong such estimates are is seen from those who answered: they share the clocks on the way.

Every search ends within `timeout_us`, with a choice or with a reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final

from postroad.clocks import ClockOffset
from postroad.discovery.envelopes import Envelopes
from postroad.discovery.policy import credential, is_proven
from postroad.discovery.selection import Candidate, choose, near_limit_us, shortlist, weigh
from postroad.discovery.settings import MAX_NODES, SearchSettings
from postroad.errors import BugError, UnavailableError
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.units import MILLISECOND_US
from postroad.wire.discovery import (
    MAX_ATTEMPTS,
    TRANSPORTS,
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
MAX_HELPERS: Final = 3  # brokers that answered, and are asked to spread the next attempts
PROMPT_ATTEMPTS: Final = 3  # while nobody answers, before attempts come later and later
SILENT_SHARE: Final = 0.01  # of living brokers, that would be silent for as long as one taken for dead
GATHER_SHARE: Final = 0.9  # of the timeout: what is left is for the pings
QUIET_US: Final = 2 * MILLISECOND_US  # at least, without news before nobody else is expected
PING_EVERY_US: Final = MILLISECOND_US // 4
GRACE_US: Final = 2 * MILLISECOND_US  # machines are busy, too
MORE_PINGS: Final = 12  # for a broker that did not answer so many as it should
SILENCE_US: Final = 150 * MILLISECOND_US  # before these, while nobody has answered a ping
DOUBT_SHARE: Final = 0.2  # of an estimated delay: clocks and paths are not what they seem
DOUBT_US: Final = 2 * MILLISECOND_US  # and that


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


@dataclass(slots=True)
class _Pings:
    """The pings to one broker."""

    answered: dict[int, bool] = field(default_factory=dict)  # when it was sent -> whether it was answered
    last_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`candidates`: the chosen one, then the rest of the target set in the order in which to try it, then
    all others that answered."""

    candidates: tuple[Candidate, ...]
    pinged: int  # of them, from the first
    phases_us: dict[str, int]  # how long each phase took
    silent_nodes: tuple[Endpoint, ...] = ()  # discovery nodes of which nothing was heard

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


class Search:
    """`nodes` are discovery nodes, `known` brokers to ask without one; `me` is not to be found; `draw(n)`
    gives a random number in 0..n-1. `token` is what requests show; without certificates only brokers are
    taken that show that they know it, or `proof_token`, if the chosen one will be shown another."""

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
        proof_token: str = "",
        me: int = 0,
    ) -> None:
        self._settings = settings
        self._group = group
        self._known = tuple(dict.fromkeys(known))[:MAX_KNOWN]
        self._draw = draw
        self._envelopes = envelopes
        self._token = token
        self._proof_token = proof_token or token
        self._me = me
        self._uuid = draw(1 << 8 * UUID_BYTES).to_bytes(UUID_BYTES, "big")
        self._contacts = {node: _Contact(True) for node in tuple(nodes)[:MAX_NODES]}
        self._group_asked = False
        self._candidates: dict[int, Candidate] = {}  # by broker
        self._answered: dict[int, set[int]] = {}  # broker -> the attempts that it answered
        self._unproven = 0  # responses that did not show that their broker knows the token
        self._expected = 0  # as discovery nodes say
        self._targets: list[Candidate] = []  # GATHERING: the first that answered
        self._pings: dict[int, _Pings] = {}  # by broker, of all that were targets
        self._nearest_us: int | None = None  # the least round trip of the targets
        self._overestimate_us = 0  # the most by which a delay was longer than half of a round trip
        self._attempt = 0
        self._asked_us: list[int] = []  # when each attempt began, at most MAX_ATTEMPTS
        self._slowest_us = 0  # of the responses, since their attempts began
        self._slowest_cookie_us = self._cookie_us = 0  # likewise of the cookies; when the last one came
        self._started_us = self._attempt_us = self._news_us = self._ticked_us = 0
        self._repeat_us = self._first_response_us = 0  # the next attempt; the first response
        self._marks: dict[str, int] = {}  # phase -> when it was over
        self._out: list[SendTo] = []
        self.stage = Stage.GATHERING
        self.result: SearchResult | None = None  # OVER: unless there is an error
        self.error: UnavailableError | None = None

    # ---- the driver's side

    def start(self, now_us: int) -> list[SendTo]:
        self._started_us = self._news_us = now_us
        if not self._contacts and self._group is None and not self._known:
            self._fail("there is nobody to ask: no discovery node, no multicast, no broker of last time")
            return []
        self._ask(now_us)
        return self._drain()

    def datagram(self, datagram: Datagram, now_us: int) -> list[SendTo]:
        """PeerError if it is malformed; what does not belong to this search is dropped."""
        if self.stage is not Stage.OVER:
            message = self._envelopes.unpack(datagram.data, now_us).message
            self._receive(message, datagram.source, now_us)
            self._tick(now_us)
        return self._drain()

    def ask_also(self, endpoint: Endpoint, now_us: int) -> list[SendTo]:
        """There may be a broker at this endpoint, too."""
        if self.stage is Stage.GATHERING and len(self._contacts) < MAX_CONTACTS:
            contact = self._contacts.setdefault(endpoint, _Contact(False))
            self._out.append(SendTo(endpoint, self._request(contact, now_us)))
        return self._drain()

    def tick(self, now_us: int) -> list[SendTo]:
        self._tick(now_us)
        return self._drain()

    def next_deadline(self) -> int | None:
        """When `tick` is due although nothing comes in."""
        if self.stage is Stage.OVER:
            return None
        due = [self._started_us + self._settings.timeout_us, *self._pings_due_us()]
        if self.stage is Stage.GATHERING:
            due.append(self._repeat_us)
            if self._candidates:
                due += [
                    self._cookies_due_us(),
                    self._responses_due_us(),
                    self._gathered_us(),
                    *self._ripe_us(),
                ]
        # What has passed without ending anything waits for something else.
        return min((due_us for due_us in due if due_us > self._ticked_us), default=self._ticked_us)

    def _tick(self, now_us: int) -> None:
        self._ticked_us = now_us
        if self.stage is Stage.OVER:
            return
        self._ping_on(now_us)
        late = now_us >= self._started_us + self._settings.timeout_us
        if self.stage is Stage.GATHERING:
            if self._enough(now_us):
                self._begin_pinging(now_us)
            elif late:
                self._fail(self._why_nobody())
            elif now_us >= self._repeat_us:
                self._ask(now_us)
        if self.stage is Stage.PINGING and (late or self._all_settled(now_us)):
            self._decide(now_us)

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
        for candidate in islice(self._candidates.values(), MAX_HELPERS):
            if len(self._contacts) < MAX_CONTACTS:
                self._contacts.setdefault(candidate.endpoint, _Contact(False))
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
        """Half to one and a half times `retransmit_us` from now; later and later while nobody answers."""
        if self._attempt >= MAX_ATTEMPTS:
            return self._started_us + self._settings.timeout_us
        wait_us = self._settings.retransmit_us
        times = 1 if self._candidates else max(1, self._attempt - PROMPT_ATTEMPTS)
        return now_us + (wait_us // 2 + self._draw(wait_us)) * times

    # ---- what comes

    def _receive(self, message: Message, source: Endpoint, now_us: int) -> None:
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
        # What is signed is of whom the authority trusts; else the token must not go to whoever answers.
        token = self._proof_token
        if token and not self._envelopes.key and not is_proven(token, message):
            self._unproven += 1
            return
        self._marks.setdefault("request", now_us)
        delay_us = now_us - message.sent_us
        known = self._candidates.get(message.broker)
        if known is not None:
            known.delay_us = min(known.delay_us, delay_us)
            if not known.round_trips_us:  # the first response may have been repeated by somebody else
                known.endpoint = source
        elif len(self._candidates) < self._settings.responses and self.stage is Stage.GATHERING:
            self._news_us = now_us
            self._first_response_us = self._first_response_us or now_us
            self._add_candidate(message, source, delay_us, now_us)
        else:
            return
        if message.attempt <= self._attempt:
            self._answered[message.broker].add(message.attempt)
            self._slowest_us = max(self._slowest_us, now_us - self._asked_us[message.attempt - 1])

    def _add_candidate(self, message: Response, source: Endpoint, delay_us: int, now_us: int) -> None:
        host, port = source
        candidate = Candidate(
            response=message,
            endpoint=source,
            address=message.address or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"),
            delay_us=delay_us,
            weight=weigh(message.usage, delay_us, self._settings.weights),
        )
        self._candidates[message.broker] = candidate
        self._answered[message.broker] = set()
        if len(self._targets) < self._settings.targets:
            self._targets.append(candidate)
            self._ping(candidate, now_us)

    # ---- enough of them

    def _enough(self, now_us: int) -> bool:
        count = len(self._candidates)
        if not count:
            return False
        if count >= self._settings.responses or now_us >= self._gathered_us():
            return True
        networks: dict[int, int] = {}
        for candidate in self._candidates.values():
            network = candidate.response.network
            networks[network] = max(networks.get(network, 1), candidate.response.members)
        if count >= max(self._expected, sum(networks.values())):
            acknowledged = any(contact.acknowledged for contact in self._contacts.values())
            due_us = self._cookies_due_us() if self._all_answered() else self._responses_due_us()
            return acknowledged or now_us >= due_us
        return self._missing_are_dead(now_us)

    def _ripe_us(self) -> list[int]:
        """When each attempt has had more time than the slowest response took."""
        wait_us = self._slowest_us + max(QUIET_US, self._slowest_us // 2)
        return [asked_us + wait_us for asked_us in self._asked_us]

    def _missing_are_dead(self, now_us: int) -> bool:
        """Whether a living broker would hardly have been silent for so many attempts. At most 16 of them, so
        it is counted anew."""
        ripe = sum(ripe_us <= now_us for ripe_us in self._ripe_us())
        answers = sum(attempt <= ripe for attempts in self._answered.values() for attempt in attempts)
        answered_share = answers / (ripe * len(self._candidates) + 1)
        return (1 - answered_share) ** ripe <= SILENT_SHARE

    def _gathered_us(self) -> int:
        """When those who have not answered are no longer waited for, and there is still time to ping."""
        settings = self._settings
        last_us = self._started_us + int(settings.timeout_us * GATHER_SHARE)
        return min(self._first_response_us + settings.gather_us, last_us)

    def _all_answered(self) -> bool:
        """Whether all who sent a cookie are brokers that have answered; a discovery node will say how many
        there are."""
        answered = {candidate.endpoint for candidate in self._candidates.values()}
        return all(endpoint in answered for endpoint, contact in self._contacts.items() if contact.cookie)

    def _cookies_due_us(self) -> int:
        """When everybody who is going to send a cookie should have."""
        return max(self._cookie_us, self._attempt_us) + max(QUIET_US, self._slowest_cookie_us)

    def _responses_due_us(self) -> int:
        """When everybody who is going to answer this attempt should have."""
        return max(self._news_us, self._attempt_us) + max(QUIET_US, self._slowest_us)

    def _why_nobody(self) -> str:
        asked = [f"{host}:{port}" for (host, port) in self._contacts]
        if self._group_asked and self._group is not None:
            asked.append(f"multicast {self._group[0]}:{self._group[1]}")
        strangers = " that knows this token" if self._unproven else ""
        return (
            f"no broker{strangers} answered within {self._settings.timeout_us / 1e6:g} s;"
            f" asked: {', '.join(asked)}."
            " Start one with `postroad up`, or name one with --broker HOST:PORT, or a discovery node with"
            " --bdn or POSTROAD_BDN"
        )

    def _fail(self, reason: str) -> None:
        self.stage = Stage.OVER
        self.error = UnavailableError(reason)

    # ---- pinging

    def _begin_pinging(self, now_us: int) -> None:
        """With the target set, most of which has been pinged already."""
        self.stage = Stage.PINGING
        self._marks["responses"] = self._marks["selection"] = now_us
        self._targets = shortlist(list(self._candidates.values()), self._settings.targets)
        trips_us = [target.round_trip_us for target in self._targets]
        self._nearest_us = min((trip_us for trip_us in trips_us if trip_us is not None), default=None)
        for target in self._targets:
            if target.response.broker not in self._pings:
                self._ping(target, now_us)

    def _ping(self, target: Candidate, now_us: int) -> None:
        pings = self._pings.setdefault(target.response.broker, _Pings())
        pings.last_us = now_us
        pings.answered.setdefault(now_us, False)
        ping = Ping(key=target.response.ping_key, sent_us=now_us)
        self._out.append(SendTo(target.endpoint, self._envelopes.pack(ping)))

    def _on_pong(self, message: Pong, now_us: int) -> None:
        for target in self._targets:
            answered = self._pings[target.response.broker].answered
            if target.response.ping_key == message.key and answered.get(message.sent_us) is False:
                answered[message.sent_us] = True
                trip_us = max(0, now_us - message.sent_us)
                target.round_trips_us.append(trip_us)
                if self._nearest_us is None or trip_us < self._nearest_us:
                    self._nearest_us = trip_us
                self._overestimate_us = max(self._overestimate_us, target.delay_us - trip_us // 2)

    def _ping_on(self, now_us: int) -> None:
        for target in self._targets:
            due_us = self._ping_due_us(target)
            if due_us is not None and now_us >= due_us:
                self._ping(target, now_us)

    def _ping_due_us(self, target: Candidate) -> int | None:
        """When it is pinged next: some times in any case, and then until as many were answered."""
        pings = self._pings[target.response.broker]
        if len(pings.answered) < self._settings.pings:
            return pings.last_us + PING_EVERY_US
        if self._is_pinged_out(target) or not self._may_be_nearest(target):
            return None
        return self._patient_until_us(pings)

    def _is_measured(self, target: Candidate) -> bool:
        return len(target.round_trips_us) >= self._settings.pings

    def _is_pinged_out(self, target: Candidate) -> bool:
        pings = self._pings[target.response.broker].answered
        return self._is_measured(target) or len(pings) >= self._settings.pings + MORE_PINGS

    def _patient_until_us(self, pings: _Pings) -> int:
        """When the last ping to a broker has told what it can."""
        nearest_us = self._nearest_us
        return pings.last_us + (SILENCE_US if nearest_us is None else near_limit_us(nearest_us) + GRACE_US)

    def _pings_due_us(self) -> list[int]:
        due: list[int] = []
        for target in self._targets:
            ping_us = self._ping_due_us(target)
            if ping_us is not None:
                due.append(ping_us)
            elif self.stage is Stage.PINGING:
                due.append(self._patient_until_us(self._pings[target.response.broker]))
        return due

    def _may_be_nearest(self, target: Candidate) -> bool:
        """Or as near as the nearest: by its pings; while they are not all answered, by its estimated delay,
        too, since a pong may have been late."""
        if self._nearest_us is None:
            return True
        trip_us = target.round_trip_us
        if not self._is_measured(target):
            delay_us = target.delay_us - self._overestimate_us
            least_us = 2 * round(delay_us * (1 - DOUBT_SHARE) - DOUBT_US)
            trip_us = least_us if trip_us is None else min(trip_us, least_us)
        return trip_us is not None and trip_us <= near_limit_us(self._nearest_us)

    def _is_settled(self, target: Candidate, now_us: int) -> bool:
        """Whether no pong of it that may still come would matter."""
        if not self._may_be_nearest(target):
            return True
        pings = self._pings[target.response.broker]
        if len(pings.answered) < self._settings.pings or not self._is_pinged_out(target):
            return False
        return all(pings.answered.values()) or now_us >= self._patient_until_us(pings)

    def _all_settled(self, now_us: int) -> bool:
        return all(self._is_settled(target, now_us) for target in self._targets)

    def _decide(self, now_us: int) -> None:
        self.stage = Stage.OVER
        ranked = choose(self._targets, self._settings.weights, self._draw)
        others = [candidate for candidate in self._candidates.values() if candidate not in ranked]
        marks = self._marks
        self.result = SearchResult(
            candidates=(*ranked, *shortlist(others, len(others))),
            pinged=len(ranked),
            silent_nodes=tuple(
                node for node, contact in self._contacts.items() if contact.is_node and not contact.cookie
            ),
            phases_us={
                "request": marks["request"] - self._started_us,
                "responses": marks["responses"] - marks["request"],
                "selection": marks["selection"] - marks["responses"],
                "ping": now_us - marks["selection"],
                "total": now_us - self._started_us,
            },
        )

    # ---- helpers

    def _drain(self) -> list[SendTo]:
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """BugError unless the collections are as their comments say."""
        if len(self._contacts) > MAX_CONTACTS or len(self._candidates) > self._settings.responses:
            raise BugError("a search has more contacts or candidates than it may")
        if self.stage is Stage.OVER and (self.result is None) == (self.error is None):
            raise BugError("a search is over with neither a choice nor a reason, or with both")
