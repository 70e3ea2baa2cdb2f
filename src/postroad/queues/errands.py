"""What this broker wants done by whoever is responsible for an arc.

Spec Q4: the source broker keeps a copy in memory until it is answered; nobody on the way stores anything.

Tasks of an arc go to its responsible broker in their order, over one connection, several at a time. Whoever
is asked and is not responsible says whom it takes for it. After a change of the view everything that is not
answered goes to the new responsible broker, in its order, under the same ids. A task that came before one
which it has to follow (`gap`) is said again once all before it are answered.

No answer can be lost for good: an arc with a task that is not answered always has a time at which all that
was not said, or not answered for a while, is said again (`again_us`). Only the broker that was asked last can
answer: what another one says late was said before others did what it does not know of. The number of a task
is of one start of this broker, so that no answer to an earlier one fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from postroad.errors import BugError, FullError, PeerError, UnavailableError
from postroad.queues.arcs import Arcs
from postroad.queues.inbox import Answer
from postroad.queues.messages import STARTED, Ask, Node, View
from postroad.queues.talk import (
    MAX_HOPS,
    NO_CHAIN,
    About,
    Done,
    Elsewhere,
    EndTask,
    ForgetTask,
    LeaveTask,
    Locate,
    PutTask,
    Said,
    SettleTask,
    Task,
    Work,
)
from postroad.ring.ring import Ring
from postroad.seam.turn import Turn
from postroad.units import MILLISECOND_US, SECOND_US

MAX_ERRANDS: Final = 65_536
RESEND_US: Final = SECOND_US  # without an answer, a task is said again
SEARCH_FIRST_US: Final = 50 * MILLISECOND_US  # between two questions who is responsible, doubled each time
SEARCH_LAST_US: Final = SECOND_US
START_BITS: Final = 31  # of a number, behind the start of the broker
ERRAND_BYTES: Final = 512  # what a task takes beside its messages

Answered = Callable[[Turn, Done, Task | None], None]  # the task as it was said: with its chain
Say = Callable[[Turn, Node, Said], bool]


@dataclass(slots=True)
class _Errand:
    number: int
    task: Task | None  # None: all that is wanted is a view of the arc
    size: int
    done: Answered
    until_us: int
    sent_us: int | None = None  # None: not since the last change
    asked: Node = b""  # the last broker that it was said to
    stamped: bool = False  # its messages have their chain
    gapped: bool = False  # it came too early


@dataclass(slots=True)
class _Route:
    """To the broker that is responsible for one arc."""

    again_us: int  # when what is not said or not answered is said again
    errands: dict[int, _Errand] = field(default_factory=dict)  # by number, in their order
    searching: bool = False  # it was asked who is responsible, and nothing was answered since
    pause_us: int = SEARCH_FIRST_US


class Errands:
    """`say` sends to a broker, this one included; False if there is no way to it now."""

    def __init__(
        self, *, me: Node, boot: int, arcs: Arcs, ring: Ring, say: Say, max_bytes: int, answer_us: int
    ) -> None:
        self._me, self._arcs, self._ring, self._say = me, arcs, ring, say
        self._max_bytes, self._answer_us = max_bytes, answer_us
        self._routes: dict[int, _Route] = {}  # by arc: those with something that is not answered
        self._arc_of: dict[int, int] = {}  # number of a task -> its arc
        self._bytes = 0
        self._now_us = 0
        self._last_number = boot << START_BITS
        self.counters = {"queue_errands_total": 0, "queue_errands_repeated_total": 0}

    # ---- asking

    def find(self, turn: Turn, arc: int, done: Answered) -> None:
        """`done` is told once a view of the arc is known here, or that none is found in time. FullError."""
        self.ask(turn, arc, None, done)

    def next_number(self) -> int:
        """Of a task that is asked for next: the answer may be here before `ask` returns."""
        self._last_number += 1
        return self._last_number

    def ask(
        self,
        turn: Turn,
        arc: int,
        task: Task | None,
        done: Answered,
        size: int = 0,
        *,
        number: int | None = None,
    ) -> int:
        """`done` is told the answer, in time or never found. FullError if too much waits for answers."""
        size += ERRAND_BYTES
        if len(self._arc_of) >= MAX_ERRANDS or self._bytes + size > self._max_bytes:
            raise FullError(f"{self._bytes} bytes wait for answers here, at most {self._max_bytes} may")
        if number is None:
            number = self.next_number()
        route = self._routes.setdefault(arc, _Route(turn.now_us + RESEND_US))
        errand = _Errand(number, task, size, done, turn.now_us + self._answer_us)
        route.errands[number] = errand
        self._arc_of[number] = arc
        self._bytes += size
        self.counters["queue_errands_total"] += 1
        self._send(turn, arc, route, errand)
        return number

    def _send(self, turn: Turn, arc: int, route: _Route, errand: _Errand) -> None:
        view, task = self._arcs.view(arc), errand.task
        if view is not None and task is None:
            self._forget(arc, errand)
            errand.done(turn, Done(errand.number, ()), None)
            return
        if view is None or task is None or view.stage != STARTED:
            errand.sent_us = None
            self._search(turn, arc, route)
            return
        if not errand.stamped:
            errand.stamped = True
            if isinstance(task, PutTask) and any(message.chain is NO_CHAIN for message in task.messages):
                stamped = tuple(
                    replace(message, chain=view.chain) if message.chain is NO_CHAIN else message
                    for message in task.messages
                )
                task = errand.task = replace(task, messages=stamped)
        if errand.sent_us is not None:
            self.counters["queue_errands_repeated_total"] += 1
        errand.sent_us, errand.asked = turn.now_us, view.responsible
        if not self._say(turn, view.responsible, Work(errand.number, arc, task)):
            errand.sent_us = None
            self._search(turn, arc, route)

    # ---- finding the responsible broker

    def _search(self, turn: Turn, arc: int, route: _Route) -> None:
        """Something cannot be said now, or is not answered."""
        if not route.searching:
            route.searching, route.pause_us = True, SEARCH_FIRST_US
            self._locate(turn, arc, route)

    def _locate(self, turn: Turn, arc: int, route: _Route) -> None:
        route.again_us = turn.now_us + route.pause_us
        route.pause_us = min(2 * route.pause_us, SEARCH_LAST_US)
        key = self._arcs.key(arc)
        view = self._arcs.view(arc)
        known = set() if view is None else {*view.electors, *view.replicas}
        for node in sorted({*self._ring.closest(key, 3), *known} - {self._me}):
            self._say(turn, node, About(arc, Ask()))
        following = self._ring.route(key)
        if following is not None:
            self._say(turn, following, Locate(arc, self._me, 0))

    def pass_on(self, turn: Turn, message: Locate) -> bool:
        """False: this broker is the closest one to the arc, or there is no such arc."""
        if message.arc >= self._arcs.count:
            return False
        following = self._ring.route(self._arcs.key(message.arc))
        if following is None or not 0 <= message.hops < MAX_HOPS:
            return False
        return self._say(turn, following, replace(message, hops=message.hops + 1))

    # ---- answers

    def answered(self, turn: Turn, sender: Node, message: Done) -> None:
        arc = self._arc_of.get(message.number)
        if arc is None:
            return
        route = self._routes[arc]
        errand = route.errands[message.number]
        if errand.asked != sender:
            return
        if not message.code and not _answers(errand.task, message.answers):
            raise PeerError(
                f"{len(message.answers)} answers to a {type(errand.task).__name__}, which has others"
            )
        if self._came_early(message) and self._has_earlier(route, errand):
            errand.gapped = True
            return
        if message.code == UnavailableError.code:
            errand.sent_us = None  # said again when it is known to whom, or in a while
            self._search(turn, arc, route)
            return
        route.searching = False
        self._forget(arc, errand)
        errand.done(turn, message, errand.task)
        self._send_gapped(turn, arc)

    @staticmethod
    def _came_early(message: Done) -> bool:
        return any(
            answer.outcome == "gap" or any(each.outcome == "gap" for each in answer.each)
            for answer in message.answers
        )

    @staticmethod
    def _has_earlier(route: _Route, errand: _Errand) -> bool:
        return next(iter(route.errands)) != errand.number

    def _send_gapped(self, turn: Turn, arc: int) -> None:
        """Those that came too early, as far as nothing before them is unanswered."""
        route = self._routes.get(arc)
        if route is None:
            return
        for errand in list(route.errands.values()):
            if not errand.gapped:
                return
            errand.gapped = False
            self._send(turn, arc, route, errand)

    def _forget(self, arc: int, errand: _Errand) -> None:
        route = self._routes[arc]
        del route.errands[errand.number], self._arc_of[errand.number]
        self._bytes -= errand.size
        if not route.errands:
            del self._routes[arc]

    def elsewhere(self, turn: Turn, sender: Node, message: Elsewhere) -> None:
        arc = self._arc_of.get(message.number)
        if arc is None or arc != message.arc:
            return
        route = self._routes[arc]
        route.errands[message.number].sent_us = None
        if message.view is not None:
            self._arcs.learn(turn, sender, arc, message.view)  # `moved` sends it on if that is news
        view = self._arcs.view(arc)
        if arc in self._routes and (view is None or view.responsible == sender or view.stage != STARTED):
            self._search(turn, arc, self._routes[arc])

    def moved(self, turn: Turn, arc: int, view: View) -> None:
        """Another view is known: what is not answered goes to its responsible broker."""
        route = self._routes.get(arc)
        if route is None or view.stage != STARTED:
            return
        route.searching = False
        for errand in list(route.errands.values()):
            if errand.number in route.errands:
                errand.gapped = False
                self._send(turn, arc, route, errand)

    def interrupted(self, turn: Turn, node: Node) -> None:
        """Something that was said to that broker may be lost."""
        for arc, route in list(self._routes.items()):
            view = self._arcs.view(arc)
            if view is not None and view.responsible == node:
                for errand in list(route.errands.values()):
                    if errand.number in route.errands:
                        self._send(turn, arc, route, errand)

    def unreached(self, turn: Turn, node: Node) -> None:
        for arc, route in list(self._routes.items()):
            view = self._arcs.view(arc)
            if view is not None and view.responsible == node:
                for errand in route.errands.values():
                    errand.sent_us = None
                self._search(turn, arc, route)

    # ---- time

    def _silence(self) -> str:
        if self._arcs.knows_chain:
            return "nobody answered in time"
        return (
            "nobody answered in time, and this broker knows of no queues: link it with others, or found them "
            "with `postroad queues found`"
        )

    def tick(self, turn: Turn) -> None:
        now_us = self._now_us = turn.now_us
        for arc, route in list(self._routes.items()):
            while route.errands:
                errand = next(iter(route.errands.values()))
                if errand.until_us > now_us:
                    break  # all have the same time, so the first is due first
                self._forget(arc, errand)
                late_answer = Done(errand.number, (), UnavailableError.code, self._silence())
                errand.done(turn, late_answer, errand.task)
            if self._routes.get(arc) is route and route.again_us <= now_us:
                self._ask_again(turn, arc, route)

    def _ask_again(self, turn: Turn, arc: int, route: _Route) -> None:
        late_us = turn.now_us - RESEND_US
        waiting = [
            errand for errand in route.errands.values() if errand.sent_us is None or errand.sent_us <= late_us
        ]
        if not waiting:
            oldest_us = min(errand.sent_us or 0 for errand in route.errands.values())
            route.searching, route.again_us = False, oldest_us + RESEND_US
            return
        if route.searching:
            self._locate(turn, arc, route)
        else:
            self._search(turn, arc, route)
        # Whoever is asked and not responsible says so; it may be the same broker as before.
        for errand in waiting:
            if errand.number in route.errands:
                self._send(turn, arc, route, errand)

    def next_deadline(self) -> int | None:
        times: list[int] = []
        for route in self._routes.values():
            first = next(iter(route.errands.values()))
            times += [first.until_us, route.again_us]  # all have the same time, so the first is due first
        return min(times, default=None)

    def check(self) -> None:
        """BugError if a task waits that nobody says again."""
        for arc, route in self._routes.items():
            if not route.errands:
                raise BugError(f"arc {arc} has no task that waits")
            if route.again_us > self._now_us + max(RESEND_US, SEARCH_LAST_US):
                raise BugError(
                    f"tasks of arc {arc} are said again only in {route.again_us - self._now_us} us"
                )

    def metrics(self) -> dict[str, int]:
        return {**self.counters, "queue_errands": len(self._arc_of), "queue_errand_bytes": self._bytes}


def _answers(task: Task | None, answers: tuple[Answer, ...]) -> bool:
    """Whether there are as many as whoever asked goes on to read."""
    match task:
        case LeaveTask() | EndTask() | ForgetTask():
            return True  # nobody reads them
        case SettleTask():
            return len(answers) == len(task.keys)
        case PutTask() if len(answers) == 1 and answers[0].outcome == "each":
            return len(answers[0].each) == len(task.messages)
    return len(answers) == 1
