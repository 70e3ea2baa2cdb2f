"""Every field that a peer can send has a bound in `wire.bounds`, of the kind that its type needs."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worlds.durable_brokers import DurableNet

from postroad.errors import PeerError
from postroad.wire import bounds, frames
from postroad.wire.bounds import BOUNDS, Bytes, Flag, Items, Number, Pairs, Record, Row, Text
from postroad.wire.frames import CONTROL, Kind


def structures() -> list[type]:
    """All messages, and the structures in them."""
    found: dict[type, None] = {}

    def look(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
            found[kind] = None
            for hint in typing.get_type_hints(kind).values():
                look(hint)
        for part in typing.get_args(kind):
            look(part)

    for message in CONTROL.values():
        look(message)
    return list(found)


def discover(**values: int) -> frames.Discover:
    numbers = {"attempt": 1, "port": 1, "offset_us": 0, "hops": 1} | values
    return frames.Discover(
        uuid=bytes(16), host="192.0.2.1", cookie=b"", credential=b"", key=b"", certificate="", **numbers
    )


def fits(hint: Any, bound: Any) -> bool:
    """Whether a bound is one for values of this type, and all the way down."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and parts[-1] is Ellipsis:
        return isinstance(bound, Items) and fits(parts[0], bound.each)
    if origin is tuple:
        return isinstance(bound, Row) and all(fits(part, bound.each) for part in parts)
    if origin is dict:
        return isinstance(bound, Pairs) and fits(parts[0], bound.key) and fits(parts[1], bound.value)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return bound == Record(hint)
    kinds: dict[Any, type] = {int: Number, bool: Flag, str: Text, bytes: Bytes}
    return hint in kinds and isinstance(bound, kinds[hint])


@pytest.mark.parametrize("kind", structures(), ids=lambda kind: kind.__name__)
def test_every_field_has_a_bound(kind: type) -> None:
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if not name.startswith("__")}
    listed = BOUNDS.get(kind, {})
    for name, hint in hints.items():
        assert name in listed, (
            f"a peer can send {kind.__name__}.{name} ({hint}) of any size: "
            f"say its bound in the row of {kind.__name__} in src/postroad/wire/bounds.py"
        )
        assert fits(hint, listed[name]), (
            f"{kind.__name__}.{name} is a {hint}, its bound {listed[name]} is not"
        )
    assert listed.keys() == hints.keys(), f"bounds of fields that {kind.__name__} does not have"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            frames.Subscribe(number=1, topic="t", where="", key="k" * 1_000_000),
            "Subscribe.key: a text of 1000000",
        ),
        (frames.Subscribe(number=1, topic="t", where="", durable="d" * 5_000), "Subscribe.durable"),
        (frames.Request(number=1, what="subs", arguments={str(n): "" for n in range(65)}), "65 pairs"),
        (frames.Request(number=1, what="subs", arguments={"x" * 65: ""}), "Request.arguments: a text of 65"),
        (frames.Ended(number=1, code="c" * 65, reason=""), "Ended.code"),
        (discover(offset_us=(1 << 64) - 1), "Discover.offset_us"),
        (discover(offset_us=-(1 << 62)), "Discover.offset_us"),
        (discover(attempt=17), "Discover.attempt"),
        (discover(port=0), "Discover.port"),
        (discover(hops=65), "Discover.hops"),
        (frames.Direct(room="r" * 65, body=b""), "Direct.room"),
        (
            frames.InterestUpdate(
                owner=1,
                base=0,
                version=1,
                added=(),
                removed=(),
                claims=(frames.InterestClaim(entry=1, name="n" * 256, epoch=1),),
            ),
            "InterestUpdate.claims: InterestClaim.name: a text of 256 characters, at most 255",
        ),
        (
            frames.Settle(number=1, ticket=1, keys=(bytes(4_097),), verdict="accept"),
            "Settle.keys: 4097 bytes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_over_its_bound_is_refused_with_value_and_bound(message: frames.Message, said: str) -> None:
    with pytest.raises(PeerError, match=said):
        bounds.check(message)


def test_numbers_say_what_they_are_and_may_be() -> None:
    with pytest.raises(PeerError, match="-1 is not between 0 and 4294967295"):
        bounds.U32.check(-1)
    bounds.U32.check(7)


def test_what_every_message_and_request_costs_is_written_down() -> None:
    """docs/reference/security.md has a row for each, with who pays."""
    text = (Path(__file__).parents[3] / "docs" / "reference" / "security.md").read_text()
    _, _, table = text.partition("## What each message costs, and who pays")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = set(re.findall(r"[\w.]+", " ".join(rows)))
    assert {kind.name for kind in Kind} <= named
    net = DurableNet(1)
    assert net.brokers[0] is not None
    assert net.brokers[0]._board.requests.keys() <= named
