"""The spec's cases of sources and consumers (spec/queues, f, g, h, j and n): inboxes on replicated arcs."""

from __future__ import annotations

from tests.worlds.arcs import A, B, C, D, Network, keep_all, pair

from postroad.queues.inbox import Accept, Answer, Inboxes, Join, Limits, Message, Operation, Put, encode
from postroad.queues.messages import Ack, Chain, Stalled
from postroad.queues.messages import Write as ArcWrite

FIRST = Chain(0, A, A)


def inboxes() -> Inboxes:
    return Inboxes(Limits())


def message(number: int, after: int = 0, chain: Chain = FIRST, source: str = "shop") -> Message:
    return Message("stock", chain, source, number, True, b"reserve", after)


def put(number: int, after: int = 0, chain: Chain = FIRST) -> Put:
    return Put((message(number, after, chain),), 0)


def write(network: Network, name: bytes, operation: Operation) -> None:
    network.write(name, encode(operation))


def machine(network: Network, name: bytes) -> Inboxes:
    found = network[name].core.machine
    assert isinstance(found, Inboxes)
    return found


def outcomes_of(network: Network, name: bytes) -> list[str]:
    answers: list[str] = []
    for kept in network.kept(name):
        assert isinstance(kept, tuple)
        answers += [answer.outcome for answer in kept]
    return answers


def network_with_a_consumer() -> Network:
    network = pair(machine=inboxes)
    write(network, A, Join("stock", "clerk", "alice", False, 0))
    network.told[A].clear()
    return network


def test_f_a_message_whose_kept_was_lost_and_that_was_accepted_meanwhile_is_not_delivered_again() -> None:
    """Q7."""
    network = network_with_a_consumer()
    write(network, A, put(1))
    write(network, A, Accept("stock", (FIRST, "shop", 1), "clerk", 0))
    network.candidates((B, C, D))
    network.run()
    assert network.serving() == [B]
    write(network, B, put(1))
    assert network.kept(B) == [(Answer("known"),)]
    assert machine(network, B).ready("stock", "clerk", 0, 10) == []


def test_g_a_duplicate_is_answered_only_when_its_first_write_is_kept() -> None:
    network = network_with_a_consumer()
    network.drop = lambda _, message: isinstance(message, ArcWrite | Ack)
    write(network, A, put(1))
    write(network, A, put(1))
    assert network.kept(A) == []
    network.drop = keep_all
    network.run()
    assert network.kept(A) == [(Answer("kept"),), (Answer("known"),)]


def test_h_a_replaced_broker_delivers_and_its_consumer_refuses_and_its_accept_is_never_confirmed() -> None:
    network = network_with_a_consumer()
    write(network, A, put(1))
    old = network.view(A)
    network.cut = {(other, A) for other in (B, C, D)}
    network.candidates((B, C, D), B, C, D)
    network.run()
    write(network, B, Accept("stock", (FIRST, "shop", 1), "clerk", 0))
    assert network.kept(B) == [(Answer("accepted"),)]
    # A was not told: it still serves and would deliver.
    assert network[A].core.serving
    assert [each.id for each in machine(network, A).ready("stock", "clerk", 0, 10)] == [1]
    assert old.is_older(network.view(B)), "so the consumer refuses it"
    network.told[A].clear()
    write(network, A, Accept("stock", (FIRST, "shop", 1), "another", 0))
    network.cut = set()
    network.run()
    assert network.kept(A) == []
    assert not network[A].core.serving


def test_j_an_error_of_a_minority_means_unknown_and_sending_again_delivers_once() -> None:
    for lost in (False, True):  # whether the write reached the other replica
        network = network_with_a_consumer()
        kinds = (Ack, ArcWrite) if lost else (Ack,)
        network.drop = lambda _, message, kinds=kinds: isinstance(message, kinds)
        write(network, A, put(1))
        network.away = {B, C, D}
        network.run(seconds=5)
        assert [told for told in network.told[A] if isinstance(told, Stalled)] == [Stalled(2)]
        assert network[A].core.refusal() == "stalled"
        network.crash(A)
        network.away = set()
        network.drop = keep_all
        network.candidates((B, C, D))
        network.run()
        network.told[B].clear()
        write(network, B, put(1))
        assert network.kept(B) == [(Answer("kept" if lost else "known"),)]
        assert [each.id for each in machine(network, B).ready("stock", "clerk", 0, 10)] == [1]


def test_n_a_source_with_messages_in_both_of_two_networks_that_meet() -> None:
    network = Network((A, B, C, D), machine=inboxes)
    second = Chain(0, C, C)
    for first, other in ((A, B), (C, D)):
        network.do(first, lambda arc: arc.found(0))
        network.candidates((first, other), first)
    network.run()
    write(network, A, put(5))
    write(network, C, put(3, chain=second))
    assert not network[A].core.knows(second), "a message of that chain is refused until it is taken in"
    network.candidates((A, B, C, D))
    network.run()
    assert network.serving() == [A]
    assert network[A].core.knows(second)
    network.told[A].clear()
    write(network, A, Join("stock", "clerk", "alice", False, 0))
    write(network, A, put(3, chain=second))
    write(network, A, put(5))
    write(network, A, put(6, after=5))
    outcomes = outcomes_of(network, A)
    assert outcomes == ["joined", "known", "known", "kept"]
    ready = machine(network, A).ready("stock", "clerk", 0, 10)
    assert [(each.chain, each.id) for each in ready] == [(FIRST, 5), (second, 3), (FIRST, 6)]
    assert machine(network, B).snapshot() == machine(network, A).snapshot()


def test_n_a_session_goes_on_with_a_message_that_was_sent_before_it_knew_its_chain() -> None:
    """Found by simulator seed 3: the entry broker stamps such a message with the chain that is left."""
    network = Network((A, B, C, D), machine=inboxes)
    second = Chain(0, C, C)
    for first, other in ((A, B), (C, D)):
        network.do(first, lambda arc: arc.found(0))
        network.candidates((first, other), first)
    network.run()
    write(network, C, put(3, chain=second))
    network.candidates((A, B, C, D))
    network.run()
    network.told[A].clear()
    write(network, A, put(3))
    write(network, A, put(4, after=3))
    assert outcomes_of(network, A) == ["known", "kept"]
    assert [each.chain for each in machine(network, A).inboxes["stock"].messages.values()] == [second, second]
