"""Which view follows: news of views, founding, and one decree of Paxos among the electors of the present view
(`views`: "The chain"; spec, responsibility 2 and 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from postroad.errors import PeerError, UsageError
from postroad.queues.arc_state import MAX_ROUND, Proposal, check_view, with_answer
from postroad.queues.merging import Merging
from postroad.queues.messages import (
    CLOSED,
    MAX_ELECTORS,
    NEW,
    NO_BALLOT,
    STARTED,
    Accept,
    Accepted,
    Ask,
    Ballot,
    Base,
    Busy,
    Chain,
    Ended,
    Know,
    Moved,
    Node,
    Prepare,
    Promise,
    Refused,
    View,
    Vote,
)

CALM_DOUBLINGS: Final = 5  # of the wait of an elector that would have others in a view that is served
_DRAWS: Final = 1 << 32


class Agreement(Merging):
    __slots__ = ()

    # News of views

    def _follow(self, sender: Node, view: View) -> bool:
        """Whether this is now the newest view known here. If it is not, the sender hears of that one."""
        check_view(view)
        mine = self.view
        if mine is None or view.chain.replaces(mine.chain):
            self._adopt(view)
        elif view.chain == mine.chain:
            if view.place < mine.place:
                self._send(sender, Know(mine))
                return False
            if view.place > mine.place:
                self._adopt(view)
            elif view != mine:
                raise PeerError(f"two views are said to be decided for epoch {view.epoch}: {view} and {mine}")
        elif view.chain in self.ended:
            self._send(sender, Ended(view.chain, mine))
            return False
        elif mine.chain.replaces(view.chain):
            self._send(sender, Know(mine))
            return False
        else:
            self._meet(sender, mine, view)
            return False
        return True

    def _adopt(self, view: View) -> None:
        old, self.view = self.view, view
        self.promised, self.vote, self.unsaved = NO_BALLOT, None, True
        self.proposal, self.attempts, self.attempt_at = None, 0, None
        if self.rival is not None and not self.rival.chain.outranks(view.chain):
            self.rival = None
        same_epoch = old is not None and (old.chain, old.epoch) == (view.chain, view.epoch)
        self.broken = (self.broken and same_epoch) or (self._is_lapsed(view) and view.responsible == self.me)
        self._tell(Moved(view))
        if self.me in view.replicas:
            self.drop_at = None
        if not same_epoch or view.stage == CLOSED:
            self.reading = self.incoming = self.installing = None
            if self.serving:
                self._stop(view)
        if view.stage == NEW and view.responsible == self.me and not self._is_lapsed(view):
            self._begin_reading(view)
        elif view.stage == STARTED:
            if self._is_filled(view):
                self._serve(view)
            self.installing = self.offered = None
            if self.me not in view.replicas and self._is_older(view):
                self.drop_at = self.now_us + self.settings.linger_us

    def _on_know(self, sender: Node, message: Know) -> None:
        self._follow(sender, message.view)

    def _on_refused(self, sender: Node, message: Refused) -> None:
        if (
            self._follow(sender, message.view)
            and self.view is not None
            and self.view.responsible == self.me
            and sender in self.view.replicas
            and not self.broken
        ):
            self.broken, self.attempts, self.attempt_at = True, 0, None

    # Founding

    def found(self, now_us: int) -> None:
        """By hand, or because nobody else can have: a chain that begins with this broker alone."""
        if self.view is not None:
            raise UsageError(f"the arc has a chain already, at epoch {self.view.epoch}")
        start = self._begin(now_us)
        self._found()
        self._end(start)

    def _on_ask(self, sender: Node, message: Ask) -> None:
        del message
        if self.view is not None:
            self._send(sender, Know(self.view))

    def _found(self) -> None:
        only = (self.me,)
        view = View(Chain(0, self.me, self.me), 1, STARTED, only, only, Base(0, ()))
        self._install(view, None, b"", whole=True)
        self._adopt(view)
        self._serve(view)

    # Agreement on the view that follows

    def set_candidates(self, candidates: Sequence[Node], now_us: int) -> None:
        """Brokers that the ring takes for alive, closest to the arc first, this one among them."""
        start = self._begin(now_us)
        if self.candidates != (new := tuple(candidates[:MAX_ELECTORS])):
            self.candidates = new
            self.attempts, self.attempt_at = 0, None
        self._end(start)

    def _has_reason(self) -> bool:
        """Whether this broker wants another view to follow."""
        view = self.view
        if view is None or view.stage == CLOSED or self.me not in view.electors:
            return False
        if self.broken or self.rival is not None or self.vote is not None:
            return True
        if view.stage == NEW:
            leads = view.responsible == self.me
            return not leads or (
                self.installing is not None and len(self.installing.done) == len(view.replicas)
            )
        return bool(self.candidates) and self._members(self.candidates) != (
            view.responsible,
            frozenset(view.replicas),
            frozenset(view.electors),
        )

    def _members(self, nodes: Sequence[Node]) -> tuple[Node, frozenset[Node], frozenset[Node]]:
        limits = self.settings
        return nodes[0], frozenset(nodes[: limits.replicas]), frozenset(nodes[: limits.electors])

    def _wait_us(self, draw: int) -> int:
        """The responsible broker begins at once, and if it is gone, who would be it; others at random."""
        view = self.view
        assert view is not None
        leads, first = view.responsible == self.me, self.candidates[:1] == (self.me,)
        if self.attempts == 0 and (leads or (first and view.responsible not in self.candidates)):
            return 0
        # A view that took too long to fill is given twice the time when it is tried in the next epoch.
        unfilled = view.epoch - view.base.epoch - 1 if view.stage == NEW else 0
        # Brokers may see different ones alive: who is in the view is first of all for its responsible broker.
        calm = view.stage == STARTED and view.responsible in self.candidates and not leads
        patience = CALM_DOUBLINGS if calm and self.vote is None and self.rival is None else 0
        doublings = min(self.attempts + unfilled + patience, 32)
        wait_us = min(self.settings.retry_us << doublings, self.settings.longest_us)
        return wait_us // 2 + wait_us * (draw % _DRAWS) // (2 * _DRAWS)

    def _propose(self) -> None:
        view = self.view
        assert view is not None
        self.attempts += 1
        self.attempt_at = None
        self.round += 1
        ballot = (self.round, self.me, self.boot)
        asked = tuple(sorted({*view.electors, *self.candidates[: self.settings.electors]}))
        self.proposal = Proposal(ballot, asked, (), None, (), self.now_us + self.settings.answer_us)
        for node in asked:
            self._send(node, Prepare(view, ballot))

    def _on_prepare(self, sender: Node, message: Prepare) -> None:
        self._check_ballot(sender, message.ballot)
        if not self._follow(sender, message.view):
            return
        if self.me not in message.view.electors:
            self._send(sender, Promise(message.ballot, None))
        elif message.ballot < self.promised:
            self._send(sender, Busy(message.ballot, self.promised))
        else:
            self.promised = message.ballot
            self.round = max(self.round, message.ballot[0])
            self._send_safely(sender, Promise(message.ballot, self.vote))

    def _on_promise(self, sender: Node, message: Promise) -> None:
        proposal = self.proposal
        if (
            proposal is None
            or message.ballot != proposal.ballot
            or proposal.value
            or sender not in proposal.asked
        ):
            return
        self.proposal = replace(proposal, promises=with_answer(proposal.promises, sender, message.vote))
        self._conclude(patient=True)

    def _conclude(self, *, patient: bool) -> None:
        """Ask the electors to accept a value: a majority has promised, and all answered or had their time."""
        proposal, view = self.proposal, self.view
        assert proposal is not None
        assert view is not None
        promised = {node for node, _ in proposal.promises}
        # Nobody waits for those that the ring takes for dead.
        awaited = [node for node in proposal.asked if not self.candidates or node in self.candidates]
        if proposal.value is not None or (patient and not promised.issuperset(awaited)):
            return
        promises = {node: vote for node, vote in proposal.promises if node in view.electors}
        if len(promises) < view.majority:
            return
        votes = [vote for vote in promises.values() if vote is not None]
        if votes:
            value: View | None = max(votes, key=lambda vote: vote.ballot).value
        else:
            value = self._wanted(view, [node for node, _ in proposal.promises])
        if value is None:
            self.proposal = None
            return
        until_us = self.now_us + self.settings.answer_us
        self.proposal = replace(proposal, value=value, until_us=until_us)
        for node in view.electors:
            self._send(node, Accept(view, proposal.ballot, value))

    def _wanted(self, view: View, answered: Sequence[Node]) -> View | None:
        """What this broker proposes itself. It names only brokers that answered it in this ballot."""
        if self.rival is not None:
            return replace(view, stage=CLOSED, base=view.last_started(), into=self.rival.chain)
        if (
            self.installing is not None
            and len(self.installing.done) == len(view.replicas)
            and not self.broken
        ):
            return replace(view, stage=STARTED)
        wished = self.candidates or view.electors
        named = [node for node in wished if node in answered]
        if not named:
            return None
        members = (view.responsible, frozenset(view.replicas), frozenset(view.electors))
        if view.stage == STARTED and not self.broken and self._members(named) == members:
            return None  # nothing would change: those who are missing still do not answer
        return View(
            chain=view.chain,
            epoch=view.epoch + 1,
            stage=NEW,
            replicas=tuple(named[: self.settings.replicas]),
            electors=tuple(named[: self.settings.electors]),
            base=view.last_started(),
            rescued=view.rescued and view.stage == NEW,
        )

    def _on_accept(self, sender: Node, message: Accept) -> None:
        self._check_ballot(sender, message.ballot)
        check_view(message.value)
        if not self._follow(sender, message.view) or self.me not in message.view.electors:
            return
        if message.ballot < self.promised:
            self._send(sender, Busy(message.ballot, self.promised))
            return
        self.promised, self.vote = message.ballot, Vote(message.ballot, message.value)
        self.round = max(self.round, message.ballot[0])
        self._send_safely(sender, Accepted(message.ballot))

    def _on_accepted(self, sender: Node, message: Accepted) -> None:
        proposal, view = self.proposal, self.view
        if proposal is None or view is None or proposal.value is None or message.ballot != proposal.ballot:
            return
        if sender not in view.electors or sender in proposal.accepted:
            return
        self.proposal = replace(proposal, accepted=tuple(sorted((*proposal.accepted, sender))))
        if len(self.proposal.accepted) >= view.majority:
            self._adopt(proposal.value)
            self._spread(proposal.value, proposal.asked)

    def _on_busy(self, sender: Node, message: Busy) -> None:
        del sender
        if not 0 <= message.promised[0] < MAX_ROUND:
            raise PeerError(f"a ballot of round {message.promised[0]}, over {MAX_ROUND}")
        if self.proposal is not None and message.ballot == self.proposal.ballot:
            self.round = max(self.round, message.promised[0])
            self.proposal = None

    @staticmethod
    def _check_ballot(sender: Node, ballot: Ballot) -> None:
        if ballot[1] != sender or not 0 < ballot[0] < MAX_ROUND:
            raise PeerError(f"a ballot of round {ballot[0]} of {ballot[1].hex()} came from {sender.hex()}")
