"""Errands alone: no answer is lost for good, and no wrong one is taken (spec Q4)."""

from __future__ import annotations

from tests.worlds.turns import Turns

from postroad.errors import UnavailableError
from postroad.queues.errands import RESEND_US, SEARCH_FIRST_US, Errands
from postroad.queues.inbox import Answer
from postroad.queues.messages import STARTED, Base, Chain, Node, View
from postroad.queues.talk import Done, Elsewhere, EndTask, Said, Task, Work
from postroad.seam.turn import Turn
from postroad.units import SECOND_US

ME, FIRST, SECOND = (bytes([number] * 16) for number in (1, 2, 3))
ARC = 0


def view_of(responsible: Node, epoch: int) -> View:
    return View(Chain(0, ME, ME), epoch, STARTED, (responsible,), (responsible,), Base(0, ()))


class Entry:
    """A broker that asks, its arcs and its ring. `reached` are the brokers that there is a way to."""

    knows_chain = True
    count = 1

    def __init__(self, boot: int = 1) -> None:
        self.now_us = 0
        self.known: View | None = view_of(FIRST, 1)
        self.reached = {FIRST, SECOND}
        self.said: list[tuple[Node, Work]] = []
        self.answers: list[Done] = []
        self._turns = Turns()
        self.errands = Errands(
            me=ME,
            boot=boot,
            arcs=self,  # type: ignore[arg-type]
            ring=self,  # type: ignore[arg-type]
            say=self._say,
            max_bytes=1 << 20,
            answer_us=10 * SECOND_US,
        )

    def view(self, _arc: int) -> View | None:
        return self.known

    def key(self, _arc: int) -> bytes:
        return bytes(16)

    def closest(self, _key: bytes, _count: int) -> list[Node]:
        return []

    def route(self, _key: bytes) -> Node | None:
        return None

    def _say(self, _turn: Turn, node: Node, said: Said) -> bool:
        if isinstance(said, Work) and node in self.reached:
            self.said.append((node, said))
        return node in self.reached

    def turn(self) -> Turn:
        return self._turns.turn(self.now_us)

    def ask(self, task: Task | None = None) -> int:
        number = self.errands.ask(
            self.turn(),
            ARC,
            task or EndTask("inbox", "source"),
            lambda _t, done, _s: self.answers.append(done),
        )
        self.errands.check()
        return number

    def wait(self, us: int) -> None:
        """Until then, it does what is due."""
        end_us = self.now_us + us
        while (due_us := self.errands.next_deadline()) is not None and due_us <= end_us:
            self.now_us = max(due_us, self.now_us)
            self.errands.tick(self.turn())
            self.errands.check()
        self.now_us = end_us

    def take(self) -> list[tuple[Node, int]]:
        said, self.said = self.said, []
        return [(node, work.number) for node, work in said]


def test_what_could_not_be_said_is_said_soon_though_another_task_was_answered_meanwhile() -> None:
    entry = Entry()
    first = entry.ask()
    entry.reached.clear()
    second = entry.ask()
    assert entry.take() == [(FIRST, first)]
    entry.errands.answered(entry.turn(), FIRST, Done(first, (Answer("done"),)))
    entry.reached = {FIRST}
    entry.wait(SEARCH_FIRST_US)
    assert entry.take() == [(FIRST, second)]


def test_what_is_refused_for_now_is_said_again_though_another_task_was_answered_meanwhile() -> None:
    entry = Entry()
    first, second = entry.ask(), entry.ask()
    entry.take()
    entry.errands.answered(entry.turn(), FIRST, Done(first, (), UnavailableError.code, "not yet"))
    entry.errands.answered(entry.turn(), FIRST, Done(second, (Answer("done"),)))
    entry.wait(SECOND_US)
    assert (FIRST, first) in entry.take()


def test_what_a_broker_sends_elsewhere_is_said_again_though_no_view_is_news() -> None:
    """The broker that is responsible now was told, and its answer was lost."""
    entry = Entry()
    number = entry.ask()
    entry.known = view_of(SECOND, 2)
    entry.errands.moved(entry.turn(), ARC, entry.known)
    assert entry.take() == [(FIRST, number), (SECOND, number)]
    entry.errands.elsewhere(entry.turn(), FIRST, Elsewhere(number, ARC, None))
    entry.wait(RESEND_US)
    assert entry.take() == [(SECOND, number)]


def test_a_task_without_an_answer_is_said_again_and_in_the_end_given_up() -> None:
    entry = Entry()
    number = entry.ask()
    entry.wait(10 * SECOND_US)
    assert len(entry.take()) >= 9
    assert [(done.number, done.code) for done in entry.answers] == [(number, "unavailable")]
    assert entry.errands.next_deadline() is None


def test_a_view_that_becomes_known_answers_who_asked_for_it() -> None:
    entry = Entry()
    entry.known = None
    entry.errands.find(entry.turn(), ARC, lambda _turn, done, _task: entry.answers.append(done))
    entry.wait(3 * SECOND_US)
    assert entry.answers == []
    entry.known = view_of(FIRST, 1)
    entry.wait(SECOND_US)
    assert [done.code for done in entry.answers] == [""]


def test_only_the_broker_that_was_asked_last_can_answer() -> None:
    """What the one before it says late is overtaken: the next one has done what that one does not know of."""
    entry = Entry()
    number = entry.ask()
    entry.known = view_of(SECOND, 2)
    entry.errands.moved(entry.turn(), ARC, entry.known)
    entry.errands.answered(entry.turn(), FIRST, Done(number, (Answer("late"),)))
    assert entry.answers == []
    entry.errands.answered(entry.turn(), SECOND, Done(number, (Answer("done"),)))
    assert [done.answers for done in entry.answers] == [(Answer("done"),)]


def test_an_answer_to_an_earlier_start_of_this_broker_is_no_answer_to_this_one() -> None:
    """Else a message would count as kept that nobody has."""
    before, after = Entry(boot=1), Entry(boot=2)
    number = before.ask()
    after.ask()
    after.errands.answered(after.turn(), FIRST, Done(number, (Answer("kept"),)))
    assert after.answers == []
