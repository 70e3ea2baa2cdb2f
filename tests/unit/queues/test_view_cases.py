"""The spec's cases of views, electors and replicas (spec/queues, cases), each a test of its own.

v0 = {A, B}, A responsible, electors A, B, C. Cases f, g, h, j and n are about sources and consumers and stand
in test_inbox_cases.py.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.worlds.arcs import PATIENT, TIMED, A, B, C, D, Ledger, Network, Station, keep_all, pair

from postroad.errors import PeerError, UsageError
from postroad.queues.arc_state import Settings
from postroad.queues.messages import (
    CLOSED,
    MAX_WRITE_BYTES,
    NEW,
    STARTED,
    Ack,
    Ask,
    Base,
    Chain,
    Ended,
    Entry,
    Fetch,
    Installed,
    Know,
    Load,
    Mark,
    Message,
    Node,
    Offer,
    Piece,
    Place,
    Prepare,
    Promise,
    Record,
    Refused,
    Seal,
    Stalled,
    Stopped,
    View,
    Write,
    decode,
    encode,
)
from postroad.queues.views import Arc

E, F, G = b"E", b"F", b"G"
WIDE = Settings(replicas=2, electors=5)


def wide(names: tuple[Node, ...]) -> Network:
    """The first names are the replicas, up to five are electors."""
    network = Network(names, WIDE)
    network.do(names[0], lambda arc: arc.found(0))
    network.candidates(names, names[0])
    network.run()
    assert network.serving() == [names[0]]
    assert set(network.view(names[0]).electors) == set(names[:5])
    return network


def test_a_a_view_that_was_never_filled_is_not_read() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.drop = lambda to, message: to == C and isinstance(message, Offer | Load)
    network.candidates((A, C, B))
    network.tick(A)
    assert (network.view(B).replicas, network.view(B).stage) == ((A, C), NEW)
    network.drop = keep_all
    network.seen.clear()
    network.candidates((A, B, C))
    network.run()
    view = network.view(A)
    assert (view.replicas, view.stage, view.base) == ((A, B), STARTED, Base(2, (A, B)))
    assert not [message for _, to, message in network.seen if to == C and isinstance(message, Seal | Fetch)]
    assert network[B].ledger.trail == network[A].ledger.trail == (b"p1@2",)
    assert network[C].core.chain is None


def test_b_after_a_view_that_died_unfilled_the_old_replicas_serve_again() -> None:
    network = wide((A, B, C, D, E))
    network.write(A, b"p1@2")
    network.drop = lambda _, message: isinstance(message, Offer | Load | Seal)
    network.candidates((C, D, A, B, E))
    network.tick(A)
    assert (network.view(A).replicas, network.view(A).stage) == ((C, D), NEW)
    network.crash(C)
    network.crash(D)
    network.drop = keep_all
    network.candidates((A, B, E))
    network.run()
    assert network.serving() == [A]
    assert network.view(A).replicas == (A, B)
    assert network[A].ledger.trail == network[B].ledger.trail == (b"p1@2",)


def test_c_a_sealed_replica_refuses_the_old_epoch_after_a_restart() -> None:
    network = pair()
    network.cut = {(other, A) for other in (B, C, D)}  # A hears nothing of what follows
    network.drop = lambda _, message: isinstance(message, Offer)
    network.candidates((C, D, B), C)
    while network.view(B).epoch == 2:
        network.tick(C)
    sealed = network.view(B)
    assert (sealed.epoch, sealed.responsible) == (3, C)
    network.crash(B)
    network.restart(B)
    network.cut = set()
    network.write(A, b"p1@2")
    assert network.kept(A) == []
    assert not network[A].core.serving, "the refusal names the newest view"
    assert network.view(A) == network.view(B) == sealed
    assert network[B].ledger.trail == ()


def test_d_an_install_that_comes_again_after_a_later_write_changes_nothing() -> None:
    """Q8."""
    network = pair()
    network.write(A, b"p1@2")
    network.candidates((A, C, B))
    network.run()
    assert network.serving() == [A]
    loads = [message for _, to, message in network.seen if to == C and isinstance(message, Load)]
    offers = [message for _, to, message in network.seen if to == C and isinstance(message, Offer)]
    assert loads
    network.write(A, b"p2@3")
    for message in (*offers, *loads):
        network.deliver(A, C, message)
    assert network[C].ledger.trail == (b"p1@2", b"p2@3")
    assert network.kept(A) == [b"p1@2", b"p2@3"]


def test_d_a_copy_in_pieces_leaves_the_old_state_until_it_is_whole() -> None:
    small = Settings(replicas=2, electors=3, piece_bytes=5)
    network = pair(small)
    for number in range(1, 6):
        network.write(A, b"p%d@2" % number)
    # B misses the last write, so that it needs a copy; the second piece is lost.
    network.drop = lambda _, message: isinstance(message, Write)
    network.write(A, b"p6@2")
    network.drop = lambda to, message: to == B and isinstance(message, Load) and message.offset > 5
    network.candidates((A, B, C, D), A)
    network[A].core.broken = True
    network.tick(A)
    network.settle()
    assert network[B].core.incoming is not None
    assert network[B].ledger.trail == tuple(b"p%d@2" % number for number in range(1, 6))
    assert network[B].core.epoch == 2
    network.drop = keep_all
    network.run()
    assert network.serving() == [A]
    assert network[B].ledger.trail == tuple(b"p%d@2" % number for number in range(1, 7))
    assert len([message for _, _, message in network.seen if isinstance(message, Load)]) > 3


def test_d_a_copy_whose_bodies_are_not_here_yet_leaves_the_old_state_too() -> None:
    """Q5."""
    network = pair(Settings(replicas=2, electors=3, tail_bytes=0))
    network.write(A, b"p1@2")
    # B misses the last write, and gets a copy.
    network.drop = lambda _, message: isinstance(message, Write)
    network.write(A, b"p2@2")
    network.drop = keep_all
    network[B].gathers = []
    network.candidates((A, B, C, D), A)
    network[A].core.broken = True
    network.tick(A)
    network.settle()
    (gather,) = network[B].gathers
    assert gather.source == A
    assert network[B].ledger.trail == (b"p1@2",)
    network.tick(A)  # it offers the copy again, and nothing comes of it
    assert network[B].gathers == [gather]
    assert not network.serving()
    # What it refers to is gone: the copy is asked for anew.
    network.do(B, lambda arc: arc.gathered(gather, None, network.now_us))
    network.run(1)
    assert len(network[B].gathers) > 1
    assert network[B].ledger.trail == (b"p1@2",)
    newest = network[B].gathers[-1]
    network[B].gathers = None
    network.do(B, lambda arc: arc.gathered(newest, newest.state, network.now_us))
    network.run()
    assert network[B].ledger.trail == (b"p1@2", b"p2@2")
    assert len(network.serving()) == 1
    network.do(B, lambda arc: arc.gathered(newest, newest.state, network.now_us))  # nobody waits for it
    assert network[B].ledger.trail == (b"p1@2", b"p2@2")


def test_e_a_replica_that_lost_its_memory_is_not_read_while_the_other_has_all() -> None:
    network = pair()
    network.write(A, b"p1@2", durable=False)
    assert network.kept(A) == [b"p1@2"]
    network.crash(A)
    network.restart(A)
    assert network[A].ledger.trail == (), "it was written behind, and the disk had not come to it"
    network.candidates((A, B, C))
    network.run()
    assert network.serving() == [A]
    assert network.view(A).epoch == 3, "a restarted responsible broker does not go on in its epoch"
    assert network[A].ledger.trail == network[B].ledger.trail == (b"p1@2",)


def test_e_with_no_other_left_the_replica_that_restarted_has_all_that_is_durable() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.write(A, b"p2@2", durable=False)
    network.crash(B)
    network.crash(A)
    network.restart(A)
    network.candidates((A, C, D))
    network.run()
    assert network.serving() == [A]
    assert network[A].ledger.trail == (b"p1@2",)


def test_after_a_power_cut_of_everything_what_was_kept_as_durable_is_there() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.write(A, b"p2@2")
    for name in (A, B, C, D):
        network.crash(name)
    for name in (A, B, C, D):
        network.restart(name)
    network.candidates((A, B, C))
    network.run()
    assert network.serving() == [A]
    assert network[A].ledger.trail == network[B].ledger.trail == (b"p1@2", b"p2@2")


def test_i_an_elector_never_votes_about_a_view_that_was_superseded() -> None:
    network = pair()
    old = network.view(C)
    network.candidates((A, B, D))
    network.run()
    assert C not in network.view(A).electors
    network.crash(C)
    network.restart(C)
    network.mail.clear()
    network.deliver(D, C, Prepare(old, (99, D, 1)))
    assert [message for _, to, message in network.mail if to == D] == [Know(network.view(C))]
    assert network.view(C).epoch == network.view(A).epoch == 3
    assert network[C].core.promised == (0, b"", 0)


def test_k_electors_die_one_by_one_over_months() -> None:
    names = (A, B, C, D, E, F, G)
    network = wide(names)
    for number, dead in enumerate((G, F, E, D), start=1):
        network.write(A, b"p%d@0" % number)
        network.crash(dead)
        left = [name for name in names if network[name].arc is not None]
        network.candidates(left)
        network.run()
        assert network.serving() == [A]
        assert set(network.view(A).electors) == set(left[:5])
    network.crash(B)
    network.candidates((A, C))
    network.run()
    assert network.serving() == [A]
    assert network.view(A).replicas == (A, C)
    assert [b"p%d@0" % number for number in range(1, 5)] == list(network[C].ledger.trail)


def test_l_after_a_rescue_the_old_majority_leaves_its_chain_when_it_comes_back() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.away = {A, C}
    network.do(B, lambda arc: arc.rescue((B, D), 0))
    network.run()
    assert network.serving() == [B]
    rescued = network.view(B)
    assert (rescued.chain.generation, rescued.chain.origin, rescued.epoch) == (1, A, 3)
    assert network[D].ledger.trail == (b"p1@2",), "what is left is what B held"
    assert network[B].core.absorbed == (Chain(0, A, A),)
    network.away = set()
    assert set(network.serving()) == {A, B}
    network.write(A, b"p2@2")
    assert network.kept(A) == [b"p1@2"], "B has left the old chain and refuses"
    assert network.serving() == [B]
    network.candidates((A, B, C))
    network.run()
    assert {network.view(name).chain for name in (A, B, C)} == {rescued.chain}
    assert len(network.serving()) == 1
    assert network[network.serving()[0]].ledger.trail == (b"p1@2",)


def test_l_a_rescue_takes_the_best_of_what_is_left() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.drop = lambda _, message: isinstance(message, Write)
    network.write(A, b"p2@2")
    network.drop = keep_all
    network.away = {C}
    network.candidates((D, B, A))
    network.do(D, lambda arc: arc.rescue((D, B, A), 0))
    network.run()
    assert network.serving() == [D]
    assert network[D].ledger.trail == (b"p1@2", b"p2@2")
    with pytest.raises(UsageError, match="nothing to rescue"):
        Arc(E, 1, PATIENT, Ledger()).rescue((E,), 0)


def test_a_chain_is_founded_once() -> None:
    alone = Network((D,))
    alone.do(D, lambda arc: arc.found(0))
    assert alone.serving() == [D]
    with pytest.raises(UsageError, match="has a chain already"):
        alone[D].core.found(0)


def test_o_replicas_that_leave_the_set_keep_their_state_until_the_next_view_has_started() -> None:
    """Q9."""
    network = wide((A, B, C, D, E))
    network.write(A, b"p1@2")
    network.drop = lambda to, message: isinstance(message, Offer) and to == D
    network.candidates((C, D, A, B, E))
    network.tick(A)
    assert network.view(A).replicas == (C, D)
    assert network[A].ledger.trail == network[B].ledger.trail == (b"p1@2",)
    network.drop = keep_all
    network.run()
    assert network.serving() == [C]
    assert network[A].core.chain is None
    assert network[A].log == ()
    assert network[D].ledger.trail == (b"p1@2",)


def test_two_chains_that_meet_become_one_and_nothing_is_served_twice() -> None:
    network = Network((A, B, C, D))
    for first, second in ((A, B), (C, D)):
        network.do(first, lambda arc: arc.found(0))
        network.candidates((first, second), first)
    network.run()
    assert network.serving() == [A, C]
    network.write(A, b"p1@2")
    network.write(C, b"p7@2")
    network.candidates((C, A, B, D))
    network.run()
    lost = Chain(0, C, C)
    assert {network.view(name).chain for name in (A, B, C, D)} == {Chain(0, A, A)}
    assert len(network.serving()) == 1
    serving = network[network.serving()[0]]
    assert serving.ledger.trail == (b"p1@2", b"p7@2")
    assert serving.core.absorbed == (lost,)
    assert network[D].core.ended == (lost,)
    assert CLOSED in [told.view.stage for told in network.told[C] if isinstance(told, Stopped)]


def test_a_chain_is_taken_in_once_though_its_brokers_say_twice_that_it_is_closed() -> None:
    network = Network((A, B))
    for name in (A, B):
        network.do(name, lambda arc: arc.found(0))
    network.write(B, b"p7@1")
    network.candidates((A, B))
    network.run()
    closed = [message for _, to, message in network.seen if to == A and isinstance(message, Know)]
    assert closed
    for message in closed:
        network.deliver(B, A, message)
    network.run()
    assert network[A].ledger.trail == (b"p7@1",)
    assert network.view(B).replicas == (A, B)


def test_a_chain_is_left_only_when_every_replica_of_the_other_has_its_state() -> None:
    """Found by simulator seed 10: a responsible broker that was cut off took a chain in on its own, said so
    when it was asked again, and what the chain's brokers had was deleted."""
    network = Network((A, B, C))
    network.do(A, lambda arc: arc.found(0))
    network.candidates((A, B), A)
    network.run()
    network.do(C, lambda arc: arc.found(0))
    network.write(C, b"p7@1")
    network.cut = {(A, B), (B, A)}
    network.candidates((A, B, C), C)
    network.deliver(A, C, Know(network.view(A)))
    network.settle()
    network.run(seconds=3)
    assert network.view(C).stage == CLOSED
    assert network[A].ledger.trail == (b"p7@1",), "it is taken in, and B does not have it"
    network.deliver(C, A, Know(network.view(C)))
    network.settle()
    assert network[C].ledger.trail == (b"p7@1",)
    network.cut = set()
    network.run()
    assert network[B].ledger.trail == (b"p7@1",)
    assert network.view(C).chain == Chain(0, A, A)


def test_a_straggler_of_a_chain_that_was_taken_in_is_told_to_leave_it() -> None:
    network = Network((A, B, C, D, E))
    network.do(A, lambda arc: arc.found(0))
    network.do(C, lambda arc: arc.found(0))
    network.candidates((C, D, E), C)
    network.run()
    network.away = {E}
    network.candidates((A, C, D), A, B, C, D)
    network.run()
    assert network.view(D).chain == Chain(0, A, A)
    network.away = set()
    network.candidates((A, C, E))
    network.run()
    assert network.view(E) == network.view(A)
    assert len(network.serving()) == 1


def test_a_broker_that_is_no_elector_leaves_a_chain_that_was_taken_in() -> None:
    """Found by simulator seed 52: it asked who is responsible, was told, and did not believe it for good."""
    network = Network((A, C, D))
    for founder in (A, C):
        network.do(founder, lambda arc: arc.found(0))
    network.deliver(C, D, Know(network.view(C)))
    network.away = {D}
    network.candidates((A, C), A, C)
    network.run()
    assert network.view(C).chain == Chain(0, A, A)
    network.away = set()
    assert network.view(D).chain == Chain(0, C, C)
    network.deliver(A, D, Know(network.view(A)))
    network.run()
    assert network.view(D) == network.view(A)


def test_a_broker_that_knows_only_that_its_chain_is_closed_asks_what_became_of_it() -> None:
    """Found by simulator seed 72271: it was in a cut when the others left the chain, and kept its replica."""
    network = Network((A, C, D, E))
    network.do(A, lambda arc: arc.found(0))
    network.do(C, lambda arc: arc.found(0))
    network.candidates((C, D, E), C)
    network.run()

    def is_of_the_other(to: Node, message: Message) -> bool:
        news = isinstance(message, Know) and message.view.chain == Chain(0, A, A)
        return to == E and (news or isinstance(message, Ended))

    network.drop = is_of_the_other
    network.candidates((A, C, D), A, C, D)
    network.run()
    assert network.view(D).chain == Chain(0, A, A)
    assert (network.view(E).stage, network[E].core.rival) == (CLOSED, None)
    network.drop = keep_all
    network.run()
    assert network.view(E) == network.view(A)
    assert network[E].core.chain is None, "its replica is of no use any more"
    assert network[E].core.next_deadline() is None


def test_writes_are_applied_in_order_once_and_gaps_are_sent_again() -> None:
    """Q8."""
    network = pair()
    lost: list[Message] = []

    def lose_the_first(_: Node, message: Message) -> bool:
        if isinstance(message, Write) and message.number == 1 and not lost:
            lost.append(message)
            return True
        return False

    network.drop = lose_the_first
    network.write(A, b"p1@2")
    assert network.kept(A) == []
    network.write(A, b"p2@2")
    assert network.kept(A) == [b"p1@2", b"p2@2"]
    network.deliver(A, B, lost[0])
    assert network[B].ledger.trail == (b"p1@2", b"p2@2")


def loads(network: Network, to: Node) -> list[Place | None]:
    """What came to that broker of a state: copies (None), or records since a place."""
    return [
        message.since for _, at, message in network.seen if at == to and isinstance(message, Load | Piece)
    ]


def test_a_replica_that_was_away_is_sent_what_it_missed_and_no_copy() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.away = {B}
    network.candidates((A, C), A, C)
    network.run(seconds=3)
    assert network.view(A).replicas == (A, C)
    for number in range(2, 6):
        network.write(A, b"p%d@3" % number)
    network.away = set()
    network.seen.clear()
    network.candidates((A, B, C))
    network.run()
    assert network.serving() == [A]
    assert loads(network, B) == [(2, 1)]
    network.write(A, b"p6@4")
    assert network[B].ledger.trail == network[A].ledger.trail
    assert len(network[B].ledger.trail) == 6
    network.crash(B)
    network.restart(B)
    assert network[B].ledger.trail == network[A].ledger.trail, "its log has what it caught up with"


def test_a_responsible_broker_that_was_started_anew_reads_only_what_it_missed() -> None:
    """Q11."""
    network = pair()
    network.write(A, b"p1@2")
    network.crash(A)
    network.candidates((B, C), B, C)
    network.run(seconds=3)
    network.write(B, b"p2@3")
    network.restart(A)
    network.seen.clear()
    network.candidates((A, B, C))
    network.run()
    assert network.serving() == [A]
    assert loads(network, A) == [(2, 1)]
    assert network[A].ledger.trail == network[B].ledger.trail == (b"p1@2", b"p2@3")


def test_a_write_that_was_never_kept_is_not_caught_up_from() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.drop = lambda _, message: isinstance(message, Write)
    network.write(A, b"p2@2")
    network.drop = keep_all
    network.crash(A, lost="nothing")
    network.candidates((B, C), B, C)
    network.run(seconds=3)
    network.write(B, b"p3@3")
    network.restart(A)
    assert network[A].ledger.trail == (b"p1@2", b"p2@2")
    network.seen.clear()
    network.candidates((A, B, C))
    network.run()
    assert loads(network, A) == [None]
    assert network[A].ledger.trail == (b"p1@2", b"p3@3")


def test_what_the_tail_has_no_more_is_copied() -> None:
    network = pair(replace(TIMED, tail_bytes=200))
    network.write(A, b"p1@2")
    network.away = {B}
    network.candidates((A, C), A, C)
    network.run(seconds=3)
    for number in range(2, 9):
        network.write(A, b"p%d@3" % number)
    network.away = set()
    network.seen.clear()
    network.candidates((A, B, C))
    network.run()
    assert loads(network, B) == [None]
    assert network[B].ledger.trail == network[A].ledger.trail


def test_who_left_the_replicas_keeps_its_state_for_a_while_and_not_beyond_a_restart() -> None:
    """Q9."""
    network = wide((A, B, C, D, E))
    network.write(A, b"p1@2")
    network.candidates((C, D, A, B, E))
    network.run(seconds=2)
    assert network.serving() == [C]
    assert network[A].core.chain is not None
    network.crash(A)
    network.restart(A)
    assert network[A].ledger.trail == (b"p1@2",)
    network.run(seconds=0)
    assert network[A].core.chain is None
    assert network[B].core.chain is not None
    network.run(seconds=5)
    assert network[B].core.chain is None
    assert network[A].log == network[B].log == ()


def test_who_left_the_replicas_and_did_not_hear_that_the_next_view_has_started_asks() -> None:
    """Found by simulator seed 1203: it kept its state for good."""
    network = pair()
    network.write(A, b"p1@2")
    mine = network.view(B)
    new = replace(mine, epoch=3, stage=NEW, replicas=(C, D), electors=(C, D), base=Base(2, (A, B)))
    network.away = {A, C, D}
    network.deliver(A, B, Know(new))
    network.do(B, lambda arc: arc.tick(network.now_us + 1_000_000, 0))
    assert {to for sender, to, message in network.mail if sender == B and isinstance(message, Ask)} == {C, D}
    network.mail.clear()
    network.deliver(C, B, Know(replace(new, stage=STARTED)))
    network.run()
    assert network[B].core.chain is None


def test_records_that_do_not_lead_from_what_is_held_are_refused() -> None:
    network = pair()
    network.write(A, b"p1@2")
    network.write(A, b"p2@2")
    network.drop = lambda _, message: isinstance(message, Offer | Load)
    network.crash(B)
    network.restart(B)
    network.run(seconds=1)
    view = network.view(B)
    assert (view.responsible, view.stage, network[B].core.applied) == (A, NEW, 2)
    network.deliver(A, B, Offer(view, None))
    chain = view.chain
    wrong: tuple[tuple[Place, tuple[Record, ...]], ...] = (
        ((2, 2), (Entry(4, b"p4@2", None),)),
        ((2, 2), (Entry(3, b"p3@2", None), Entry(5, b"p5@2", None))),
        ((2, 2), (Mark(chain, 3, 0, True, b"x"),)),
        ((2, 2), (Mark(chain, 1, 0, True, None),)),
    )
    data = encode((Entry(2, b"p2@2", None),))
    network.deliver(A, B, Load(view, True, 0, len(data), data, (2, 1)))
    assert network[B].ledger.trail == (b"p1@2", b"p2@2"), "B held that place before, and asks anew"
    for since, records in wrong:
        data = encode(records)
        with pytest.raises(PeerError, match="does not follow"):
            network.deliver(A, B, Load(view, True, 0, len(data), data, since))
        assert network[B].ledger.trail == (b"p1@2", b"p2@2")


def test_a_duplicate_is_not_acknowledged_before_the_log_has_the_write() -> None:
    network = pair()
    station = network[B]
    station.slow = True
    network.write(A, b"p1@2")
    write = next(message for _, to, message in network.seen if to == B and isinstance(message, Write))
    network.deliver(A, B, write)
    network.settle()
    assert network.kept(A) == []
    station.sync()
    network.do(B, Arc.check)
    network.settle()
    assert network.kept(A) == [b"p1@2"]


def test_a_write_that_waits_too_long_stalls_and_the_next_view_does_without_the_silent() -> None:
    network = pair()
    network.candidates((A, B, C))
    network.crash(B)
    network.write(A, b"p1@2")
    network.run(seconds=0)
    assert network[A].core.refusal() == ""
    network.now_us += 1_000_000
    network.do(A, lambda arc: arc.tick(network.now_us, 0))
    assert [told for told in network.told[A] if isinstance(told, Stalled)] == [Stalled(1)]
    assert network[A].core.refusal() == "stalled"
    network.settle()
    network.run()
    assert network.serving() == [A]
    assert network.view(A).replicas == (A, C)
    assert network[C].ledger.trail == (b"p1@2",), "its outcome was unknown; here it was carried on"


def test_a_minority_serves_nothing_new() -> None:
    network = pair()
    network.away = {A, C}
    network.candidates((B, D), B)
    network.run()
    assert network.serving() == []
    assert network.view(B).epoch == 2


def test_a_broker_that_is_not_responsible_refuses_and_names_the_view() -> None:
    network = pair()
    assert network[B].core.refusal() == "moved"
    assert network.view(B).responsible == A
    network.deliver(D, B, Seal(network.view(B)))
    with pytest.raises(UsageError, match=f"over the limit of {MAX_WRITE_BYTES}"):
        network[A].core.submit(bytes(MAX_WRITE_BYTES + 1), 0, durable=True)


def test_a_replica_that_restarted_takes_no_further_part_in_its_epoch() -> None:
    network = pair()
    network.crash(B)
    network.restart(B)
    assert network.mail == [(B, A, Refused(network.view(A)))]
    network.candidates((A, B, C))
    network.run()
    assert network.view(A).epoch == 3
    assert network.serving() == [A]


def test_what_cannot_be_true_is_the_peers_fault() -> None:
    network = pair()
    view = network.view(A)
    other = View(view.chain, view.epoch, view.stage, (B, C), view.electors, view.base)
    for sender, message, text in (
        (B, Know(other), "two views are said to be decided"),
        (B, Know(View(view.chain, 9, NEW, (), view.electors, view.base)), "0 replicas"),
        (B, Prepare(view, (1, C, 1)), "a ballot of round 1"),
        (C, Ack(view.chain, view.epoch, 0, gap=False), "acknowledges write 0"),
        (B, Ack(view.chain, view.epoch, 5, gap=False), "acknowledges write 5 of 0"),
    ):
        with pytest.raises(PeerError, match=text):
            network[A].core.receive(sender, message, 0)
    with pytest.raises(PeerError, match="cannot be read"):
        decode(b"\x93")
    for message in (Promise((1, A, 1), None), Installed(view.chain, 3), Know(view)):
        assert decode(encode(message)) == message


def test_the_log_begins_anew_when_it_has_grown() -> None:
    small = Settings(replicas=2, electors=3, log_bytes=20)
    network = pair(small)
    for number in range(1, 40):
        network.write(A, b"p%d@2" % number)
    assert len(network[B].log) < 30
    network.crash(B)
    network.restart(B)
    assert network[B].ledger.trail == tuple(b"p%d@2" % number for number in range(1, 40))


def test_timers_are_random_and_double() -> None:
    station = Station(B, Settings())
    view = pair().view(A)
    station.deliver(A, Know(view))
    station.do(lambda arc: arc.set_candidates((C, B, D), 0))
    arc = station.core
    assert arc.next_deadline() == 0
    arc.tick(1_000, 0)
    assert arc.attempt_at == 1_000 + 150_000
    arc.attempt_at, arc.attempts = None, 1
    arc.tick(1_000, (1 << 32) - 1)
    assert arc.attempt_at is not None
    assert 1_000 + 599_000 < arc.attempt_at <= 1_000 + 600_000
    arc.attempt_at, arc.attempts = None, 40
    arc.tick(1_000, 0)
    assert arc.attempt_at == 1_000 + 30_000_000


def test_who_would_be_responsible_does_not_wait_and_nobody_waits_for_the_dead() -> None:
    network = pair()
    network.candidates((B, C, D), B)
    network.crash(A)
    network.settle()
    network.tick(B)
    assert network[B].core.proposal is None
    assert network.view(B).responsible == B
    assert network.now_us == 0
