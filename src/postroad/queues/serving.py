"""What the responsible broker of an arc does (spec Q4 to Q8, "Consumers"): it takes tasks, writes them to all
replicas, and hands messages to consumers.

Tasks that came in one turn for one arc become one write; there is no timer, and writes do not wait for each
other. A task is answered when its write is kept, never before. Consumers get only what is kept.

Where a consumer is, how many messages it has, who wants to hear of a delivery, and express messages are only
in the memory of this broker. After a change of the view consumers come again by themselves, and get again
what they had not settled; one that does not come in time has left.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from postroad.errors import BugError, FullError, TooLargeError, UnavailableError
from postroad.ids import SESSION_BYTES, MessageId, queue_message_id
from postroad.links.access import QuotaConfig, owning
from postroad.queues.arcs import Arcs
from postroad.queues.errands import Errands, Say
from postroad.queues.inbox import (
    MAX_TOGETHER,
    AcceptEach,
    Answer,
    Decide,
    Delete,
    End,
    Forget,
    Inbox,
    Inboxes,
    Join,
    Key,
    Leave,
    Message,
    Operation,
    Own,
    Put,
    Reject,
    Resolve,
    Revive,
    Stage,
    Sweep,
    encode_each,
    extent_of,
    is_forgotten,
    is_unused,
    join,
    name_of,
    principal_of,
    session_of,
    with_body,
)
from postroad.queues.messages import Chain, Kept, Node
from postroad.queues.talk import (
    MAX_DELIVERED,
    ConfirmTask,
    DeadTask,
    DecideTask,
    DeleteTask,
    Deliver,
    Delivered,
    Done,
    Elsewhere,
    EndTask,
    ForgetTask,
    Handed,
    JoinTask,
    LeaveTask,
    MessageKey,
    OwnTask,
    PutTask,
    Removed,
    ResolveTask,
    ReviveTask,
    SettleTask,
    StageTask,
    Task,
    Work,
    place_of,
)
from postroad.queues.talk import encode as encode_key
from postroad.queues.witness import Witness
from postroad.seam.turn import Turn
from postroad.units import KIB, MILLISECOND_US, SECOND_US

MAX_WISH_BYTES: Final = 700 * KIB  # of what is written at once, or delivered in one frame
MAX_CONFIRMS: Final = 65_536  # deliveries of an arc that somebody wants to hear of; then the oldest does not
SWEEP_US: Final = 30 * SECOND_US  # between two looks for sources that can be forgotten
NEVER_US: Final = 1 << 62
LOOK_US: Final = 100 * MILLISECOND_US  # between two looks for what is delayed or has expired
LOOK_MESSAGE_US: Final = 20  # as much longer for every message that is looked at
UNDECIDED_US: Final = 10 * SECOND_US  # after which a transaction that nobody decides is aborted
EXPRESS: Final = "express"
MAX_UNSEATED: Final = 4  # consumers of an arc that are given up in one turn
MAX_LISTED: Final = 1_000  # dead letters in one answer
LISTED_BYTES: Final = 1_024  # of the payload of each
MAX_ROW_BYTES: Final = 512

_NEW: Final = ("kept", "staged")

Then = Callable[[Turn, tuple[Answer, ...]], None]


@dataclass(slots=True)
class _Wish:
    """Operations that are to be written."""

    operations: tuple[Operation, ...]
    encoded: bytes
    inboxes: Iterable[str]  # that they may add messages to, or change the order of
    durable: bool
    due_us: int  # when the first of it that is delayed, expires or is to be decided is due, or NEVER_US
    then: Then


@dataclass(slots=True)
class _Seat:
    """A consumer that is here by way of an entry broker."""

    entry: Node
    join: int  # the number of the task by which it came
    window: int
    held: dict[Key, int] = field(default_factory=dict)  # what it has and did not settle -> which attempt
    until_us: int | None = None  # it was lost, and may come back until then


@dataclass(slots=True)
class _Served:
    """An arc that this broker is responsible for."""

    place: bytes
    delivery: int = 0  # the number of the last one to any consumer
    wishes: deque[_Wish] = field(default_factory=deque)
    written: dict[int, tuple[list[_Wish], list[tuple[str, int]]]] = field(default_factory=dict)
    visible: dict[str, int] = field(default_factory=dict)  # inbox -> the number below which all is kept
    seats: dict[str, dict[str, _Seat]] = field(default_factory=dict)  # inbox -> consumer -> where it is
    absent: dict[tuple[str, str], int] = field(default_factory=dict)  # consumers that did not come yet: until
    confirms: dict[tuple[str, Key], tuple[Node, int, int]] = field(default_factory=dict)
    express: dict[str, deque[Message]] = field(default_factory=dict)
    express_held: dict[tuple[str, Key], Message] = field(default_factory=dict)
    express_bytes: dict[str, int] = field(default_factory=dict)  # of those that wait and that are held
    all_express_bytes: int = 0  # of every inbox
    before: int | None = None  # the broker that was responsible before, if that was another one
    inherited: dict[str, int] = field(default_factory=dict)  # inbox -> the number below which it had all
    asking: set[bytes] = field(default_factory=set)  # transactions whose home is asked to give them up
    look_us: int | None = None  # something is delayed or expires
    sweep_us: int = 0


class Serving:
    """`say` sends to a broker, this one included."""

    def __init__(
        self,
        *,
        arcs: Arcs,
        errands: Errands,
        say: Say,
        rejoin_us: int,
        express_bytes: int,
        all_express_bytes: int,
        attempts: int,
        quotas: QuotaConfig,
        witness: Witness,
        number_of: Callable[[Node], int | None],
    ) -> None:
        self._arcs, self._errands, self._say = arcs, errands, say
        self._rejoin_us, self._attempts, self._quotas = rejoin_us, attempts, quotas
        self._max_express, self._max_all_express = express_bytes, all_express_bytes
        self._witness, self._number_of = witness, number_of
        self._served: dict[int, _Served] = {}
        self._stirred: dict[int, None] = {}  # arcs with something to write
        self._due_us = 0  # nothing is due before: no arc is looked at
        self.counters = dict.fromkeys(
            (
                "queue_kept_total",
                "queue_accepted_total",
                "queue_rejected_total",
                "queue_handed_total",
                "queue_express_total",
                "queue_full_total",
                "queue_writes_total",
                "queue_quota_refusals_total",
            ),
            0,
        )

    # ---- responsibility comes and goes

    def _begin(self, turn: Turn, arc: int) -> _Served:
        view = self._arcs.view(arc)
        assert view is not None
        served = self._served[arc] = _Served(place_of(view), sweep_us=turn.now_us + SWEEP_US)
        before = view.base.replicas[0] if view.base.replicas and not view.rescued else view.responsible
        if before != view.responsible:
            served.before = self._number_of(before)
        for name, inbox in self._arcs.machine(arc).inboxes.items():
            served.visible[name] = inbox.next_number
            if served.before is not None:
                served.inherited[name] = inbox.next_number
            for consumer in inbox.consumers:
                served.absent[name, consumer] = turn.now_us + self._rejoin_us
        self._look_at(served, turn.now_us)
        return served

    def begun(self) -> None:
        """This broker may be responsible for more arcs: what waits in them is looked at."""
        self._due_us = 0

    def _look_at(self, served: _Served, at_us: int) -> None:
        """Something that is delayed, expires or is to be decided may be due then."""
        served.look_us = at_us if served.look_us is None else min(served.look_us, at_us)
        self._due_us = min(self._due_us, at_us)

    def stopped(self, turn: Turn, arc: int) -> None:
        """What is not kept has an unknown outcome: whoever asked asks the next one, and so do consumers."""
        served = self._served.pop(arc, None)
        self._stirred.pop(arc, None)
        if served is not None:
            for name, seats in served.seats.items():
                for consumer, seat in seats.items():
                    self._say(turn, seat.entry, Removed(name, consumer))

    def unreached(self, turn: Turn, node: Node) -> None:
        for served in self._served.values():
            for seats in served.seats.values():
                for seat in seats.values():
                    if seat.entry == node and seat.until_us is None:
                        self._miss(turn, seat)

    def _miss(self, turn: Turn, seat: _Seat) -> None:
        seat.until_us = turn.now_us + self._rejoin_us
        self._due_us = min(self._due_us, seat.until_us)

    def interrupted(self, turn: Turn, node: Node) -> None:
        """Messages on their way to that broker may be lost: its consumers get again what is not settled."""
        for arc, served in list(self._served.items()):
            for name, seats in served.seats.items():
                for seat in seats.values():
                    if seat.entry == node:
                        self._give_back_express(served, name, seat)
                        seat.held.clear()
                self._pump(turn, arc, served, name)

    # ---- tasks

    def work(self, turn: Turn, sender: Node, message: Work) -> None:
        arc = message.arc
        if not self._arcs.serves(arc):
            view = self._arcs.view(arc) if 0 <= arc < self._arcs.count else None
            self._say(turn, sender, Elsewhere(message.number, arc, view))
            return
        served = self._served.get(arc) or self._begin(turn, arc)
        task, number = message.task, message.number

        def answer(turn: Turn, answers: tuple[Answer, ...]) -> None:
            self._say(turn, sender, Done(number, answers))

        excess = self._excess(arc, task)
        if excess:
            self.counters["queue_quota_refusals_total"] += 1
            self._say(turn, sender, Done(number, (), TooLargeError.code, excess))
        elif isinstance(task, PutTask | StageTask) and not self._knows_chains(arc, task.messages):
            reason = "another network's messages are not taken in yet"
            self._say(turn, sender, Done(number, (), UnavailableError.code, reason))
        elif isinstance(task, PutTask):
            self._put(turn, arc, served, sender, number, task)
        elif isinstance(task, JoinTask):
            self._join(turn, arc, served, sender, number, task, answer)
        elif isinstance(task, SettleTask):
            self._settle(turn, arc, served, sender, number, task)
        elif isinstance(task, LeaveTask):
            self._leave(turn, arc, served, sender, task, answer)
        elif isinstance(task, DeadTask):
            self._dead_letters(turn, arc, sender, number, task)
        elif isinstance(task, ReviveTask):
            revive = Revive(task.inbox, task.count, task.drop, turn.now_us)
            self._manage(turn, arc, served, task, revive, answer)
        elif isinstance(task, DeleteTask):
            self._manage(turn, arc, served, task, Delete(task.inbox, turn.now_us), answer)
        elif isinstance(task, OwnTask):
            self._manage(turn, arc, served, task, Own(task.inbox, task.owner, turn.now_us), answer)
        elif isinstance(task, StageTask):
            self._stage(turn, arc, served, sender, task, answer)
        elif isinstance(task, ConfirmTask):
            answer(turn, (Answer("done"),))
            self._confirm(turn, arc, served, sender, number, task.messages)
        else:
            operation = _operation(task, turn.now_us)
            if isinstance(operation, Resolve):
                self._resolve(arc, served, operation, answer)
            else:
                self._wish(arc, served, (operation,), answer, durable=True)

    def _excess(self, arc: int, task: Task) -> str:
        """Why the principal may not have that too, of all that this broker is responsible for; "": it may.

        What is being written is not counted yet: it may have a little more in the end.
        """
        messages: tuple[Message, ...] = ()
        if isinstance(task, PutTask | StageTask):
            messages = task.messages
            principal, names = principal_of(messages[0].source), {each.inbox for each in messages}
            size = sum([each.size for each in messages])
        elif isinstance(task, JoinTask):
            principal, names, size = owning(task.principal), {task.inbox}, 0
        else:
            return ""
        if not principal:
            return ""  # anonymous clients together have what there is
        if any(map(self._arcs.machine(arc).knows, messages)):
            return ""  # it comes again: what was kept cannot be refused
        inboxes = self._arcs.machine(arc).inboxes
        machines = [self._arcs.machine(each) for each in self._served]
        most_bytes, most_names = self._quotas.stored_bytes, self._quotas.names
        stored = sum(machine.stored.get(principal, 0) for machine in machines)
        if size and most_bytes and stored + size > most_bytes:
            return f"{principal} has {stored} bytes in queues here, at most {most_bytes} are allowed"
        if any(name not in inboxes or (not size and not inboxes[name].owner) for name in names):
            made = sum(machine.names.get(principal, 0) for machine in machines)
            if made >= most_names:
                return f"{principal} has {made} names of inboxes here, at most {most_names} are allowed"
        return ""

    def _knows_chains(self, arc: int, messages: tuple[Message, ...]) -> bool:
        """Whether the ids of these messages can be compared with those that were kept (responsibility 9)."""
        core = self._arcs.get(arc)
        assert core is not None
        known: Chain | None = None
        for message in messages:
            if message.chain != known:
                known = message.chain
                if not core.knows(known):
                    return False
        return True

    def _wish(
        self,
        arc: int,
        served: _Served,
        operations: tuple[Operation, ...],
        then: Then,
        *,
        inboxes: Iterable[str] = (),
        durable: bool,
        due_us: int = NEVER_US,
    ) -> None:
        wish = _Wish(operations, encode_each(operations), inboxes, durable, due_us, then)
        served.wishes.append(wish)
        self._stirred[arc] = None

    # ---- sending

    def _put(self, turn: Turn, arc: int, served: _Served, sender: Node, number: int, task: PutTask) -> None:
        inboxes: dict[str, None] = {}
        durable = False
        for message in task.messages:
            inboxes[message.inbox] = None
            durable = durable or message.ordered
        due_us = _due_us(task.messages)
        if task.form == EXPRESS:
            each = tuple([self._put_express(served, message) for message in task.messages])
            self._note_kept(turn, sender, task.messages, Answer("each", 0, each))
            self._say(turn, sender, Done(number, (Answer("each", 0, each),)))
            if task.confirm:
                self._confirm(turn, arc, served, sender, number, _named(task.messages))
            if due_us != NEVER_US:
                self._look_at(served, due_us)
            for name in inboxes:
                self._pump(turn, arc, served, name)
            return

        def kept(turn: Turn, answers: tuple[Answer, ...]) -> None:
            outcomes = [each.outcome for each in answers[0].each] or [answers[0].outcome] * len(task.messages)
            self.counters["queue_kept_total"] += outcomes.count("kept")
            self.counters["queue_full_total"] += outcomes.count("full")
            self._note_kept(turn, sender, task.messages, answers[0])
            self._say(turn, sender, Done(number, answers))
            if task.confirm:
                self._confirm(turn, arc, served, sender, number, _named(task.messages))

        put = Put(task.messages, turn.now_us, task.together)
        self._wish(arc, served, (put,), kept, inboxes=inboxes, durable=durable, due_us=due_us)

    def _stage(
        self, turn: Turn, arc: int, served: _Served, sender: Node, task: StageTask, answer: Then
    ) -> None:
        def staged(turn: Turn, answers: tuple[Answer, ...]) -> None:
            self._note_kept(turn, sender, task.messages, answers[0])
            answer(turn, answers)

        due_us = turn.now_us + UNDECIDED_US + 1
        self._wish(arc, served, (_operation(task, turn.now_us),), staged, durable=True, due_us=due_us)

    def _note_kept(self, turn: Turn, sender: Node, messages: tuple[Message, ...], answer: Answer) -> None:
        """Those that are new came from that entry."""
        each = answer.each or (answer,) * len(messages)
        new = [message for message, answer in zip(messages, each, strict=True) if answer.outcome in _NEW]
        if new:
            self._witness.came(turn, self._number_of(sender), new)

    def _confirm(
        self,
        turn: Turn,
        arc: int,
        served: _Served,
        sender: Node,
        number: int,
        messages: Sequence[tuple[str, Key]],
    ) -> None:
        """Somebody wants to hear what becomes of these. Of what was not kept the sender knows that."""
        for place, (name, key) in enumerate(messages):
            served.confirms[name, key] = (sender, number, place)
            while len(served.confirms) > MAX_CONFIRMS:
                del served.confirms[next(iter(served.confirms))]
        self._tell_ended(turn, arc, served, messages)

    def _tell_ended(
        self, turn: Turn, arc: int, served: _Served, messages: Iterable[tuple[str, Key]] | None = None
    ) -> None:
        """Whoever waits to hear of these messages, or of any, hears of those that do not wait any more."""
        machine = self._arcs.machine(arc)
        for name, key in list(served.confirms) if messages is None else messages:
            fate = "waits" if self._is_express(served, name, key) else machine.fate(name, key)
            if fate != "waits":
                self._tell_fate(turn, served, name, key, accepted=fate == "accepted")

    def _tell_fate(self, turn: Turn, served: _Served, name: str, key: Key, *, accepted: bool) -> None:
        wanted = served.confirms.pop((name, key), None)
        if wanted is not None:
            entry, number, place = wanted
            self._say(turn, entry, Delivered(number, place, accepted))

    @staticmethod
    def _is_express(served: _Served, name: str, key: Key) -> bool:
        waiting = served.express.get(name, ())
        return (name, key) in served.express_held or any(_key(message) == key for message in waiting)

    # ---- receiving

    def _join(
        self,
        turn: Turn,
        arc: int,
        served: _Served,
        sender: Node,
        number: int,
        task: JoinTask,
        answer: Then,
    ) -> None:
        inbox = self._arcs.machine(arc).inboxes.get(task.inbox)
        first = inbox is None or not inbox.owner

        def joined(turn: Turn, answers: tuple[Answer, ...]) -> None:
            seats = served.seats.setdefault(task.inbox, {})
            old = seats.get(task.consumer)
            repeated = old is not None and (old.entry, old.join, old.until_us) == (sender, number, None)
            if answers[0].outcome == "joined" and not repeated:
                served.absent.pop((task.inbox, task.consumer), None)
                if old is not None:
                    self._give_back_express(served, task.inbox, old)
                seats[task.consumer] = _Seat(sender, number, task.window)
            answer(turn, answers)
            self._pump(turn, arc, served, task.inbox)

        operation = Join(task.inbox, task.consumer, task.principal, task.admin, turn.now_us)
        self._wish(arc, served, (operation,), joined, inboxes=(task.inbox,), durable=first)

    def _leave(
        self, turn: Turn, arc: int, served: _Served, sender: Node, task: LeaveTask, answer: Then
    ) -> None:
        seat = served.seats.get(task.inbox, {}).get(task.consumer)
        if task.lost:
            if seat is not None and seat.entry == sender:  # else it came by way of another entry meanwhile
                self._miss(turn, seat)
            answer(turn, (Answer("left"),))
        else:
            self._unseat(turn, arc, served, task.inbox, task.consumer, answer)

    def _unseat(
        self, turn: Turn, arc: int, served: _Served, name: str, consumer: str, then: Then | None = None
    ) -> None:
        """Its sources stick to others now, and they get what it did not settle.

        One that left in good order (`then`) gave that back untouched. One that was lost worked on the first
        message of each sender at most: that one counts as tried, since it may be what ended it.
        """
        seat = served.seats.get(name, {}).pop(consumer, None)
        served.absent.pop((name, consumer), None)
        held: tuple[Key, ...] = ()
        if seat is not None:
            self._give_back_express(served, name, seat)
            if then is None:
                first = {key[:2]: key for key in reversed(seat.held)}
                held = tuple(first.values())[:MAX_TOGETHER]

        def left(turn: Turn, answers: tuple[Answer, ...]) -> None:
            if then is not None:
                then(turn, answers)
            inbox = self._arcs.machine(arc).inboxes.get(name)
            seats = served.seats.get(name, {})
            if consumer in seats and (inbox is None or consumer not in inbox.consumers):
                # It came back while it was given up: what was written last counts.
                returned = seats.pop(consumer)
                self._give_back_express(served, name, returned)
                self._say(turn, returned.entry, Removed(name, consumer))
            if held:
                self._tell_ended(turn, arc, served, [(name, key) for key in held])
            self._pump(turn, arc, served, name)

        leave = Leave(name, consumer, held, turn.now_us)
        self._wish(arc, served, (leave,), left, inboxes=(name,), durable=False)

    def _settle(
        self, turn: Turn, arc: int, served: _Served, sender: Node, number: int, task: SettleTask
    ) -> None:
        inbox = self._arcs.machine(arc).inboxes.get(task.inbox)
        durable = False
        written = [given for given in task.keys if not given.express]
        for given in written:
            place = None if inbox is None else inbox.numbers.get(given.key)
            if inbox is not None and place is not None and inbox.messages[place].ordered:
                durable = True
                break
        operations = _verdicts(task, written, turn.now_us)

        def settled(turn: Turn, answers: tuple[Answer, ...]) -> None:
            if task.verdict == "accept" and answers:
                answers = answers[0].each or answers * len(written)
            stored = iter(answers)
            outcomes = tuple(
                [
                    self._settle_express(turn, served, task, given) if given.express else next(stored)
                    for given in task.keys
                ]
            )
            seat = served.seats.get(task.inbox, {}).get(task.consumer)
            for given, outcome in zip(task.keys, outcomes, strict=True):
                self._was_settled(turn, arc, served, task.inbox, seat, given.key, outcome.outcome)
            self._say(turn, sender, Done(number, outcomes, after=(served.place, served.delivery)))
            if task.delay_us:
                self._look_at(served, turn.now_us + task.delay_us)
            self._pump(turn, arc, served, task.inbox)

        if operations:
            self._wish(arc, served, operations, settled, inboxes=(task.inbox,), durable=durable)
        else:
            settled(turn, ())

    def _was_settled(
        self, turn: Turn, arc: int, served: _Served, name: str, seat: _Seat | None, key: Key, outcome: str
    ) -> None:
        if outcome in ("accepted", "dead", "again"):
            self.counters["queue_accepted_total" if outcome == "accepted" else "queue_rejected_total"] += 1
        if outcome in ("accepted", "dead"):
            self._tell_fate(turn, served, name, key, accepted=outcome == "accepted")
        if seat is None or outcome == "early":
            return
        seat.held.pop(key, None)
        if outcome in ("again", "taken"):
            for follower in self._arcs.machine(arc).behind(name, key):
                seat.held.pop(follower, None)  # it comes again: its consumer forgets it with this answer

    # ---- express messages: in the memory of this broker, and nowhere else

    def _put_express(self, served: _Served, message: Message) -> Answer:
        name, key = message.inbox, _key(message)
        waiting = served.express.get(name)
        if (name, key) in served.express_held or (waiting and _key(waiting[-1]) == key):
            return Answer("known")
        if served.express_bytes.get(name, 0) + message.size > self._max_express:
            return Answer("full")
        if self.express_bytes + message.size > self._max_all_express:
            return Answer("full")
        served.express_bytes[name] = served.express_bytes.get(name, 0) + message.size
        served.all_express_bytes += message.size
        served.express.setdefault(name, deque()).append(message)
        self.counters["queue_express_total"] += 1
        return Answer("kept")

    def _end_express(self, served: _Served, message: Message) -> None:
        """It takes no room any more."""
        name = message.inbox
        served.express_bytes[name] -= message.size
        served.all_express_bytes -= message.size
        if not served.express_bytes[name]:
            del served.express_bytes[name]
            served.express.pop(name, None)

    def _settle_express(self, turn: Turn, served: _Served, task: SettleTask, given: MessageKey) -> Answer:
        """There are no dead letters of these: after as many attempts as others have, one is dropped."""
        message = served.express_held.get((task.inbox, given.key))
        if message is None or message.attempts + 1 != given.attempt:
            return Answer("taken")
        del served.express_held[task.inbox, given.key]
        if task.verdict == "again" and message.attempts + 1 < self._attempts:
            not_before_us = turn.now_us + task.delay_us if task.delay_us else 0
            tried = replace(message, attempts=message.attempts + 1, not_before_us=not_before_us)
            served.express.setdefault(task.inbox, deque()).append(tried)
            return Answer("again")
        self._end_express(served, message)
        return Answer("accepted" if task.verdict == "accept" else "dead")

    def _give_back_express(self, served: _Served, name: str, seat: _Seat) -> None:
        for key in reversed(list(seat.held)):
            message = served.express_held.pop((name, key), None)
            if message is not None:
                served.express.setdefault(name, deque()).appendleft(message)

    def _take_express(
        self, served: _Served, name: str, consumer: _Seat, now_us: int, limit: int
    ) -> list[Handed]:
        waiting = served.express.get(name)
        chosen: list[Handed] = []
        later: list[Message] = []
        while waiting and len(chosen) < limit:
            message = waiting.popleft()
            if message.not_before_us > now_us or 0 < message.expires_us <= now_us:
                later.append(message)
                continue
            key, attempt = _key(message), message.attempts + 1
            consumer.held[key] = attempt
            served.express_held[name, key] = message
            chosen.append(Handed(encode_key(MessageKey(key, attempt, True, message.entry)), EXPRESS, message))
        if waiting is not None:
            waiting.extendleft(reversed(later))
        return chosen

    def _drop_expired_express(self, turn: Turn, served: _Served) -> None:
        for name, waiting in list(served.express.items()):
            expired = [message for message in waiting if 0 < message.expires_us <= turn.now_us]
            if expired:
                gone = {_key(message) for message in expired}
                served.express[name] = deque(message for message in waiting if _key(message) not in gone)
            for message in expired:
                self._end_express(served, message)
                self._tell_fate(turn, served, name, _key(message), accepted=False)

    # ---- handing out

    def _pump(self, turn: Turn, arc: int, served: _Served, name: str) -> None:
        """Give the consumers of an inbox what is ready for them, as far as their windows go."""
        if self._served.get(arc) is not served:
            return
        machine, now_us = self._arcs.machine(arc), turn.now_us
        end = served.visible.get(name, 0)
        for consumer, seat in served.seats.get(name, {}).items():
            room = seat.window - len(seat.held)
            if room <= 0 or seat.until_us is not None:
                continue
            handed = self._take_express(served, name, seat, now_us, room)
            room -= len(handed)
            ready = machine.ready(name, consumer, now_us, room, held=seat.held, end=end) if room else []
            ready = self._with_bodies(turn, arc, served, name, ready)
            if ready and name in served.inherited:
                self._note_inherited(turn, machine, served, name, ready)
            for message in ready:
                key, attempt = _key(message), message.attempts + 1
                seat.held[key] = attempt
                form = "transactional" if message.ordered else "recoverable"
                given = encode_key(MessageKey(key, attempt, False, message.entry))
                handed.append(Handed(given, form, message))
            self.counters["queue_handed_total"] += len(handed)
            for part in _parts(handed):
                served.delivery += 1
                self._say(turn, seat.entry, Deliver(arc, name, consumer, served.place, part, served.delivery))

    def _with_bodies(
        self, turn: Turn, arc: int, served: _Served, name: str, ready: list[Message]
    ) -> list[Message]:
        """Up to the first whose body is to be read from disk: nothing passes it."""
        for place, message in enumerate(ready):
            extent = extent_of(message)
            if extent is None:
                continue
            record = self._arcs.bodies.get(arc, extent.tick)
            if record is None:
                then = partial(self._body_was_read, arc, served, name)
                self._arcs.bodies.load(turn, arc, extent.tick, then)
                return ready[:place]
            ready[place] = with_body(message, record)
        return ready

    def _body_was_read(self, arc: int, served: _Served, name: str, turn: Turn, record: bytes | None) -> None:
        if record is None and self._served.get(arc) is served:
            self._look_at(served, turn.now_us + SECOND_US)  # where there is no other replica
            self._arcs.doubt(turn, arc)
        elif record is not None:
            self._pump(turn, arc, served, name)

    def _note_inherited(
        self, turn: Turn, machine: Inboxes, served: _Served, name: str, ready: list[Message]
    ) -> None:
        """These go out; those that were here before this broker served came from the one that did."""
        numbers, first = machine.inboxes[name].numbers, served.inherited[name]
        old = [message for message in ready if numbers[_key(message)] < first]
        if old:
            self._witness.came(turn, served.before, old)
        elif next(iter(machine.inboxes[name].messages), first) >= first:
            del served.inherited[name]  # none of them is left

    def kept(self, turn: Turn, arc: int, kept: Kept) -> None:
        served = self._served.get(arc)
        written = None if served is None else served.written.pop(kept.number, None)
        if served is None or written is None:
            return
        wishes, touched = written
        for name, number in touched:
            served.visible[name] = max(served.visible.get(name, 0), number)
        assert isinstance(kept.answer, tuple)
        position = 0
        for wish in wishes:
            end = position + len(wish.operations)
            wish.then(turn, kept.answer[position:end])
            position = end
        for name, _ in touched:
            self._pump(turn, arc, served, name)
        if served.wishes:
            self._stirred[arc] = None

    # ---- writing

    def _write(self, turn: Turn, arc: int, served: _Served) -> None:
        core = self._arcs.get(arc)
        assert core is not None
        while served.wishes and not core.refusal():
            taken: list[_Wish] = []
            size = 0
            while served.wishes and (not taken or size + len(served.wishes[0].encoded) <= MAX_WISH_BYTES):
                wish = served.wishes.popleft()
                taken.append(wish)
                size += len(wish.encoded)
            operations = [operation for wish in taken for operation in wish.operations]
            durable = any(wish.durable for wish in taken)
            self.counters["queue_writes_total"] += 1
            # A write may be kept within `submit` where this broker is the only replica.
            number = core.applied + 1
            touched: list[tuple[str, int]] = []
            served.written[number] = (taken, touched)
            inboxes = self._arcs.machine(arc).inboxes
            names = {name: inboxes.get(name) for wish in taken for name in wish.inboxes}
            note = partial(_note_numbers, served, names, touched)
            payload = join(len(operations), [wish.encoded for wish in taken])
            self._arcs.submit(turn, arc, payload, operations, durable=durable, applied=note)
            due_us = min(wish.due_us for wish in taken)
            if due_us != NEVER_US:
                self._look_at(served, due_us)

    # ---- dead letters

    def _dead_letters(self, turn: Turn, arc: int, sender: Node, number: int, task: DeadTask) -> None:
        inbox = self._arcs.machine(arc).inboxes.get(task.inbox)
        if inbox is None:
            self._say(turn, sender, Done(number, (Answer("none"),)))
        elif inbox.owner and inbox.owner != task.principal and not task.admin:
            self._say(turn, sender, Done(number, (Answer("denied"),)))
        else:
            count = len(inbox.dead)

            def listed(turn: Turn, rows: list[dict[str, object]]) -> None:
                body = msgspec.json.encode({"dead": rows, "more": len(rows) < count})
                self._say(turn, sender, Done(number, (Answer("listed", count),), body=body))

            self._list_dead(arc, deque(inbox.dead[:MAX_LISTED]), [], 0, listed, turn, None)

    def _list_dead(
        self,
        arc: int,
        dead: deque[Message],
        rows: list[dict[str, object]],
        size: int,
        then: Callable[[Turn, list[dict[str, object]]], None],
        turn: Turn,
        record: bytes | None,
    ) -> None:
        """Add rows until all are there or fill a frame. `record`: what was read for the first of them."""
        while dead:
            message = dead[0]
            extent = extent_of(message)
            if extent is not None:
                body = record or self._arcs.bodies.get(arc, extent.tick)
                if body is None:
                    then_go_on = partial(self._read_dead, arc, dead, rows, size, then)
                    self._arcs.bodies.load(turn, arc, extent.tick, then_go_on)
                    return
                message, record = with_body(message, body), None
            row = _dead_row(message)
            size += len(str(row["payload"])) + len(message.reason) + MAX_ROW_BYTES
            if size > MAX_WISH_BYTES // 2:
                break
            rows.append(row)
            dead.popleft()
        then(turn, rows)

    def _read_dead(
        self,
        arc: int,
        dead: deque[Message],
        rows: list[dict[str, object]],
        size: int,
        then: Callable[[Turn, list[dict[str, object]]], None],
        turn: Turn,
        record: bytes | None,
    ) -> None:
        """A body that is gone or cannot be read is listed as empty: the letter may be no more."""
        if record is None:
            dead[0] = with_body(dead[0], b"")
        self._list_dead(arc, dead, rows, size, then, turn, record)

    def _manage(
        self,
        turn: Turn,
        arc: int,
        served: _Served,
        task: ReviveTask | DeleteTask | OwnTask,
        operation: Operation,
        answer: Then,
    ) -> None:
        """What an administrator may do, and the owner of the name; where it has none, whoever receives."""
        inbox = self._arcs.machine(arc).inboxes.get(task.inbox)
        owner = "" if inbox is None else inbox.owner
        allowed = task.admin or (owner == task.principal if owner else not isinstance(task, OwnTask))
        if not allowed:
            answer(turn, (Answer("denied"),))
            return

        def done(turn: Turn, answers: tuple[Answer, ...]) -> None:
            answer(turn, answers)
            if isinstance(task, DeleteTask):
                self._tell_ended(turn, arc, served)

        self._wish(arc, served, (operation,), done, inboxes=(task.inbox,), durable=True)

    # ---- time

    def tick(self, turn: Turn) -> None:
        if turn.now_us >= self._due_us:
            self._look_around(turn)
        while self._stirred:
            arc = next(iter(self._stirred))
            del self._stirred[arc]
            served = self._served.get(arc)
            if served is not None and self._arcs.serves(arc):
                self._write(turn, arc, served)

    def _look_around(self, turn: Turn) -> None:
        for arc in [arc for arc, _ in self._arcs.hosted() if self._arcs.serves(arc)]:
            served = self._served.get(arc)
            if served is None:
                if not self._arcs.machine(arc).inboxes:
                    continue
                served = self._begin(turn, arc)
            self._look_at_consumers(turn, arc, served)
            if served.look_us is not None and served.look_us <= turn.now_us:
                self._look_at_times(turn, arc, served)
            if served.sweep_us <= turn.now_us:
                self._look_at_sources(turn, arc, served)
        self._due_us = min(self._times(), default=NEVER_US)

    def _look_at_consumers(self, turn: Turn, arc: int, served: _Served) -> None:
        """A few in a turn: thousands may have gone at once. The others are due in the next one."""
        gone = (each for each, until in served.absent.items() if until <= turn.now_us)
        for name, consumer in list(islice(gone, MAX_UNSEATED)):
            self._unseat(turn, arc, served, name, consumer)
        late = (
            (name, consumer, seat)
            for name, seats in served.seats.items()
            for consumer, seat in seats.items()
            if seat.until_us is not None and seat.until_us <= turn.now_us
        )
        for name, consumer, seat in list(islice(late, MAX_UNSEATED)):
            self._unseat(turn, arc, served, name, consumer)
            self._say(turn, seat.entry, Removed(name, consumer))

    def _look_at_times(self, turn: Turn, arc: int, served: _Served) -> None:
        """What was delayed may be ready, what expires may be dead."""
        now_us = turn.now_us
        machine = self._arcs.machine(arc)
        due: list[int] = []
        expired = False
        count = 0
        for inbox in machine.inboxes.values():
            count += len(inbox.messages)
            for message in inbox.messages.values():
                due += [time for time in (message.not_before_us, message.expires_us) if time > now_us]
                expired |= 0 < message.expires_us <= now_us
        self._drop_expired_express(turn, served)
        for waiting in served.express.values():
            for message in waiting:
                due += [time for time in (message.not_before_us, message.expires_us) if time > now_us]
        if machine.staged:
            due.append(now_us + UNDECIDED_US)
        # Where much waits, a look takes long: it is rarer.
        pause_us = LOOK_US + count * LOOK_MESSAGE_US
        served.look_us = max(min(due), now_us + pause_us) if due else None
        if expired:
            self._sweep(arc, served, now_us)
        for name in list(served.seats):
            self._pump(turn, arc, served, name)
        for stage in machine.undecided(now_us - UNDECIDED_US):
            self._decide(turn, arc, served, stage)

    def _decide(self, turn: Turn, arc: int, served: _Served, stage: Stage) -> None:
        """Whoever began this transaction does not end it: its home is asked to give it up."""
        name, home = stage.transaction, int.from_bytes(stage.home, "big")
        if name in served.asking:
            return

        def decided(turn: Turn, done: Done, _task: object) -> None:
            served.asking.discard(name)
            now = self._served.get(arc)
            if now is not None and done.answers and done.answers[0].outcome in ("committed", "aborted"):
                commit = done.answers[0].outcome == "committed"
                self._resolve(arc, now, Resolve(name, commit, turn.now_us), _nothing)

        served.asking.add(name)
        try:
            self._errands.ask(turn, home, DecideTask(name, False), decided)
        except FullError:
            served.asking.discard(name)  # the next look asks again

    def _resolve(self, arc: int, served: _Served, resolve: Resolve, then: Then) -> None:
        stage = self._arcs.machine(arc).staged.get(resolve.transaction)
        messages = () if stage is None else stage.messages
        inboxes = dict.fromkeys(message.inbox for message in messages)
        due_us = _due_us(messages)
        self._wish(arc, served, (resolve,), then, inboxes=inboxes, durable=True, due_us=due_us)

    def _look_at_sources(self, turn: Turn, arc: int, served: _Served) -> None:
        now_us = turn.now_us
        served.sweep_us = now_us + SWEEP_US
        for inbox in self._arcs.machine(arc).inboxes.values():
            if is_unused(inbox) or any(is_forgotten(source, now_us) for source in inbox.sources.values()):
                self._sweep(arc, served, now_us)
                return

    def _sweep(self, arc: int, served: _Served, now_us: int) -> None:
        inboxes = self._arcs.machine(arc).inboxes

        def swept(turn: Turn, _answers: tuple[Answer, ...]) -> None:
            self._tell_ended(turn, arc, served)

        self._wish(arc, served, (Sweep(now_us),), swept, inboxes=inboxes, durable=False)

    def _times(self) -> list[int]:
        times: list[int] = []
        for arc, served in self._served.items():
            if not self._arcs.serves(arc):
                continue  # it hears of that soon
            times.append(served.sweep_us)
            if served.look_us is not None:
                times.append(served.look_us)
            times += served.absent.values()
            times += [
                seat.until_us
                for seats in served.seats.values()
                for seat in seats.values()
                if seat.until_us is not None
            ]
        return times

    def next_deadline(self) -> int | None:
        return None if self._due_us == NEVER_US else self._due_us

    def check(self) -> None:
        """BugError if something that always holds does not."""
        if min(self._times(), default=NEVER_US) < self._due_us:
            raise BugError("something of a queue is due before anybody looks")
        for served in self._served.values():
            messages = [message for waiting in served.express.values() for message in waiting]
            size = sum(message.size for message in (*messages, *served.express_held.values()))
            if not size == sum(served.express_bytes.values()) == served.all_express_bytes:
                raise BugError(f"{size} bytes of express messages are counted as {served.all_express_bytes}")

    # ---- inspection

    def rows(self) -> Iterable[tuple[int, str]]:
        """(arc, inbox) of all inboxes that this broker is responsible for, by name."""
        return sorted(
            (
                (arc, name)
                for arc, _ in self._arcs.hosted()
                if self._arcs.serves(arc)
                for name in {**self._arcs.machine(arc).inboxes, **self._express_names(arc)}
            ),
            key=lambda each: each[1],
        )

    def _express_names(self, arc: int) -> dict[str, None]:
        served = self._served.get(arc)
        return {} if served is None else dict.fromkeys(served.express_bytes)

    @property
    def express_bytes(self) -> int:
        """Of all express messages that are here."""
        return sum(served.all_express_bytes for served in self._served.values())

    def express_waiting(self, arc: int, name: str) -> int:
        served = self._served.get(arc)
        return 0 if served is None else len(served.express.get(name, ()))


def _note_numbers(
    served: _Served, before: dict[str, Inbox | None], touched: list[tuple[str, int]], machine: Inboxes
) -> None:
    """How far the inboxes of a write had come with it. One that is gone begins anew if it comes again, be it
    with this very write: what was written before says nothing about it."""
    gone = {name for name, old in before.items() if old is not None and machine.inboxes.get(name) is not old}
    for name in gone:
        served.visible.pop(name, None)
        served.inherited.pop(name, None)
    if gone:
        for _, others in served.written.values():
            others[:] = [each for each in others if each[0] not in gone]
    touched += [(name, machine.inboxes[name].next_number) for name in before if name in machine.inboxes]


def _dead_row(message: Message) -> dict[str, object]:
    session = session_of(message.source)
    known = len(session) == SESSION_BYTES  # else whoever sent it made it up, and it has no id for people
    return {
        "source": name_of(message.source),
        "session": session.hex(),
        "id": str(MessageId.from_bytes(queue_message_id(session, message.id))) if known else "",
        "number": message.id,
        "reason": message.reason,
        "attempts": message.attempts,
        "sent_us": message.sent_us,
        "size": len(message.payload),
        "cut": len(message.payload) > LISTED_BYTES,
        "payload": base64.b64encode(message.payload[:LISTED_BYTES]).decode(),
    }


def _nothing(_turn: Turn, _answers: tuple[Answer, ...]) -> None:
    """Nobody waits for it."""


def _key(message: Message) -> Key:
    return (message.chain, message.source, message.id)


def _named(messages: Iterable[Message]) -> list[tuple[str, Key]]:
    return [(message.inbox, _key(message)) for message in messages]


def _due_us(messages: Iterable[Message]) -> int:
    """When the first of them is delayed no longer, or expires."""
    times = [time for each in messages for time in (each.not_before_us, each.expires_us) if time]
    return min(times, default=NEVER_US)


def _operation(task: object, now_us: int) -> Operation:
    """Tasks that are one operation, and answered with its answer."""
    match task:
        case EndTask():
            return End(task.inbox, task.source, now_us)
        case StageTask():
            return Stage(task.transaction, task.home, task.messages, now_us)
        case DecideTask():
            return Decide(task.transaction, task.commit, now_us)
        case ResolveTask():
            return Resolve(task.transaction, task.commit, now_us)
        case ForgetTask():
            return Forget(task.transaction)
        case _:
            raise TypeError(f"{task} is not one operation")


def _verdicts(task: SettleTask, written: list[MessageKey], now_us: int) -> tuple[Operation, ...]:
    if task.verdict == "accept":
        keys = tuple([given.key for given in written])
        return (AcceptEach(task.inbox, keys, task.consumer, now_us),) if keys else ()
    inbox, consumer, reason, dead = task.inbox, task.consumer, task.reason, task.verdict == "dead"
    not_before_us = now_us + task.delay_us if task.delay_us else 0
    return tuple(
        Reject(inbox, given.key, consumer, reason, dead, not_before_us, now_us, given.attempt)
        for given in written
    )


def _parts(handed: list[Handed]) -> Iterable[tuple[Handed, ...]]:
    """As many as fit a frame."""
    part: list[Handed] = []
    size = 0
    for each in handed:
        if part and (len(part) >= MAX_DELIVERED or size + each.message.size > MAX_WISH_BYTES):
            yield tuple(part)
            part, size = [], 0
        part.append(each)
        size += each.message.size + len(each.key)
    if part:
        yield tuple(part)
