"""Queues at a broker: what clients send and receive, at any broker (spec Q2 to Q7).

The broker that a client is connected to is the entry: the paper's source broker. It finds the broker that is
responsible for an inbox, hands messages and settlements to it and keeps a copy until they are answered; it
joins an inbox there on behalf of a consumer, and joins again after every change of the view. So a client
needs one connection, and no other broker's address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from postroad.errors import (
    BugError,
    DeniedError,
    FullError,
    PeerError,
    PostroadError,
    TooLargeError,
    UnavailableError,
    UsageError,
    from_wire,
)
from postroad.ids import SESSION_BYTES, name_fits
from postroad.links.access import QuotaConfig, owning
from postroad.links.direct import DirectPeers
from postroad.links.links import Links
from postroad.overlay.topology import Topology
from postroad.queues.arcs import Arcs
from postroad.queues.errands import Errands
from postroad.queues.founding import Founding
from postroad.queues.inbox import (
    MAX_PAYLOAD_BYTES,
    MAX_PRIORITY,
    MAX_TOGETHER,
    Answer,
    Key,
    Message,
    join,
    kind_of,
    name_of,
    principal_of,
    session_of,
    source_of,
)
from postroad.queues.messages import STARTED, Ask, Chain, Kept, Node, View
from postroad.queues.messages import Message as ArcMessage
from postroad.queues.reports import Reports
from postroad.queues.serving import MAX_WISH_BYTES, Serving
from postroad.queues.settings import QueueConfig
from postroad.queues.talk import (
    MAX_DELAY_US,
    MAX_KEY_BYTES,
    MAX_WINDOW,
    About,
    AskChains,
    AskQueues,
    Chains,
    ConfirmTask,
    Deliver,
    Delivered,
    Done,
    Elsewhere,
    EndTask,
    JoinTask,
    LeaveTask,
    Locate,
    MessageKey,
    Moment,
    PutTask,
    Removed,
    Said,
    SettleTask,
    Work,
    decode,
    decode_chain,
    decode_key,
    encode,
)
from postroad.queues.talk import (
    Queues as QueueRows,
)
from postroad.queues.transactions import Transactions
from postroad.queues.witness import Witness
from postroad.ring.ring import Ring
from postroad.seam.peers import Peer
from postroad.seam.storage import LogStream, StreamEnd
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire import frames
from postroad.wire.frames import (
    EndSession,
    Messages,
    Posting,
    QueueMessage,
    Receive,
    Receiving,
    Send,
    Sent,
    Settle,
    Settled,
    Unreceive,
)

ROOM: Final = "queues"
CONSUMER_BYTES: Final = 8
MAX_NOTED: Final = 8  # arcs in one line of the log
MAX_ID: Final = (1 << 62) - 1
MAX_SENDS: Final = 8_192  # of one client that are not answered
MAX_SEND_BYTES: Final = 32 * MIB  # the same in bytes
MAX_CONFIRMING: Final = 65_536  # messages of one client that it waits to hear of
CONFIRM_BYTES: Final = 256  # what the name of one takes
MAX_RECEIVERS: Final = 1_000  # of one client
MAX_SESSIONS: Final = 1_000  # of one client, whose inboxes are remembered
MAX_SESSION_INBOXES: Final = 10_000
MAX_REASON: Final = 1_000
MAX_CHAIN_BYTES: Final = 64
FRAME_OVERHEAD_BYTES: Final = 192  # of a message: its numbers and its chain
MAX_OUTGOING_BYTES: Final = 256 * KIB  # of several things that are said to a broker in one frame
MAX_NAMES_BYTES: Final = 2 * SESSION_BYTES + 3 * 255 + 1  # of a message, at most


@dataclass(slots=True)
class _Receiver:
    """A consumer that is connected here."""

    connection: int
    number: int
    inbox: str
    arc: int
    task: JoinTask
    joined: bool = False  # at least once
    joining: bool = False
    delivery: Moment = (b"", 0)  # the last one that it was handed


@dataclass(slots=True)
class _Client:
    principal: str
    admin: bool
    sends: int = 0  # parts of SENDs that are not answered
    send_bytes: int = 0
    confirming: int = 0  # messages that it waits to hear of
    receivers: dict[int, _Receiver] = field(default_factory=dict)  # by number
    sessions: dict[str, set[str]] = field(default_factory=dict)  # source -> inboxes that it sent to


@dataclass(slots=True)
class _Confirming:
    """A part of a SEND whose messages are kept, and whose sender waits to hear that they were accepted."""

    connection: int
    number: int  # of the SEND
    arc: int
    express: bool
    places: list[int]  # of each message, in the SEND
    waiting: set[int]  # which of them
    messages: tuple[tuple[str, Key], ...] = ()  # inbox and key of each, once they are kept


@dataclass(slots=True)
class _Outgoing:
    """What is said to another broker in this turn."""

    said: list[bytes] = field(default_factory=list)
    size: int = 0


class Queues:
    def __init__(
        self,
        board: Switchboard,
        *,
        me: Node,
        boot: int,
        config: QueueConfig,
        quotas: QuotaConfig,
        streams: Mapping[LogStream, StreamEnd] | None,
        ring: Ring,
        direct: DirectPeers,
        topology: Topology,
        links: Links,
        told_of_others: bool,
        witness: Witness,
        draw: Callable[[int], int],
    ) -> None:
        self._me, self._config, self._topology, self._witness = me, config, topology, witness
        self._ring, self._direct, self._links = ring, direct, links
        self._clients: dict[int, _Client] = {}  # by connection: those that ever used queues
        self._receivers: dict[tuple[str, str], _Receiver] = {}  # by inbox and consumer
        self._confirming: dict[int, _Confirming] = {}  # by the number of the errand
        self._unconfirmed: dict[int, None] = {}  # of these, whose responsible broker is still to be told
        # By inbox and consumer, those whose leaving nobody answered; and whether they were lost.
        self._leaving: dict[tuple[str, str], tuple[_Receiver, bool]] = {}
        self._again_us = 0  # when these, and what is not confirmed, are tried again
        self._outgoing: dict[int, _Outgoing] = {}  # what was said in this turn, by broker
        self._begun: dict[int, View] = {}  # arcs that this broker answers for since this turn
        self._ring_changed = True
        self.arcs = Arcs(
            board,
            me=me,
            boot=boot,
            count=config.arcs,
            settings=config.views(),
            limits=config.limits(),
            memory_bytes=config.memory_bytes,
            streams=None if config.memory_only else streams,
            draw=draw,
            say=self._say_of_arc,
            kept=self._kept,
            moved=self._moved,
            stopped=self._stopped,
            woken=self._woken,
        )
        self.errands = Errands(
            me=me,
            boot=boot,
            arcs=self.arcs,
            ring=ring,
            say=self.say,
            max_bytes=config.outstanding_bytes,
            answer_us=config.answer_us,
        )
        self.serving = Serving(
            arcs=self.arcs,
            errands=self.errands,
            say=self.say,
            rejoin_us=config.rejoin_us,
            express_bytes=config.express_bytes,
            all_express_bytes=config.memory_bytes,
            attempts=config.attempts,
            quotas=quotas,
            witness=witness,
            number_of=ring.number,
        )
        self._transactions = Transactions(me=me, boot=boot, arcs=self.arcs, errands=self.errands)
        self._make_desks(board, told_of_others=told_of_others)
        self._take_messages(board)

    def _make_desks(self, board: Switchboard, *, told_of_others: bool) -> None:
        self._founding = Founding(
            me=self._me,
            arcs=self.arcs,
            ring=self._ring,
            topology=self._topology,
            links=self._links,
            told_of_others=told_of_others,
            say=self.say,
        )
        self._reports = Reports(
            board,
            me=self._me,
            arcs=self.arcs,
            errands=self.errands,
            serving=self.serving,
            ring=self._ring,
            topology=self._topology,
            links=self._links,
            say=self.say,
        )

    def _take_messages(self, board: Switchboard) -> None:
        board.from_client(Send, self._send)
        board.from_client(EndSession, self._end_session)
        board.from_client(Receive, self._receive)
        board.from_client(Settle, self._settle)
        board.from_client(Unreceive, self._unreceive)
        board.peers("client", down=self._client_down)
        board.from_direct(ROOM, self._received, self._unreached, self._interrupted)

    # ---- brokers

    def say(self, turn: Turn, node: Node, said: Said) -> bool:
        if node == self._me:
            self._hear(turn, node, said)
            return True
        number = self._ring.number(node)
        if number is None:
            return False
        data = encode(said)
        outgoing = self._outgoing.get(number)
        if outgoing is not None and outgoing.size + len(data) > MAX_OUTGOING_BYTES:
            del self._outgoing[number]
            self._direct.send(turn, number, ROOM, join(len(outgoing.said), outgoing.said))
            outgoing = None
        size = len(data) + (FRAME_OVERHEAD_BYTES if outgoing is None else outgoing.size)
        if not self._direct.takes(turn, number, size):
            return False
        if outgoing is None:
            outgoing = self._outgoing[number] = _Outgoing()
        outgoing.said.append(data)
        outgoing.size = size
        return True

    def _flush(self, turn: Turn) -> None:
        """What was said in this turn goes out. What is lost on the way is said again by whoever waits."""
        while self._outgoing:
            number, outgoing = self._outgoing.popitem()
            self._direct.send(turn, number, ROOM, join(len(outgoing.said), outgoing.said))

    def _say_of_arc(self, turn: Turn, node: Node, arc: int, message: ArcMessage) -> None:
        self.say(turn, node, About(arc, message))

    def _received(self, turn: Turn, peer: Peer, body: bytes) -> None:
        turn.concerns = self
        node = self._ring.node_of(peer)
        for said in decode(body):
            self._hear(turn, node, said)

    def _hear(self, turn: Turn, sender: Node, said: Said) -> None:
        match said:
            case About():
                self.arcs.received(turn, sender, said.arc, said.message)
            case Work():
                self.serving.work(turn, sender, said)
            case Done():
                self.errands.answered(turn, sender, said)
            case Elsewhere():
                self.errands.elsewhere(turn, sender, said)
            case Deliver():
                self._deliver(turn, sender, said)
            case Delivered():
                self._delivered(turn, said)
            case Removed():
                self._removed(turn, said)
            case Locate():
                if not self.errands.pass_on(turn, said):
                    self.arcs.received(turn, said.asker, said.arc, Ask())
            case AskChains():
                self.say(turn, sender, Chains(self.arcs.knows_chain))
            case Chains():
                self._founding.answered(turn, sender, said)
            case AskQueues():
                self._reports.asked(turn, sender, said)
            case QueueRows():
                self._reports.answered(turn, sender, said)

    def _unreached(self, turn: Turn, broker: int) -> None:
        node = self._ring.node(broker)
        if node is None:
            return
        self.errands.unreached(turn, node)
        self.serving.unreached(turn, node)
        self._join_again(turn, node)

    def _join_again(self, turn: Turn, node: Node) -> None:
        """That broker may have lost sight of the consumers here."""
        for receiver in list(self._receivers.values()):
            view = self.arcs.view(receiver.arc)
            if view is not None and view.responsible == node:
                self._join(turn, receiver)

    def _interrupted(self, turn: Turn, broker: int) -> None:
        node = self._ring.node(broker)
        if node is not None:
            self.errands.interrupted(turn, node)
            self.serving.interrupted(turn, node)
            self._join_again(turn, node)

    def ring_changed(self, turn: Turn) -> None:
        """The closest brokers are others: arcs hear of it at the end of the turn."""
        del turn
        self._ring_changed = True

    # ---- arcs

    def _woken(self, turn: Turn) -> None:
        turn.concerns = self

    def _kept(self, turn: Turn, arc: int, kept: Kept) -> None:
        self.serving.kept(turn, arc, kept)

    def _stopped(self, turn: Turn, arc: int) -> None:
        self.serving.stopped(turn, arc)

    def _moved(self, turn: Turn, arc: int, view: View) -> None:
        self.errands.moved(turn, arc, view)
        if view.stage != STARTED:
            return
        if view.responsible == self._me:
            self._begun[arc] = view
        self.serving.begun()
        for receiver in list(self._receivers.values()):
            if receiver.arc == arc:
                self._join(turn, receiver)
        self._moved_away(turn, arc)

    def _note_begun(self, turn: Turn) -> None:
        """One line for the log, however many arcs came in this turn."""
        begun, self._begun = sorted(self._begun.items()), {}
        names = [f"{arc} (epoch {view.epoch})" for arc, view in begun[:MAX_NOTED]]
        more = f" and {len(begun) - MAX_NOTED} more" if len(begun) > MAX_NOTED else ""
        short = sum(len(view.replicas) < self._config.replicas for _, view in begun)
        few = f"; {short} with fewer than {self._config.replicas} replicas" if short else ""
        turn.note("info", f"this broker answers for arcs of queues now: {', '.join(names)}{more}{few}")

    # ---- sending

    def _client(self, peer: Peer) -> _Client:
        client = self._clients.get(peer.connection)
        if client is None:
            admin = self._links.may_admin(peer.connection)
            client = self._clients[peer.connection] = _Client(peer.principal, admin)
        return client

    def _send(self, turn: Turn, peer: Peer, message: Send) -> None:
        turn.concerns = self
        _check_send(message)
        client, connection = self._client(peer), peer.connection
        try:
            denied = self._refuse_denied(turn, connection, message)
            postings = [each for place, each in enumerate(message.messages) if place not in denied]
            if not postings:
                return
            if message.form == "transactional" and not all(posting.chain for posting in postings):
                self._tell_chains(turn, connection, client, message, denied)
                return
            source = source_of(message.session, message.source, owning(peer.principal))
            messages = self._messages(turn, message, source)
            taken = [each for place, each in enumerate(messages) if place not in denied]
            size = sum([each.size for each in taken])
            if client.sends >= MAX_SENDS or client.send_bytes + size > MAX_SEND_BYTES:
                raise FullError(f"this client has {client.sends} sends that are not answered: wait for some")
            if message.confirm and client.confirming + len(taken) > MAX_CONFIRMING:
                raise FullError(f"this client waits to hear of {client.confirming} messages: wait for some")
            self._remember_session(client, source, taken)
            self._witness.sent(turn, message.session, taken)
            if message.together and len(messages) > 1:
                self._send_together(turn, connection, message, messages)
            else:
                self._send_each(turn, connection, message, messages, denied)
        except (UsageError, UnavailableError) as error:
            self._refuse_send(turn, connection, message.number, (), error)

    def _refuse_denied(self, turn: Turn, connection: int, message: Send) -> frozenset[int]:
        """The places of messages that may not be sent, which are refused alone. DeniedError if none may, or
        all are sent together."""
        by_inbox: dict[str, list[int]] = {}
        for place, posting in enumerate(message.messages):
            by_inbox.setdefault(posting.inbox, []).append(place)
        denied = [inbox for inbox in by_inbox if not self._links.may_send(connection, inbox)]
        for inbox in denied:
            error = DeniedError(f"an access rule forbids sending to {inbox!r}")
            if message.together or len(by_inbox) == 1:
                raise error
            self._refuse_send(turn, connection, message.number, tuple(by_inbox[inbox]), error)
        return frozenset(place for inbox in denied for place in by_inbox[inbox])

    @staticmethod
    def _remember_session(client: _Client, source: str, messages: list[Message]) -> None:
        """So that its inboxes can be told when it ends."""
        inboxes = client.sessions.get(source)
        if inboxes is None:
            if len(client.sessions) >= MAX_SESSIONS:
                return
            inboxes = client.sessions[source] = set()
        if len(inboxes) < MAX_SESSION_INBOXES:
            inboxes.update([message.inbox for message in messages])

    def _tell_chains(
        self, turn: Turn, connection: int, client: _Client, message: Send, denied: frozenset[int]
    ) -> None:
        """Nothing of this SEND is taken: transactional messages name the chain that they are first sent in.

        Were they stamped here, a sender that hears no answer would not know in which of two networks that
        are still apart they may be, and would send them again in the other (responsibility 9).
        """
        by_arc: dict[int, list[int]] = {}
        taken = [(place, each) for place, each in enumerate(message.messages) if place not in denied]
        for place, posting in taken:
            if not posting.chain:
                by_arc.setdefault(self.arcs.index(posting.inbox), []).append(place)
        named = tuple([place for place, posting in taken if posting.chain])
        if client.sends + len(by_arc) > MAX_SENDS:
            raise FullError(f"this client has {client.sends} sends that are not answered: wait for some")
        if named and not message.together:
            self._tell(turn, connection, Sent(number=message.number, places=named, state="gap"))

        def reached(arc: int, turn: Turn, done: Done, _task: object) -> None:
            client.sends -= 1
            view, places = self.arcs.view(arc), tuple(by_arc[arc])
            if done.code or view is None:
                self._refuse_send(turn, connection, message.number, places, UnavailableError(done.reason))
            else:
                gap = Sent(number=message.number, places=places, state="gap", chain=encode(view.chain))
                self._tell(turn, connection, gap)

        for arc in by_arc:
            client.sends += 1
            try:
                self.errands.find(turn, arc, partial(reached, arc))
            except FullError:
                client.sends -= 1
                raise

    def _messages(self, turn: Turn, message: Send, source: str) -> list[Message]:
        """Of each the chain that its sender names, else the present one, if that is known."""
        now_us, ordered, entry = turn.now_us, message.form == "transactional", self._witness.me
        chains: dict[tuple[str, bytes], Chain] = {}
        made: list[Message] = []
        for posting in message.messages:
            size = len(posting.payload) + len(posting.attributes)
            if size > MAX_PAYLOAD_BYTES:
                raise TooLargeError(f"a message of {size} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
            inbox, named = posting.inbox, posting.chain
            chain = chains.get((inbox, named))
            if chain is None:
                view = None if named else self.arcs.view(self.arcs.index(inbox))
                started = view is not None and view.stage == STARTED
                chain = chains[inbox, named] = view.chain if view and started else decode_chain(named)
            made.append(
                Message(
                    inbox,
                    chain,
                    source,
                    posting.id,
                    ordered,
                    posting.payload,
                    posting.after if ordered else 0,
                    posting.priority,
                    now_us + posting.delay_us if posting.delay_us else 0,
                    now_us + posting.expires_us if posting.expires_us else 0,
                    0,
                    "",
                    posting.attributes,
                    now_us,
                    entry,
                )
            )
        return made

    def _send_each(
        self,
        turn: Turn,
        connection: int,
        message: Send,
        messages: list[Message],
        denied: frozenset[int],
    ) -> None:
        """A task per arc; those of one arc in their order."""
        by_arc: dict[int, list[int]] = {}
        inbox, places = "", []
        for place, each in enumerate(messages):
            if place in denied:
                continue
            if each.inbox != inbox:
                inbox = each.inbox
                places = by_arc.setdefault(self.arcs.index(inbox), [])
            places.append(place)
        for arc, places in by_arc.items():
            for part in _split(places, messages):
                task = PutTask(tuple(messages[place] for place in part), message.form, False, message.confirm)
                whole = len(part) == len(messages)
                self._put(turn, connection, message, arc, task, part, whole=whole)

    def _put(
        self,
        turn: Turn,
        connection: int,
        message: Send,
        arc: int,
        task: PutTask,
        places: list[int],
        *,
        whole: bool,
    ) -> None:
        size = sum(each.size for each in task.messages)
        client = self._clients[connection]

        def done(turn: Turn, answer: Done, said: object) -> None:
            client.sends -= 1
            client.send_bytes -= size
            assert isinstance(said, PutTask)
            self._sent(turn, connection, message, said, places, answer, whole=whole)

        number = self.errands.next_number()
        client.sends += 1
        client.send_bytes += size
        if message.confirm:
            client.confirming += len(places)
            express, waiting = task.form == "express", set(range(len(places)))
            self._confirming[number] = _Confirming(connection, message.number, arc, express, places, waiting)
        try:
            self.errands.ask(turn, arc, task, done, size, number=number)
        except FullError as error:
            client.sends -= 1
            client.send_bytes -= size
            self._hear_no_more(number)
            self._refuse_send(turn, connection, message.number, () if whole else tuple(places), error)

    def _sent(
        self,
        turn: Turn,
        connection: int,
        message: Send,
        task: PutTask,
        places: list[int],
        done: Done,
        *,
        whole: bool,
    ) -> None:
        """The responsible broker has answered, or nobody did in time."""
        if done.code:
            self._hear_no_more(done.number)
            error = _error_from(done, "nobody knows what became of it: ")
            self._refuse_send(turn, connection, message.number, () if whole else tuple(places), error)
            return
        (answer,) = done.answers
        groups: dict[tuple[str, int, Chain], list[int]] = {}
        chain = task.messages[0].chain
        if answer.outcome != "each" and all(each.chain is chain for each in task.messages):
            groups[_state_of(answer), answer.last, chain] = places
        else:
            each = answer.each if answer.outcome == "each" else (answer,) * len(places)
            for place, outcome, said in zip(places, each, task.messages, strict=True):
                groups.setdefault((_state_of(outcome), outcome.last, said.chain), []).append(place)
        if self._witness.reports:
            kept = {place for (state, _, _), some in groups.items() if state == "kept" for place in some}
            messages = [said for place, said in zip(places, task.messages, strict=True) if place in kept]
            self._witness.kept(turn, message.form, messages)
        confirming = self._confirming.get(done.number)
        if confirming is not None:
            confirming.messages = tuple(
                [(each.inbox, (each.chain, each.source, each.id)) for each in task.messages]
            )
        for (state, last, chain), members in groups.items():
            shown = () if whole and len(groups) == 1 else tuple(members)
            if state in ("kept", "gap"):
                if message.reliable or state == "gap":
                    sent = Sent(
                        number=message.number, places=shown, state=state, last=last, chain=encode(chain)
                    )
                    self._tell(turn, connection, sent)
            else:
                self._refuse_send(turn, connection, message.number, shown, _error_of(state))
            if confirming is not None and state != "kept":
                for place in members:
                    self._heard_of(confirming, places.index(place))
        if confirming is not None and not confirming.waiting:
            del self._confirming[done.number]

    def _refuse_send(
        self, turn: Turn, connection: int, number: int, places: tuple[int, ...], error: PostroadError
    ) -> None:
        sent = Sent(number=number, places=places, state="", code=error.code, reason=str(error))
        self._tell(turn, connection, sent)

    def _send_together(self, turn: Turn, connection: int, message: Send, messages: list[Message]) -> None:
        client = self._clients[connection]
        size = sum(each.size for each in messages)
        if sum(map(_frame_bytes, messages)) > MAX_WISH_BYTES:
            raise TooLargeError(f"a transaction of {size} bytes is over the limit of {MAX_WISH_BYTES}")

        def done(turn: Turn, answer: Answer | PostroadError) -> None:
            client.sends -= 1
            client.send_bytes -= size
            if isinstance(answer, PostroadError):
                self._refuse_send(turn, connection, message.number, (), answer)
                return
            state = _state_of(answer)
            if state == "kept":
                self._witness.kept(turn, message.form, messages)
            if state in ("kept", "gap"):
                sent = Sent(number=message.number, places=(), state=state, last=answer.last)
                self._tell(turn, connection, sent)
            else:
                self._refuse_send(turn, connection, message.number, (), _error_of(state))

        self._transactions.begin(turn, messages, done)
        client.sends += 1
        client.send_bytes += size

    def _end_session(self, turn: Turn, peer: Peer, message: EndSession) -> None:
        _check_name("source", message.source)
        _check_bytes("session", message.session, SESSION_BYTES)
        source = source_of(message.session, message.source, owning(peer.principal))
        for inbox in sorted(self._client(peer).sessions.pop(source, ())):
            try:
                self.errands.ask(turn, self.arcs.index(inbox), EndTask(inbox, source), _ignore)
            except FullError:
                return  # it is forgotten after a day then

    # ---- delivery confirmations

    def _delivered(self, turn: Turn, said: Delivered) -> None:
        confirming = self._confirming.get(said.number)
        if confirming is None or said.place not in confirming.waiting:
            return
        self._heard_of(confirming, said.place)
        state = "delivered" if said.accepted else "dead"
        sent = Sent(number=confirming.number, places=(confirming.places[said.place],), state=state)
        self._tell(turn, confirming.connection, sent)
        if not confirming.waiting:
            del self._confirming[said.number]

    def _heard_of(self, confirming: _Confirming, place: int) -> None:
        confirming.waiting.discard(place)
        client = self._clients.get(confirming.connection)
        if client is not None:
            client.confirming -= 1

    def _hear_no_more(self, number: int) -> None:
        confirming = self._confirming.pop(number, None)
        for place in () if confirming is None else list(confirming.waiting):
            assert confirming is not None
            self._heard_of(confirming, place)

    def _confirm_again(self, turn: Turn, number: int) -> None:
        """Another broker is responsible now, and does not know who waits. It is asked until it answers."""
        old = self._confirming[number]
        waiting = sorted(old.waiting)
        task = ConfirmTask(tuple(old.messages[place] for place in waiting))

        def done(turn: Turn, answer: Done, _task: object) -> None:
            if answer.code and answer.number in self._confirming:
                self._confirm_again(turn, answer.number)

        del self._confirming[number]
        asked, places = self.errands.next_number(), [old.places[place] for place in waiting]
        self._confirming[asked] = _Confirming(
            old.connection, old.number, old.arc, False, places, set(range(len(places))), task.messages
        )
        try:
            self.errands.ask(turn, old.arc, task, done, len(waiting) * CONFIRM_BYTES, number=asked)
        except FullError:
            self._try_again(turn)
            self._unconfirmed[asked] = None

    def _moved_away(self, turn: Turn, arc: int) -> None:
        """Whoever waits to hear of messages of that arc: the broker that is responsible now is to know it."""
        for number, confirming in list(self._confirming.items()):
            if confirming.arc != arc or not confirming.messages:
                continue  # what is not answered yet is said to it by itself
            if not confirming.express:
                self._confirm_again(turn, number)
                continue
            for place in list(confirming.waiting):  # it was in the memory of the one before
                self._delivered(turn, Delivered(number, place, accepted=False))

    # ---- receiving

    def _receive(self, turn: Turn, peer: Peer, message: Receive) -> None:
        _check_name("inbox", message.inbox)
        _check_bytes("consumer", message.consumer, CONSUMER_BYTES)
        if not 1 <= message.window <= MAX_WINDOW:
            raise PeerError(f"a window is 1 to {MAX_WINDOW} messages, not {message.window}")
        client = self._client(peer)
        if message.number in client.receivers:
            raise PeerError(f"number {message.number} of a RECEIVE is in use")
        consumer = message.consumer.hex()
        old = self._receivers.get((message.inbox, consumer))
        try:
            if len(client.receivers) >= MAX_RECEIVERS:
                raise UsageError(f"a client receives from at most {MAX_RECEIVERS} inboxes at once")
            if not self._links.may_receive(peer.connection, message.inbox):
                raise DeniedError(f"an access rule forbids receiving as {message.inbox!r}")
            # Traces name consumers: whoever knows one of another principal does not get its place.
            if old is not None and not (client.admin or old.task.principal == client.principal):
                raise DeniedError(f"the name {message.inbox!r} belongs to another principal")
        except UsageError as error:
            refused = Receiving(number=message.number, code=error.code, reason=str(error))
            self._tell(turn, peer.connection, refused)
            return
        task = JoinTask(message.inbox, consumer, client.principal, client.admin, message.window)
        arc = self.arcs.index(message.inbox)
        if old is not None:
            self._clients[old.connection].receivers.pop(old.number, None)
        else:
            self._witness.hold(turn, message.inbox, consumer)
        receiver = _Receiver(peer.connection, message.number, message.inbox, arc, task)
        client.receivers[message.number] = receiver
        self._receivers[message.inbox, consumer] = receiver
        self._join(turn, receiver)

    def _join(self, turn: Turn, receiver: _Receiver) -> None:
        if receiver.joining:
            return  # it is asked again until it is answered

        def done(turn: Turn, answer: Done, _task: object) -> None:
            receiver.joining = False
            if self._receivers.get((receiver.inbox, receiver.task.consumer)) is not receiver:
                return
            if answer.code:
                if receiver.joined and answer.code == UnavailableError.code:
                    self._join(turn, receiver)
                else:
                    self._drop(turn, receiver, _error_from(answer, "nobody serves it now: "))
                return
            outcome = answer.answers[0].outcome
            if outcome == "joined":
                if not receiver.joined:
                    receiver.joined = True
                    self._tell(turn, receiver.connection, Receiving(number=receiver.number))
            elif outcome == "denied":
                owned = DeniedError(f"the name {receiver.inbox!r} belongs to another principal")
                self._drop(turn, receiver, owned)
            else:
                self._drop(turn, receiver, FullError(f"inbox {receiver.inbox!r} has too many consumers"))

        receiver.joining = True
        try:
            self.errands.ask(turn, receiver.arc, receiver.task, done)
        except FullError as error:
            receiver.joining = False
            self._drop(turn, receiver, error)

    def _drop(self, turn: Turn, receiver: _Receiver, error: PostroadError) -> None:
        self._forget_receiver(turn, receiver)
        refusal = Receiving(number=receiver.number, code=error.code, reason=str(error))
        self._tell(turn, receiver.connection, refusal)

    def _forget_receiver(self, turn: Turn, receiver: _Receiver) -> None:
        client = self._clients.get(receiver.connection)
        if client is not None:
            client.receivers.pop(receiver.number, None)
        if self._receivers.get((receiver.inbox, receiver.task.consumer)) is receiver:
            del self._receivers[receiver.inbox, receiver.task.consumer]
            self._witness.let_go(turn, receiver.inbox, receiver.task.consumer)

    def _removed(self, turn: Turn, said: Removed) -> None:
        receiver = self._receivers.get((said.inbox, said.consumer))
        if receiver is not None:
            self._join(turn, receiver)

    def _leave(self, turn: Turn, receiver: _Receiver, *, lost: bool) -> None:
        """Said until it is heard: else messages would wait for a consumer that is gone."""
        consumer = receiver.task.consumer

        def done(turn: Turn, answer: Done, _task: object) -> None:
            if answer.code:
                self._try_again(turn)
                self._leaving[receiver.inbox, consumer] = (receiver, lost)

        try:
            self.errands.ask(turn, receiver.arc, LeaveTask(receiver.inbox, consumer, lost), done)
        except FullError as error:
            done(turn, Done(0, (), error.code), None)

    def _try_again(self, turn: Turn) -> None:
        if not self._unconfirmed and not self._leaving:
            self._again_us = turn.now_us + SECOND_US

    def _leave_later(self, receiver: _Receiver, turn: Turn) -> None:
        """Its connection ended a while ago; it may be back by now."""
        self._witness.let_go(turn, receiver.inbox, receiver.task.consumer)
        if (receiver.inbox, receiver.task.consumer) not in self._receivers:
            self._leave(turn, receiver, lost=True)

    def _deliver(self, turn: Turn, sender: Node, said: Deliver) -> None:
        receiver = self._receivers.get((said.inbox, said.consumer))
        if receiver is None:
            return  # the responsible broker hears soon that the consumer is gone
        receiver.delivery = max(receiver.delivery, (said.place, said.number))
        self._witness.came(turn, self._ring.number(sender), [handed.message for handed in said.messages])
        messages = tuple(
            [
                QueueMessage(
                    key=handed.key,
                    source=name_of(handed.message.source),
                    session=session_of(handed.message.source),
                    id=handed.message.id,
                    form=handed.form,
                    attempt=handed.message.attempts + 1,
                    sent_us=handed.message.sent_us,
                    payload=handed.message.payload,
                    attributes=handed.message.attributes,
                    priority=handed.message.priority,
                    principal=principal_of(handed.message.source),
                )
                for handed in said.messages
            ]
        )
        self._tell(
            turn,
            receiver.connection,
            Messages(number=receiver.number, place=said.place, messages=messages),
        )

    def _settle(self, turn: Turn, peer: Peer, message: Settle) -> None:
        turn.concerns = self
        _check_settle(message)
        keys = tuple([decode_key(key) for key in message.keys])
        receiver = self._client(peer).receivers.get(message.number)
        connection, number, ticket = peer.connection, message.number, message.ticket

        def done(turn: Turn, answer: Done, _task: object = None) -> None:
            outcomes = tuple(each.outcome for each in answer.answers)
            if receiver is not None and "absent" in outcomes:
                if self._receivers.get((receiver.inbox, receiver.task.consumer)) is receiver:
                    self._join(turn, receiver)
                    ask(turn)
                    return
                outcomes = tuple("taken" if outcome == "absent" else outcome for outcome in outcomes)
            if receiver is not None and outcomes and answer.after < receiver.delivery:
                # A later delivery overtook it. With `again` the client would forget what that brought.
                ask(turn)
                return
            if receiver is not None:
                self._settled(turn, receiver, keys, outcomes)
            if answer.code:
                settled = Settled(
                    number=number, ticket=ticket, outcomes=(), code=answer.code, reason=answer.reason
                )
            elif "full" in outcomes:
                full = FullError("there is no room for another dead letter")
                settled = Settled(
                    number=number, ticket=ticket, outcomes=outcomes, code=full.code, reason=str(full)
                )
            else:
                settled = Settled(number=number, ticket=ticket, outcomes=outcomes)
            self._tell(turn, connection, settled)

        def ask(turn: Turn) -> None:
            assert receiver is not None
            try:
                self.errands.ask(turn, receiver.arc, task, done, sum(map(len, message.keys)))
            except FullError as error:
                done(turn, Done(0, (), error.code, str(error)))

        if receiver is None:
            nobody = Done(0, (), UnavailableError.code, "this inbox is not being received from")
            done(turn, nobody)
            return
        task = SettleTask(
            receiver.inbox, receiver.task.consumer, keys, message.verdict, message.delay_us, message.reason
        )
        self._witness.hold(turn, receiver.inbox, receiver.task.consumer)
        ask(turn)

    def _settled(
        self, turn: Turn, receiver: _Receiver, keys: tuple[MessageKey, ...], outcomes: tuple[str, ...]
    ) -> None:
        """There is an answer, or there will be none."""
        inbox, consumer = receiver.inbox, receiver.task.consumer
        accepted = [key for key, outcome in zip(keys, outcomes, strict=False) if outcome == "accepted"]
        if accepted:
            view = self.arcs.view(receiver.arc)
            responsible = None if view is None else self._ring.number(view.responsible)
            self._witness.accepted(turn, inbox, consumer, responsible, accepted)
        self._witness.settled(turn, inbox, consumer, keys, outcomes)
        self._witness.let_go(turn, inbox, consumer)

    def _unreceive(self, turn: Turn, peer: Peer, message: Unreceive) -> None:
        receiver = self._client(peer).receivers.get(message.number)
        if receiver is not None:
            self._forget_receiver(turn, receiver)
            self._leave(turn, receiver, lost=False)

    def _client_down(self, turn: Turn, peer: Peer) -> None:
        """A connection may have a thousand receivers: they get nothing from now on, and leave one by one."""
        client = self._clients.pop(peer.connection, None)
        if client is None:
            return
        for receiver in client.receivers.values():
            del self._receivers[receiver.inbox, receiver.task.consumer]
            turn.later(partial(self._leave_later, receiver))
        for number in [n for n, each in self._confirming.items() if each.connection == peer.connection]:
            del self._confirming[number]

    def _tell(self, turn: Turn, connection: int, message: frames.Message) -> None:
        if connection in self._clients:
            turn.send(connection, frames.encode(message))

    # ---- time

    def tick(self, turn: Turn) -> None:
        if self._ring_changed:
            self._ring_changed = False
            count = self._config.views().electors + self._config.electors
            self.arcs.set_candidates(turn, partial(self._closest, count))
        self._founding.tick(turn)
        if (self._unconfirmed or self._leaving) and turn.now_us >= self._again_us:
            unconfirmed, self._unconfirmed = self._unconfirmed, {}
            for number in unconfirmed:
                if number in self._confirming:
                    self._confirm_again(turn, number)
            leaving, self._leaving = self._leaving, {}
            for came, (receiver, lost) in leaving.items():
                if came not in self._receivers:
                    self._leave(turn, receiver, lost=lost)
        self.errands.tick(turn)
        self.serving.tick(turn)
        self.arcs.tick(turn)
        self._reports.tick(turn)
        if self._begun:
            self._note_begun(turn)
        self._flush(turn)

    def _closest(self, count: int, key: bytes) -> list[Node]:
        return self._ring.closest(key, count)

    def next_deadline(self) -> int | None:
        rooms = (self.arcs, self.errands, self.serving, self._founding, self._reports)
        times = [due for room in rooms if (due := room.next_deadline()) is not None]
        if self._unconfirmed or self._leaving:
            times.append(self._again_us)
        return min(times, default=None)

    def check(self) -> None:
        if self._outgoing:
            raise BugError("something was said to other brokers, and the turn ended without sending it")
        self.arcs.check()
        self.errands.check()
        self.serving.check()


def _ignore(_turn: Turn, _done: Done, _task: object) -> None:
    """Nobody waits for it."""


def _state_of(answer: Answer) -> str:
    """What the sender is told of an outcome. What was kept before is kept."""
    return "kept" if answer.outcome == "known" else answer.outcome


def _error_from(done: Done, unknown: str) -> PostroadError:
    """Why a task was not done; `unknown` is said of one that may have been."""
    if done.code == UnavailableError.code:
        return UnavailableError(unknown + done.reason)
    return from_wire(done.code, done.reason)


def _error_of(state: str) -> PostroadError:
    if state == "full":
        return FullError("the inbox or its arc is at a limit: nothing is kept, send it again later")
    if state == "rejected":
        return UsageError("a broker refused this message before, and does so for good")
    return UnavailableError(f"the responsible broker answered {state!r}")


def _frame_bytes(message: Message) -> int:
    """What it takes in a frame, at most."""
    names = len(message.inbox.encode()) + len(message.source.encode())
    return len(message.payload) + len(message.attributes) + names + FRAME_OVERHEAD_BYTES


def _split(places: list[int], messages: list[Message]) -> list[list[int]]:
    """Parts that fit a frame between brokers."""
    bound = sum([each.size for each in messages]) + len(messages) * MAX_NAMES_BYTES
    if bound <= MAX_WISH_BYTES:
        return [places]
    parts: list[list[int]] = []
    size = 0
    for place in places:
        more = _frame_bytes(messages[place])
        if not parts or size + more > MAX_WISH_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(place)
        size += more
    return parts


def _check_name(what: str, name: str) -> None:
    if not name or not name_fits(name):
        raise PeerError(f"the name of the {what} has 1 to 255 bytes and is printable, not {name[:40]!r}")


def _check_bytes(what: str, data: bytes, size: int) -> None:
    if len(data) != size:
        raise PeerError(f"a {what} has {size} bytes, not {len(data)}")


def _check_send(message: Send) -> None:
    """PeerError unless every field is within its bounds."""
    _check_name("source", message.source)
    _check_bytes("session", message.session, SESSION_BYTES)
    if not 1 <= len(message.messages) <= MAX_TOGETHER:
        raise PeerError(f"a SEND has 1 to {MAX_TOGETHER} messages, not {len(message.messages)}")
    try:
        kind = kind_of(message.form, reliable=message.reliable)
    except UsageError as error:
        raise PeerError(str(error)) from None
    if message.together and not kind.ordered:
        raise PeerError("only transactional messages are sent together")
    last, inbox = 0, ""
    for posting in message.messages:
        if posting.inbox != inbox:
            inbox = posting.inbox
            _check_name("inbox", inbox)
        if (
            last < posting.id <= MAX_ID
            and 0 <= posting.after < posting.id
            and 0 <= posting.priority <= MAX_PRIORITY
            and 0 <= posting.delay_us <= MAX_DELAY_US
            and 0 <= posting.expires_us <= MAX_ID
            and len(posting.chain) <= MAX_CHAIN_BYTES
        ):
            last = posting.id
        else:
            raise _wrong_posting(posting, last)


def _wrong_posting(posting: Posting, last: int) -> PeerError:
    if not last < posting.id <= MAX_ID:
        return PeerError(f"ids of a session increase, up to 2^62-1: {posting.id} came after {last}")
    if not 0 <= posting.after < posting.id:
        return PeerError(f"message {posting.id} cannot come after {posting.after}")
    if not 0 <= posting.priority <= MAX_PRIORITY:
        return PeerError(f"a priority is 0 to {MAX_PRIORITY}, not {posting.priority}")
    if len(posting.chain) > MAX_CHAIN_BYTES:
        return PeerError(f"a chain of {len(posting.chain)} bytes, at most {MAX_CHAIN_BYTES}")
    return PeerError(f"a delay of {posting.delay_us} us or an expiry of {posting.expires_us} us")


def _check_settle(message: Settle) -> None:
    if not 1 <= len(message.keys) <= MAX_TOGETHER:
        raise PeerError(f"a SETTLE has 1 to {MAX_TOGETHER} keys, not {len(message.keys)}")
    if message.verdict not in ("accept", "again", "dead"):
        raise PeerError(f"a verdict is accept, again or dead, not {message.verdict[:40]!r}")
    if not 0 <= message.delay_us <= MAX_DELAY_US:
        raise PeerError(f"a delay is 0 to {MAX_DELAY_US} us, not {message.delay_us}")
    if len(message.reason) > MAX_REASON or any(len(key) > MAX_KEY_BYTES for key in message.keys):
        raise PeerError(f"a reason has at most {MAX_REASON} characters, a key {MAX_KEY_BYTES} bytes")
