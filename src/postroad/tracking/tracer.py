"""Tracking at one broker: what is recorded goes to the disk, and traces are asked and answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from postroad.errors import UnavailableError, UsageError, shorten
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.tracking import TrackingEffect
from postroad.seam.turn import Turn
from postroad.tracking.query.desk import TRACE, Answers, Asker, TraceDesk
from postroad.tracking.query.trace import parse_ids
from postroad.tracking.query.untracked import Untracked
from postroad.tracking.query.verdict import TraceResult, within
from postroad.tracking.settings import PUT_OFF_US
from postroad.tracking.strategies import Tracking
from postroad.units import MILLISECOND_US
from postroad.wire.frames import MAX_BODY_BYTES, Reply, Request, encode

MAX_EACH: Final = 8  # traces of one connection that are under way at once,
MAX_WAITING: Final = 64  # and further ones that wait for their turn
PACE_US: Final = 5 * MILLISECOND_US  # from one trace that begins to the next,
BURST_US: Final = MAX_EACH * PACE_US  # after a few at once;
WORK_US: Final = 1  # and for each key and the like that they looked for, a few times what that takes

Kept = Callable[[Turn, Sequence[TrackingEffect]], None]


class Tracer:
    """`tracking`: None at a broker that records nothing. `kept` hears what goes to the disk."""

    def __init__(
        self,
        board: Switchboard,
        tracking: Tracking | None,
        *,
        me: int,
        topology: Topology,
        inquiries: Inquiries,
        kept: Kept,
    ) -> None:
        self._tracking = tracking
        self._kept = kept
        self._desk = TraceDesk(
            _untracked(board) if tracking is None else _tracked(board, tracking),
            me=me,
            reachable=topology.reachable,
            names=topology.names,
            inquiries=inquiries,
            report=_report,
        )
        # By connection, whose turn is next first: request numbers, and what is to be traced.
        self._waiting: dict[int, deque[tuple[int, list[bytes]]]] = {}
        self._paced_us = 0  # the time that all traces so far take at that pace
        self._paced_work = 0  # what they looked for, as far as it is in that
        board.request(TRACE, self._request)
        board.query(TRACE, self._desk.asked)
        board.peers("client", down=self._closed)
        board.metrics(self._desk.metrics)

    # ---- traces asked for by clients

    def _request(self, _turn: Turn, peer: Peer, request: Request) -> None:
        """A client asks for the path of a message; the reply follows when that is known.

        Traces begin at the end of a turn, at a pace, from one connection after the other: however many are
        asked for, they do not keep deliveries waiting, nor other clients.
        """
        if set(request.arguments) != {"id"}:
            names = shorten(", ".join(sorted(request.arguments)), 80)
            raise UsageError(f"a trace takes one argument, the message's `id`, not {names or 'none'}")
        ids = parse_ids([request.arguments["id"]])
        # Those that come in one turn all wait for its end, also the first few.
        connection = peer.connection
        asked = len(self._waiting.get(connection, ())) + self._desk.under_way()[connection]
        if asked >= MAX_EACH + MAX_WAITING:
            raise UnavailableError(f"{asked} traces of this client are under way or wait: try again")
        self._waiting.setdefault(connection, deque()).append((request.number, ids))

    def _next(self) -> int | None:
        """The connection whose turn it is, None while there is no room for its traces."""
        if self._desk.full:
            return None
        under_way = self._desk.under_way()
        return next((connection for connection in self._waiting if under_way[connection] < MAX_EACH), None)

    def _begin(self, turn: Turn) -> None:
        connection = self._next()
        if connection is None or self._paced_us - BURST_US >= turn.now_us:
            return
        waiting = self._waiting.pop(connection)
        number, ids = waiting.popleft()
        if waiting:
            self._waiting[connection] = waiting
        self._paced_us = max(self._paced_us, turn.now_us) + PACE_US
        self._desk.begin(turn, ids, Asker(connection, number))

    def _closed(self, _turn: Turn, peer: Peer) -> None:
        """Nobody waits for its traces any more."""
        self._waiting.pop(peer.connection, None)
        self._desk.abandon(peer.connection)

    # ---- time

    def tick(self, turn: Turn) -> bool:
        """The end of a turn: traces that took too long, the next to begin, and what to keep. Whether there
        was anything to do."""
        before = len(turn.effects)
        if self._waiting:
            self._begin(turn)
        self._desk.tick(turn)
        self._paced_us += (self._desk.own_work - self._paced_work) * WORK_US
        self._paced_work = self._desk.own_work
        # After all questions, which may fill filters: whoever reads those in this turn finds them kept.
        self._keep(turn)
        return len(turn.effects) > before

    def _keep(self, turn: Turn) -> None:
        """Where others wait for what the turn did, what is to be kept is put off to one right after it."""
        if self._tracking is None:
            return
        due_us = self._tracking.next_deadline()
        if due_us is None or turn.now_us < due_us + (PUT_OFF_US if turn.busy else 0):
            return
        effects = self._tracking.tick(turn.now_us)
        if effects:
            turn.keep(effects)
            self._kept(turn, effects)

    def close(self, turn: Turn, unrecorded_us: int | None) -> None:
        """The process ends: keep all that is not kept yet. The log may have more events since then."""
        effects = [] if self._tracking is None else self._tracking.close(turn.now_us, unrecorded_us)
        if effects:
            turn.keep(effects)

    def next_deadline(self) -> int | None:
        keep_us = None if self._tracking is None else self._tracking.next_deadline()
        if not self._desk.busy and not self._waiting:
            return keep_us
        begin_us = self._paced_us - BURST_US + 1 if self._next() is not None else None
        deadlines = (keep_us, self._desk.next_deadline(), begin_us)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check(self) -> None:
        if self._tracking is not None:
            self._tracking.check()


def _tracked(board: Switchboard, tracking: Tracking) -> Answers:
    board.peers(
        "broker",
        up=lambda turn, peer: tracking.linked(peer.broker, turn.now_us),
        down=lambda turn, peer: tracking.unlinked(peer.broker, turn.now_us),
    )
    board.not_kept(lambda turn, item: tracking.not_kept(item, turn.now_us))
    board.metrics(tracking.metrics)
    return tracking


def _untracked(board: Switchboard) -> Answers:
    untracked = Untracked()
    board.peers("broker", up=lambda _turn, peer: untracked.linked(peer.broker))
    return untracked


def _report(turn: Turn, asker: Asker, results: Sequence[TraceResult]) -> None:
    body = msgspec.json.encode(within(results[0], MAX_BODY_BYTES)).decode()
    turn.send(asker.connection, encode(Reply(number=asker.request, code="", body=body)))
