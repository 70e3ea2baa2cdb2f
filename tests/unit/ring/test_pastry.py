"""Single rules of the Pastry core (spec Q1)."""

from __future__ import annotations

import pytest

from postroad.errors import PeerError, UsageError
from postroad.ring.pastry import (
    MAX_SHARED,
    Alive,
    Changed,
    Join,
    Leaving,
    Pastry,
    Probe,
    Row,
    Send,
    Settings,
    Share,
    decode,
    distance,
    encode,
)

SECOND = 1_000_000


def at(text: str) -> bytes:
    """An id that begins with these hexadecimal digits."""
    return bytes.fromhex(text.ljust(32, "0"))


def alone(text: str = "8", **settings: int) -> Pastry:
    pastry = Pastry(at(text), Settings(**settings))
    pastry.begin(0)
    pastry.take()
    return pastry


def hear(pastry: Pastry, *nodes: bytes, delay_us: int = 1_000) -> None:
    """These nodes speak, and answer a probe after that time."""
    for node in nodes:
        pastry.receive(node, Probe(0, ()), pastry.now_us)
        pastry.receive(node, Alive(pastry.now_us - delay_us, ()), pastry.now_us)
    pastry.take()


def sent(pastry: Pastry, to: bytes) -> list[object]:
    return [output.message for output in pastry.take() if isinstance(output, Send) and output.to == to]


def test_the_ring_is_round_and_of_two_at_the_same_distance_the_lower_is_closest() -> None:
    assert distance(0, (1 << 128) - 1) == 1
    pastry = alone("4")
    hear(pastry, at("c"))
    assert pastry.route(at("8")) is None
    assert pastry.closest(at("8"), 2) == [at("4"), at("c")]
    assert pastry.route(at("81")) == at("c")
    assert pastry.route(at("ff")) == at("c"), "the shorter way is round the end: 3f..f to 4, 3f..f to c"


def test_a_key_outside_the_leaf_set_goes_where_one_more_digit_is_shared() -> None:
    pastry = alone("80", leaves=2, neighbours=0)
    hear(pastry, at("7f"), at("81"), at("31"), at("3f"), at("c1"))
    assert pastry.route(at("3a")) in (at("31"), at("3f"))
    assert pastry.route(at("30")) == at("31")
    assert pastry.route(at("3fff")) == at("3f")
    assert pastry.route(at("5")) == at("3f"), "nobody begins with 5: the closest that is closer than we are"
    assert pastry.route(at("80")) is None


def test_of_two_nodes_for_a_place_in_the_table_the_nearer_one_is_kept() -> None:
    pastry = alone("80", leaves=2, neighbours=0, parts=1)
    pastry.now_us = SECOND
    hear(pastry, at("7f"), at("81"))
    hear(pastry, at("31"), delay_us=9_000)
    hear(pastry, at("35"), delay_us=2_000)
    assert pastry.table[0, 3, 0] == at("35")
    hear(pastry, at("31"), delay_us=9_000)
    assert pastry.table[0, 3, 0] == at("35")
    pastry.failed(at("35"), SECOND)
    hear(pastry, at("31"), delay_us=9_000)
    assert pastry.table[0, 3, 0] == at("31")
    pastry.check()


def test_a_request_to_join_is_shared_on_the_way_and_ends_at_the_closest() -> None:
    pastry = alone("80", leaves=2)
    hear(pastry, at("7f"), at("81"), at("31"))
    pastry.receive(at("31"), Join(at("3f"), 0, at("80")), SECOND)
    outputs = pastry.take()
    assert Send(at("31"), Join(at("3f"), 1, at("80"))) in outputs
    shares = [output.message for output in outputs if isinstance(output, Send) and output.to == at("3f")]
    assert [share.joined for share in shares if isinstance(share, Share)] == [b""]
    pastry.receive(at("31"), Join(at("8001"), 1, at("31")), SECOND)
    (share,) = sent(pastry, at("8001"))
    assert isinstance(share, Share)
    assert share.joined == at("31")
    assert {at("80"), at("7f"), at("81")} <= set(share.nodes)


def test_a_newcomer_asks_again_while_nobody_answers_and_probes_whom_it_hears_of() -> None:
    pastry = Pastry(at("5"), Settings())
    pastry.join(at("1"), 0)
    assert sent(pastry, at("1")) == [Join(at("5"), 0, at("1"))]
    assert pastry.next_deadline() == SECOND
    pastry.tick(SECOND, 0)
    assert sent(pastry, at("1")) == [Join(at("5"), 0, at("1"))]
    pastry.receive(at("1"), Share((at("2"),), at("1")), SECOND)
    outputs = pastry.take()
    assert Changed((at("1"),), ()) in outputs
    probed = {
        output.to for output in outputs if isinstance(output, Send) and isinstance(output.message, Probe)
    }
    assert probed == {at("1"), at("2")}
    pastry.receive(at("2"), Alive(SECOND, ()), SECOND)
    assert Changed((at("2"),), ()) in pastry.take()


def test_who_does_not_answer_is_gone_and_whoever_names_it_is_not_believed_until_it_speaks() -> None:
    pastry = alone("5")
    hear(pastry, at("1"), at("9"))
    for second in range(1, 6):
        pastry.tick(second * SECOND, 0)
        pastry.receive(at("9"), Alive(second * SECOND, ()), second * SECOND + 1)
    assert pastry.closest(at("5"), 9) == [at("5"), at("9")]
    assert any(isinstance(output, Changed) and output.went == (at("1"),) for output in pastry.take())
    for _ in range(3):
        pastry.receive(at("9"), Alive(5 * SECOND, (at("1"),)), 5 * SECOND + 2)
    assert at("1") not in pastry.peers
    assert len(sent(pastry, at("1"))) == 1, "it is asked itself, once between two heartbeats"
    pastry.receive(at("1"), Probe(0, ()), 5 * SECOND + 3)
    assert at("1") in pastry.peers


def test_a_node_that_was_lost_while_its_link_stayed_is_joined_through_until_its_ring_answers() -> None:
    pastry = alone("5")
    hear(pastry, at("1"), at("9"))
    pastry.join(at("1"), 0)
    assert sent(pastry, at("1")) == [], "it is known from the ring"
    pastry.failed(at("1"), SECOND)
    pastry.failed(at("9"), SECOND)
    pastry.take()
    for second in (2, 3):
        pastry.tick(second * SECOND, 0)
        assert sent(pastry, at("1")) == [Join(at("5"), 0, at("1"))]
    pastry.receive(at("9"), Share((), at("1")), 3 * SECOND)
    pastry.take()
    pastry.tick(4 * SECOND, 0)
    assert sent(pastry, at("1")) == []
    pastry.failed(at("1"), 5 * SECOND)
    pastry.unlink(at("1"))
    pastry.take()
    pastry.tick(6 * SECOND, 0)
    assert sent(pastry, at("1")) == [], "there is no way to it any more"


def test_who_leaves_hands_over_its_leaves() -> None:
    pastry = alone("5")
    hear(pastry, at("1"))
    pastry.receive(at("1"), Leaving((at("2"), at("5"))), SECOND)
    assert not pastry.peers
    assert len(sent(pastry, at("2"))) == 1, "it is asked itself"
    hear(pastry, at("2"))
    pastry.leave(SECOND)
    assert sent(pastry, at("2"))[-1] == Leaving((at("2"),))


def test_leaves_are_told_once_and_again_when_they_change() -> None:
    pastry = alone("5")
    hear(pastry, at("1"))
    pastry.tick(SECOND, 0)
    (first,) = sent(pastry, at("1"))
    pastry.receive(at("1"), Alive(SECOND, ()), SECOND)
    pastry.tick(2 * SECOND, 0)
    (second,) = sent(pastry, at("1"))
    hear(pastry, at("9"))
    pastry.tick(3 * SECOND, 0)
    third = sent(pastry, at("1"))[-1]
    assert isinstance(first, Probe)
    assert isinstance(second, Probe)
    assert isinstance(third, Probe)
    assert second.leaves == ()
    assert third.leaves == (at("1"), at("9"))


def test_rows_are_asked_for_and_answered() -> None:
    pastry = alone("80", leaves=2, neighbours=0)
    hear(pastry, at("7f"), at("81"), at("31"), at("3f"))
    pastry.receive(at("31"), Row(0), SECOND)
    assert sent(pastry, at("31")) == [Share((at("31"), at("3f"), at("7f")))]
    pastry.tick(20 * SECOND, 1)
    assert any(isinstance(output, Send) and isinstance(output.message, Row) for output in pastry.take())


def test_what_cannot_be_true_is_refused() -> None:
    pastry = alone()
    with pytest.raises(PeerError, match="a node id has 16 bytes, not 3"):
        pastry.receive(b"abc", Leaving(()), 0)
    with pytest.raises(PeerError, match="nodes in one message"):
        pastry.receive(at("1"), Share((at("2"),) * (MAX_SHARED + 1)), 0)
    with pytest.raises(PeerError, match="sent 5 us from now"):
        pastry.receive(at("1"), Alive(5, ()), 0)
    with pytest.raises(PeerError, match="cannot be read"):
        decode(b"\xc1")
    assert decode(encode(Join(at("1"), 2, at("3")))) == Join(at("1"), 2, at("3"))
    for settings in ({"bits": 3}, {"leaves": 3}, {"neighbours": -1}, {"parts": 3}):
        with pytest.raises(UsageError):
            Settings(**settings)
