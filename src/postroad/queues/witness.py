"""What a broker saw of queue messages: for traces (spec T4, "queues" among the delivery modes) and reports.

The way of a message is the entry that took it from its sender, the broker responsible for the inbox, and the
consumer's entry; replicas keep copies and are no part of it. An accept is the delivery. A broker that took
over an inbox got its messages from the one before it, which is noted when it hands them out.

An id has the sender's session in place of a publisher and a broker, so a trace asks all brokers.

Reports (spec P4, P7) are of the two ends: the sender's entry tells what is kept, the consumer's entry what
became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from postroad.ids import consumer_name, is_session, queue_message_id
from postroad.queues.inbox import Message, name_of, session_of
from postroad.queues.talk import MessageKey
from postroad.seam.reports import ACCEPTED, DEAD, KEPT, REJECTED, QueueEvents
from postroad.seam.turn import Turn
from postroad.tracking.strategies import Tracking

Report = Callable[[Sequence[QueueEvents], int], None]


class Witness:
    """`me` is this broker's number; `tracking`: None where nothing is recorded. `reporting` says whether
    anybody wants what `report` is told."""

    def __init__(
        self, *, me: int, tracking: Tracking | None, reporting: Callable[[], bool], report: Report
    ) -> None:
        self.me = me
        self._reporting, self._report = reporting, report
        self._tracking = tracking
        self._attached: dict[str, int] = {}  # consumers, and how many hold them: being here, each settlement

    def sent(self, turn: Turn, session: bytes, messages: Iterable[Message]) -> None:
        """A client connected here sent these, in that session."""
        if self._tracking is not None and is_session(session):
            ids = b"".join([queue_message_id(session, message.id) for message in messages])
            self._tracking.noted.append((turn.now_us, ids, 0, ()))

    def came(self, turn: Turn, broker: int | None, messages: Iterable[Message]) -> None:
        """These came from that broker, None if nobody knows its number."""
        if self._tracking is None or broker is None or broker == self.me:
            return
        for entry, ids in _by_entry((message.entry, message.source, message.id) for message in messages):
            self._tracking.routed(entry, broker, ids, turn.now_us)

    def accepted(
        self, turn: Turn, inbox: str, consumer: str, broker: int | None, keys: Iterable[MessageKey]
    ) -> None:
        """That consumer of this broker accepted these; the other broker is responsible for the inbox."""
        if self._tracking is None:
            return
        for entry, ids in _by_entry((each.entry, each.key[1], each.key[2]) for each in keys):
            # The message may have come through another broker, from which the consumer moved here.
            if broker is not None and broker != self.me:
                self._tracking.routed(entry, broker, ids, turn.now_us)
            self._tracking.delivered(entry, [consumer_name(inbox, consumer)], ids, turn.now_us)

    # ---- reports

    @property
    def reports(self) -> bool:
        """Whether anybody wants to hear of what follows."""
        return self._reporting()

    def kept(self, turn: Turn, form: str, messages: Iterable[Message]) -> None:
        """The sender of these is told so."""
        if not self.reports:
            return
        ids_by_group: dict[tuple[str, str, int], list[bytes]] = {}
        for message in messages:
            session = session_of(message.source)
            if is_session(session):
                group = (message.inbox, name_of(message.source), message.expires_us)
                ids_by_group.setdefault(group, []).append(queue_message_id(session, message.id))
        self._report(
            [
                QueueEvents(KEPT, inbox, source, form, turn.now_us, b"".join(ids), expires_us)
                for (inbox, source, expires_us), ids in ids_by_group.items()
            ],
            turn.now_us,
        )

    def settled(
        self, turn: Turn, inbox: str, consumer: str, keys: Sequence[MessageKey], outcomes: Sequence[str]
    ) -> None:
        """The consumer is told so."""
        if not self.reports:
            return
        ids_by_outcome: dict[str, list[bytes]] = {}
        for given, outcome in zip(keys, outcomes, strict=False):
            session = session_of(given.key[1])
            if outcome in (ACCEPTED, REJECTED, DEAD) and is_session(session):
                ids_by_outcome.setdefault(outcome, []).append(queue_message_id(session, given.key[2]))
        self._report(
            [
                QueueEvents(outcome, inbox, consumer, "", turn.now_us, b"".join(ids))
                for outcome, ids in ids_by_outcome.items()
            ],
            turn.now_us,
        )

    # ---- who was there

    def hold(self, turn: Turn, inbox: str, consumer: str) -> None:
        """The consumer is here, or an answer about something that it accepted is still to come."""
        name = consumer_name(inbox, consumer)
        count = self._attached.get(name, 0)
        self._attached[name] = count + 1
        if not count and self._tracking is not None:
            self._tracking.attached(name, turn.now_us)

    def let_go(self, turn: Turn, inbox: str, consumer: str) -> None:
        name = consumer_name(inbox, consumer)
        self._attached[name] -= 1
        if not self._attached[name]:
            del self._attached[name]
            if self._tracking is not None:
                self._tracking.detached(name, turn.now_us)


def _by_entry(messages: Iterable[tuple[int, str, int]]) -> Iterable[tuple[int, bytes]]:
    """The ids of (entry, source, number), by entry. Without one, or a session, they are of an earlier
    version: they are not tracked."""
    ids_by_entry: dict[int, list[bytes]] = {}
    for entry, source, number in messages:
        session = session_of(source)
        if entry and is_session(session):
            ids_by_entry.setdefault(entry, []).append(queue_message_id(session, number))
    return [(entry, b"".join(ids)) for entry, ids in ids_by_entry.items()]
