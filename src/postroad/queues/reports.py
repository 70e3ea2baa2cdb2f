"""What people ask about queues, of the whole network and from any broker, and what administrators do."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from postroad.errors import DeniedError, FullError, PostroadError, UnavailableError, UsageError
from postroad.ids import name_fits
from postroad.links.access import owning
from postroad.links.links import Links
from postroad.overlay.topology import Topology
from postroad.queues.arcs import Arcs
from postroad.queues.errands import Errands, Say
from postroad.queues.inbox import MAX_NAME_BYTES, Inbox
from postroad.queues.messages import Node
from postroad.queues.serving import Serving
from postroad.queues.talk import (
    MAX_ROWS,
    AskQueues,
    DeadTask,
    DeleteTask,
    Done,
    OwnTask,
    QueueRow,
    ReviveTask,
    Task,
)
from postroad.queues.talk import Queues as QueueRows
from postroad.ring.ring import Ring
from postroad.seam.levels import Level
from postroad.seam.peers import Peer
from postroad.seam.replies import reply, reply_error, whole_number
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import SECOND_US
from postroad.wire.frames import Request

WAIT_US: Final = 2 * SECOND_US  # for all brokers to say which queues they are responsible for
UNFILLED_US: Final = 10 * SECOND_US  # without a start of a view, nobody is able to fill one
MAX_SHOWN: Final = 2_000  # queues in one reply to a client
MAX_OPEN: Final = 256  # requests that wait for other brokers
MAX_EACH: Final = 8  # the same of one client: one that asks without end leaves room for others
MAX_REVIVED: Final = 1_000_000
MAX_LABELLED: Final = 50  # inboxes with metrics of their own: those with most messages
_DEPTH: Final = "Messages of an inbox. Alarm: it grows for longer than its consumers are ever away."
_OLDEST: Final = "Seconds since its oldest message was sent. Alarm: above what your consumers promise."
_DEAD: Final = "Its dead letters. Alarm: above 0; somebody has to look at each."


@dataclass(slots=True)
class _Survey:
    """A request about all queues that brokers are still answering."""

    connection: int
    number: int
    until_us: int
    waiting: set[Node]
    visible: Callable[[QueueRow], bool]  # to who asked
    rows: list[tuple[Node, QueueRow]] = field(default_factory=list)


class Reports:
    def __init__(
        self,
        board: Switchboard,
        *,
        me: Node,
        arcs: Arcs,
        errands: Errands,
        serving: Serving,
        ring: Ring,
        topology: Topology,
        links: Links,
        say: Say,
    ) -> None:
        self._me, self._arcs, self._errands, self._serving = me, arcs, errands, serving
        self._ring, self._topology, self._links, self._say = ring, topology, links, say
        self._surveys: dict[int, _Survey] = {}
        self._last_number = 0
        board.request("queues", self._queues)
        board.request("queues.dead", self._dead)
        board.request("queues.revive", self._revive)
        board.request("queues.delete", self._delete)
        board.request("queues.own", self._own)
        board.request("queues.found", self._found, needs="admin")
        board.request("queues.rescue", self._rescue, needs="admin")
        board.peers("client", down=self._client_down)
        board.metrics(self._metrics)
        board.levels(self._levels)
        board.status("queues", self._status)

    # ---- all queues

    def _queues(self, turn: Turn, peer: Peer, request: Request) -> None:
        own = sum(survey.connection == peer.connection for survey in self._surveys.values())
        if len(self._surveys) >= MAX_OPEN or own >= MAX_EACH:
            raise UnavailableError(
                f"{len(self._surveys)} requests about queues are under way here, {own} of them of this client"
            )
        self._last_number += 1
        number = self._last_number
        nodes = self._others() | {self._me}
        survey = _Survey(
            peer.connection, request.number, turn.now_us + WAIT_US, nodes, self._visible_to(peer)
        )
        self._surveys[number] = survey
        for node in sorted(nodes):
            self._say(turn, node, AskQueues(number, ""))

    def _visible_to(self, peer: Peer) -> Callable[[QueueRow], bool]:
        """A client sees the queues that are its principal's, and those that it may receive from or send to
        by the rules."""
        links, connection, owner = self._links, peer.connection, owning(peer.principal)
        if links.may_admin(connection):
            return lambda _row: True
        return lambda row: (
            (owner != "" and row.owner == owner)
            or links.may_receive(connection, row.inbox)
            or links.may_send(connection, row.inbox)
        )

    def _others(self) -> set[Node]:
        """Whoever the overlay reaches, or the ring where the overlay is cut."""
        overlay = {self._ring.node(broker) for broker in self._topology.reachable()}
        return {node for node in overlay if node is not None} | set(self._ring.known)

    def asked(self, turn: Turn, sender: Node, said: AskQueues) -> None:
        rows: list[QueueRow] = []
        more = False
        for arc, name in self._serving.rows():
            if name <= said.after:
                continue
            if len(rows) == MAX_ROWS:
                more = True
                break
            rows.append(self._row(arc, name))
        self._say(turn, sender, QueueRows(said.number, tuple(rows), more))

    def _row(self, arc: int, name: str) -> QueueRow:
        inbox = self._arcs.machine(arc).inboxes.get(name) or Inbox()
        view = self._arcs.view(arc)
        assert view is not None
        oldest = next(iter(inbox.messages.values()), None)
        return QueueRow(
            inbox=name,
            arc=arc,
            depth=len(inbox.messages) + self._serving.express_waiting(arc, name),
            bytes=inbox.bytes,
            oldest_us=0 if oldest is None else oldest.sent_us,
            consumers=len(inbox.consumers),
            dead=len(inbox.dead),
            owner=inbox.owner,
            replicas=view.replicas,
            epoch=view.epoch,
        )

    def answered(self, turn: Turn, sender: Node, said: QueueRows) -> None:
        survey = self._surveys.get(said.number)
        if survey is None or sender not in survey.waiting:
            return
        survey.rows += [(sender, row) for row in said.rows if survey.visible(row)]
        if said.more and said.rows and len(survey.rows) < MAX_SHOWN:
            self._say(turn, sender, AskQueues(said.number, said.rows[-1].inbox))
            return
        survey.waiting.discard(sender)
        if not survey.waiting:
            self._finish(turn, said.number)

    def _finish(self, turn: Turn, number: int) -> None:
        survey = self._surveys.pop(number)
        newest: dict[str, tuple[Node, QueueRow]] = {}
        for node, row in survey.rows:
            known = newest.get(row.inbox)
            if known is None or row.epoch > known[1].epoch:
                newest[row.inbox] = (node, row)
        queues = [
            {
                "inbox": row.inbox,
                "depth": row.depth,
                "oldest_s": max(0, turn.now_us - row.oldest_us) / SECOND_US if row.oldest_us else 0.0,
                "consumers": row.consumers,
                "responsible": self._ring.name(node),
                "replicas": [self._ring.name(replica) for replica in row.replicas],
                "epoch": row.epoch,
                "dead": row.dead,
                "owner": row.owner,
                "bytes": row.bytes,
            }
            for _, (node, row) in sorted(newest.items())[:MAX_SHOWN]
        ]
        silent = sorted(self._ring.name(node) for node in survey.waiting)
        body = {"queues": queues, "silent": silent, "more": len(newest) > MAX_SHOWN}
        try:
            reply(turn, survey.connection, survey.number, body)
        except UnavailableError as error:
            reply_error(turn, survey.connection, survey.number, error)

    def _client_down(self, turn: Turn, peer: Peer) -> None:
        del turn
        for number in [n for n, each in self._surveys.items() if each.connection == peer.connection]:
            del self._surveys[number]

    # ---- dead letters

    def _dead(self, turn: Turn, peer: Peer, request: Request) -> None:
        inbox = self._inbox(peer, request)
        task = DeadTask(inbox, peer.principal, self._links.may_admin(peer.connection))

        def listed(turn: Turn, done: Done) -> None:
            try:
                body = msgspec.json.decode(done.body) if done.body else {"dead": [], "more": False}
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise UnavailableError(f"the broker responsible for {inbox!r} answered: {error}") from None
            reply(turn, peer.connection, request.number, body)

        self._ask(turn, peer, request, inbox, task, listed)

    def _revive(self, turn: Turn, peer: Peer, request: Request) -> None:
        inbox = self._inbox(peer, request)
        count = whole_number(request.arguments.get("count", str(MAX_REVIVED)), MAX_REVIVED)
        if not count:
            raise UsageError("a count of 0 revives nothing")
        drop = request.arguments.get("drop", "") == "yes"
        admin = self._links.may_admin(peer.connection)
        task = ReviveTask(inbox, peer.principal, admin, count, drop)

        def revived(turn: Turn, done: Done) -> None:
            if done.answers[0].outcome == "full":
                raise FullError(f"inbox {inbox!r} has no room for its dead letters")
            reply(turn, peer.connection, request.number, {"count": done.answers[0].last})

        self._ask(turn, peer, request, inbox, task, revived)

    def _delete(self, turn: Turn, peer: Peer, request: Request) -> None:
        inbox = self._inbox(peer, request)
        task = DeleteTask(inbox, peer.principal, self._links.may_admin(peer.connection))

        def deleted(turn: Turn, done: Done) -> None:
            outcome = done.answers[0].outcome
            if outcome == "busy":
                raise UsageError(f"somebody receives as {inbox!r} or sends to it just now: stop that first")
            reply(turn, peer.connection, request.number, {"messages": done.answers[0].last})

        self._ask(turn, peer, request, inbox, task, deleted)

    def _own(self, turn: Turn, peer: Peer, request: Request) -> None:
        inbox, owner = self._inbox(peer, request), request.arguments.get("principal", "")
        if not owner or not name_fits(owner):
            raise UsageError("whose shall it be? The argument `principal` has 1 to 255 bytes")
        task = OwnTask(inbox, peer.principal, self._links.may_admin(peer.connection), owner)

        def owned(turn: Turn, _done: Done) -> None:
            reply(turn, peer.connection, request.number, {"owner": owner})

        self._ask(turn, peer, request, inbox, task, owned)

    def _inbox(self, peer: Peer, request: Request) -> str:
        inbox = request.arguments.get("inbox", "")
        if not inbox:
            raise UsageError("which inbox? The request has no argument `inbox`")
        if len(inbox.encode()) > MAX_NAME_BYTES:
            raise UsageError(f"the name of an inbox has 1 to {MAX_NAME_BYTES} bytes")
        if not self._links.may_receive(peer.connection, inbox):
            raise DeniedError(f"an access rule forbids receiving as {inbox!r}")
        return inbox

    def _ask(
        self,
        turn: Turn,
        peer: Peer,
        request: Request,
        inbox: str,
        task: Task,
        then: Callable[[Turn, Done], None],
    ) -> None:
        def done(turn: Turn, answer: Done, _task: object) -> None:
            if self._links.peer(peer.connection) is None:
                return
            try:
                if answer.code:
                    raise UnavailableError(answer.reason)
                if not answer.answers:
                    raise UnavailableError(f"the broker responsible for {inbox!r} answered nothing")
                if answer.answers[0].outcome == "denied":
                    raise DeniedError(f"the name {inbox!r} belongs to another principal")
                if answer.answers[0].outcome == "none" and isinstance(task, DeleteTask | OwnTask):
                    raise UsageError(f"there is no inbox {inbox!r}, or none any more")
                then(turn, answer)
            except PostroadError as error:
                reply_error(turn, peer.connection, request.number, error)

        self._errands.ask(turn, self._arcs.index(inbox), task, done)

    # ---- for administrators

    def _found(self, turn: Turn, peer: Peer, request: Request) -> None:
        reply(turn, peer.connection, request.number, {"arcs": self._arcs.found(turn)})

    def _rescue(self, turn: Turn, peer: Peer, request: Request) -> None:
        """Arcs that nobody can serve begin anew with what the reached brokers hold: those that have lost a
        majority of their electors, or every replica; and those whose views have not started for long, which
        is so where no log of a replica is whole."""
        alive = self._others() | {self._me}
        confirmed = request.arguments.get("confirm", "") == "yes"
        rows: list[dict[str, object]] = []
        for index, arc in list(self._arcs.hosted()):
            view = arc.view
            if view is None:
                continue
            electors, holders = set(view.electors), set(view.last_started().replicas)
            readable = holders & alive - ({self._me} if arc.harmed else set())
            since_us = self._arcs.unfilled_since(index)
            unfilled = since_us is not None and turn.now_us - since_us >= UNFILLED_US
            if len(alive & electors) >= view.majority and readable and not unfilled:
                continue
            reached = [node for node in self._ring.closest(self._arcs.key(index), 1_024) if node in alive]
            gone = sorted((electors | holders) - alive)
            lost = "all but what backups brought back"
            if holders & alive:
                lost = "what only the gone ones held" if gone else "what was at the damaged ends of logs"
            rows.append(
                {
                    "arc": index,
                    "electors": [self._ring.name(node) for node in view.electors],
                    "gone": [self._ring.name(node) for node in gone],
                    "reached": [self._ring.name(node) for node in reached],
                    "lost": lost,
                }
            )
            if confirmed:
                self._arcs.rescue(turn, index, reached)
        reply(turn, peer.connection, request.number, {"arcs": rows, "done": confirmed})

    # ---- time and inspection

    def tick(self, turn: Turn) -> None:
        for number in [n for n, each in self._surveys.items() if each.until_us <= turn.now_us]:
            self._finish(turn, number)

    def next_deadline(self) -> int | None:
        return min((survey.until_us for survey in self._surveys.values()), default=None)

    def _metrics(self) -> dict[str, int]:
        served = [self._arcs.machine(index) for index, arc in self._arcs.hosted() if arc.serving]
        inboxes = [inbox for machine in served for inbox in machine.inboxes.values()]
        oldest = [next(iter(inbox.messages.values())).sent_us for inbox in inboxes if inbox.messages]
        return {
            **self._arcs.metrics(),
            **self._errands.metrics(),
            **self._serving.counters,
            "queue_inboxes": len(inboxes),
            "queue_depth": sum(len(inbox.messages) for inbox in inboxes),
            "queue_oldest_timestamp_seconds": min(oldest, default=0) // SECOND_US,
            "queue_express_bytes": self._serving.express_bytes,
            "queue_depth_bytes": sum(machine.bytes for machine in served),
            "queue_dead_letters": sum(len(inbox.dead) for inbox in inboxes),
            "queue_consumers": sum(len(inbox.consumers) for inbox in inboxes),
        }

    def _levels(self, now_us: int) -> list[Level]:
        """Of the inboxes with most messages that this broker is responsible for."""
        rows = [self._row(arc, name) for arc, name in self._serving.rows()]
        deepest = heapq.nlargest(MAX_LABELLED, rows, key=lambda row: (row.depth, row.inbox))
        levels: list[Level] = []
        for row in deepest:
            labels = {"inbox": row.inbox}
            oldest_s = max(0, now_us - row.oldest_us) / SECOND_US if row.oldest_us else 0.0
            levels += [
                Level("queue_inbox_depth", _DEPTH, labels, row.depth),
                Level("queue_inbox_oldest_seconds", _OLDEST, labels, oldest_s),
                Level("queue_inbox_dead_letters", _DEAD, labels, row.dead),
            ]
        return levels

    def _status(self, now_us: int) -> dict[str, object]:
        del now_us
        arcs = [arc for _, arc in self._arcs.hosted()]
        return {
            "arcs": len(arcs),
            "responsible_for": sum(arc.serving for arc in arcs),
            "replica_of": sum(arc.chain is not None for arc in arcs),
            "elector_of": sum(arc.view is not None and self._me in arc.view.electors for arc in arcs),
        }
