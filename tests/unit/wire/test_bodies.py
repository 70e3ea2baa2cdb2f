"""Every field of a body inside QUERY, ANSWER and DIRECT has a bound, and its decoder holds it to that.

What cannot be decoded, or is out of bounds, is PeerError and nothing else: any other exception would end the
broker.
"""

from __future__ import annotations

import ast
import random
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from tests.worlds.hostile_bodies import BODIES, bent, made_up

import postroad
from postroad.errors import PeerError
from postroad.queues import inbox, messages, talk
from postroad.queues.inbox import Inboxes, Limits

# Rooms that take bodies: the modules there that decode something, and what they decode if it is no body.
DECODES = {
    "clients/network.py": "",
    "clients/stored.py": "rows of the disk",
    "durable/publisher/pubend_rows.py": "rows of the disk",
    "durable/publisher/release.py": "rows of the disk",
    "durable/subscriber/claims.py": "rows of the disk",
    "durable/subscriber/groups.py": "rows of the disk",
    "durable/subscriber/subscriptions.py": "rows of the disk",
    "durable/subscriber/moving.py": "",
    "queues/arcs.py": "rows and records of the disk",
    "queues/inbox.py": "",
    "queues/messages.py": "",
    "queues/reports.py": "JSON of dead letters, passed on to a client as it is",
    "queues/talk.py": "",
    "ring/pastry.py": "",
    "tracking/attachment_log.py": "records of the disk",
    "tracking/groups.py": "names that this broker made",
    "tracking/query/desk.py": "",
    "tracking/record.py": "records of the disk",
}


def unbounded(hint: Any, where: str, seen: set[type]) -> list[str]:
    """The places in a type where a value has no bound."""
    constraint = None
    if typing.get_origin(hint) is Annotated:
        hint, constraint = typing.get_args(hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if hint in seen:
            return []
        seen.add(hint)
        hints = typing.get_type_hints(hint, include_extras=True)
        names = hint.__struct_fields__
        return [lack for name in names for lack in unbounded(hints[name], f"{hint.__name__}.{name}", seen)]
    if origin in (typing.Union, types.UnionType):
        return [lack for part in parts for lack in unbounded(part, where, seen)]
    if hint in (bool, types.NoneType):
        return []
    if hint in (int, float):
        is_bound = constraint is not None and None not in (
            constraint.ge,
            constraint.le if constraint.lt is None else constraint.lt,
        )
        return [] if is_bound else [f"{where}: a number"]
    if origin is tuple and parts[-1] is not Ellipsis:
        return [lack for part in parts for lack in unbounded(part, where, seen)]
    assert hint in (str, bytes) or origin in (tuple, list), f"{where}: say how a {hint} is bounded"
    lacks = [] if constraint is not None and constraint.max_length is not None else [f"{where}: {hint}"]
    return lacks + [lack for part in parts if part is not ... for lack in unbounded(part, where, seen)]


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_body_has_a_bound(body: str) -> None:
    assert unbounded(BODIES[body][0], body, set()) == []


def test_a_field_without_a_bound_is_named() -> None:
    class Inner(msgspec.Struct):
        number: int
        texts: Annotated[tuple[str, ...], msgspec.Meta(max_length=2)]
        data: Annotated[bytes, msgspec.Meta(max_length=2)]

    globals()["Inner"] = Inner
    lacks = unbounded(list[Inner | None], "body", set())
    assert lacks == [f"body: {list[Inner | None]}", "Inner.number: a number", f"Inner.texts: {str}"]


def test_every_module_that_decodes_in_these_rooms_is_known() -> None:
    """Whoever decodes something new says here what it is, and a body above."""
    source = Path(postroad.__file__).parent
    found = set()
    for room in (
        "clients",
        "overlay",
        "streams",
        "links",
        "besteffort",
        "durable",
        "queues",
        "ring",
        "tracking",
    ):
        for path in source.glob(f"{room}/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
                if name.endswith(("msgpack.decode", "json.decode", "Decoder", "msgspec.convert")):
                    found.add(str(path.relative_to(source)))
    assert found == DECODES.keys()


@pytest.mark.parametrize("name", BODIES)
def test_what_a_peer_makes_up_is_read_or_its_own_fault(name: str) -> None:
    kind, decode = BODIES[name]
    draw = random.Random(name)
    read = refused = 0
    for attempt in range(400):
        if attempt % 4 == 0:
            body = draw.randbytes(draw.randrange(64))
        else:
            body = msgspec.msgpack.encode(made_up(kind, draw))
            body = bent(body, draw) if attempt % 4 == 1 else body
        try:
            decode(body)
            read += 1
        except PeerError:
            refused += 1
    assert read > 20
    assert refused > 20


@pytest.mark.parametrize("name", BODIES)
def test_bodies_nested_without_end_are_refused(name: str) -> None:
    with pytest.raises(PeerError):
        BODIES[name][1](b"\x91" * 500_000)


def test_one_over_the_bound_is_refused_and_the_bound_is_not() -> None:
    talk.decode(msgspec.msgpack.encode([talk.Removed("i" * 255, "c")]))
    for said in (
        talk.Removed("i" * 256, "c"),
        talk.Work(1, 0, talk.PutTask((), "express", False, False)),
        talk.Work(1, 0, talk.JoinTask("i", "c", "p", False, talk.MAX_WINDOW + 1)),
        talk.Elsewhere(1, 0, messages.View(talk.NO_CHAIN, 1, 1, (), (b"e",), messages.Base(1, ()))),
        talk.Locate(-1, b"n" * 16, 0),
        talk.Chains(True),
    ):
        body = msgspec.msgpack.encode([said])
        if isinstance(said, talk.Chains):
            assert talk.decode(body) == (said,)
            continue
        with pytest.raises(PeerError, match="cannot be read"):
            talk.decode(body)
    with pytest.raises(PeerError, match="cannot be read"):
        talk.decode(msgspec.msgpack.encode([talk.AskChains()] * (talk.MAX_SAID + 1)))


def test_a_write_that_cannot_be_read_changes_nothing() -> None:
    machine = Inboxes(Limits())
    before = machine.snapshot()
    with pytest.raises(PeerError, match="is no list of operations"):
        machine.apply(msgspec.msgpack.encode([[6, "i" * 256, "c", [], 1]]))
    assert machine.snapshot() == before


def test_a_source_without_a_session_has_none() -> None:
    """A client gives a key back, and a broker a message, with whatever source it likes."""
    assert inbox.session_of("0123456789abcdefshop") == bytes.fromhex("0123456789abcdef")
    assert inbox.session_of("no digits of a session") == b""
