"""Several messages to several applications, all or none (beyond the paper; `inbox` says why it is atomic).

The entry broker leads: every arc stages its part, the home arc decides, every arc resolves, the home forgets.
If the entry broker dies in between, the arcs ask the home themselves. Messages for one arc need none of it:
they are one write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from postroad.errors import FullError, PostroadError, UnavailableError, from_wire
from postroad.queues.arcs import Arcs
from postroad.queues.errands import Errands
from postroad.queues.inbox import Answer, Message
from postroad.queues.messages import Node
from postroad.queues.talk import DecideTask, Done, ForgetTask, PutTask, ResolveTask, StageTask
from postroad.seam.turn import Turn

Ended = Callable[[Turn, Answer | PostroadError], None]


@dataclass(slots=True)
class _Transaction:
    id: bytes
    home: int
    waiting: set[int]  # arcs that have not answered
    done: Ended | None  # None: it was told
    staged: list[int] = field(default_factory=list)
    refusal: Answer | PostroadError | None = None

    def end(self, turn: Turn, answer: Answer | PostroadError) -> None:
        """Whoever began it hears of it once, though each arc may have a reason to tell."""
        done, self.done = self.done, None
        if done is not None:
            done(turn, answer)


class Transactions:
    def __init__(self, *, me: Node, boot: int, arcs: Arcs, errands: Errands) -> None:
        self._prefix = me + boot.to_bytes(4, "big")
        self._arcs, self._errands = arcs, errands
        self._last = 0

    def begin(self, turn: Turn, messages: list[Message], done: Ended) -> None:
        """`done` is told the answer, or why there is none. FullError if too much waits for answers here."""
        by_arc: dict[int, list[Message]] = {}
        for message in messages:
            by_arc.setdefault(self._arcs.index(message.inbox), []).append(message)
        size = sum(message.size for message in messages)
        if len(by_arc) == 1:
            task = PutTask(tuple(messages), "transactional", True, False)
            self._errands.ask(turn, next(iter(by_arc)), task, partial(_put, done), size)
            return
        self._last += 1
        name = self._prefix + self._last.to_bytes(8, "big")
        home = next(iter(by_arc))
        transaction = _Transaction(name, home, set(by_arc), done)
        for arc, part in by_arc.items():
            stage = StageTask(name, home.to_bytes(4, "big"), tuple(part))
            answered = partial(self._staged, transaction, arc)
            try:
                self._errands.ask(turn, arc, stage, answered, sum(message.size for message in part))
            except FullError as error:
                transaction.waiting.discard(arc)
                transaction.refusal = error
        if not transaction.waiting:
            raise FullError("too much waits for answers at this broker")

    def _staged(self, transaction: _Transaction, arc: int, turn: Turn, done: Done, _task: object) -> None:
        transaction.waiting.discard(arc)
        if done.code:
            transaction.refusal = from_wire(done.code, done.reason)
        elif done.answers[0].outcome == "staged":
            transaction.staged.append(arc)
        elif done.answers[0].outcome != "known":
            transaction.refusal = done.answers[0]
        if transaction.waiting:
            return
        if not transaction.staged:
            transaction.end(turn, transaction.refusal or Answer("known"))
            return
        decide = DecideTask(transaction.id, transaction.refusal is None)
        self._ask(turn, transaction, transaction.home, decide, partial(self._decided, transaction))

    def _ask(
        self,
        turn: Turn,
        transaction: _Transaction,
        arc: int,
        task: DecideTask | ResolveTask | ForgetTask,
        then: Callable[[Turn, Done, object], None],
    ) -> None:
        try:
            self._errands.ask(turn, arc, task, then)
        except FullError as error:
            if not isinstance(task, ForgetTask):
                transaction.end(turn, error)

    def _decided(self, transaction: _Transaction, turn: Turn, done: Done, _task: object) -> None:
        if done.code or done.answers[0].outcome == "full":
            # The arcs ask by themselves in a while. Whoever sends again finds out.
            transaction.end(turn, UnavailableError("nobody knows whether the transaction was decided"))
            return
        commit = done.answers[0].outcome == "committed"
        if not commit and transaction.refusal is None:
            transaction.refusal = UnavailableError("the transaction took too long: send it again")
        transaction.waiting = set(transaction.staged)
        for arc in transaction.staged:
            resolved = partial(self._resolved, transaction, arc)
            self._ask(turn, transaction, arc, ResolveTask(transaction.id, commit), resolved)

    def _resolved(self, transaction: _Transaction, arc: int, turn: Turn, done: Done, _task: object) -> None:
        if done.code:
            transaction.end(turn, UnavailableError(done.reason))  # decided: its arcs come to know
            return
        transaction.waiting.discard(arc)
        if not transaction.waiting:
            transaction.end(turn, transaction.refusal or Answer("kept"))
            self._ask(turn, transaction, transaction.home, ForgetTask(transaction.id), _ignore)


def _put(done: Ended, turn: Turn, answer: Done, _task: object) -> None:
    done(turn, from_wire(answer.code, answer.reason) if answer.code else answer.answers[0])


def _ignore(_turn: Turn, _done: Done, _task: object) -> None:
    """Nobody waits for it."""
