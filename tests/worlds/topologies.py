"""What brokers know of each other, without any links between them."""

from __future__ import annotations

from postroad.overlay.topology import Topology


def linked(me: int, other: int) -> Topology:
    """That of a broker with one neighbour, which has said so as well: there is a way to it."""
    here, there = (
        Topology(me=number, node=bytes([number]) * 16, name=f"b{number}", boot=1) for number in (me, other)
    )
    here.link_up(other, 1, 0)
    there.link_up(me, 1, 0)
    own = there.take_own()
    assert own is not None
    here.accept(own, 0)
    return here
