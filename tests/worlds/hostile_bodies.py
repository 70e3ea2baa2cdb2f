"""What brokers say to each other inside QUERY, ANSWER and DIRECT, and bodies that somebody made up."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from postroad.clients import network
from postroad.durable.subscriber import moving
from postroad.queues import inbox, messages, talk
from postroad.ring import pastry
from postroad.tracking.query import desk
from postroad.tracking.query.messages import TraceAnswer, TraceQuestion
from postroad.wire.frames import decode_body

Decode = Callable[[bytes], Any]


def of_inquiry(decoder: msgspec.msgpack.Decoder[Any]) -> Decode:
    return lambda body: decode_body(body, decoder)


# What a peer can put into a body -> its type and the function that reads it.
BODIES: dict[str, tuple[Any, Decode]] = {
    "queues": (talk.AllSaid, talk.decode),
    "key of a message": (talk.MessageKey, talk.decode_key),
    "chain": (messages.Chain, talk.decode_chain),
    "arc": (messages.Message, messages.decode),
    "state": (messages.State, messages.decode_state),
    "records": (messages.Records, messages.decode_records),
    "write": (inbox.Operations, inbox.decode_operations),
    "snapshot": (inbox.Snapshot, inbox.decode_snapshot),
    "ring": (pastry.Message, pastry.decode),
    "handover": (moving._Request, of_inquiry(moving._REQUESTS)),
    "handed over": (moving._Answer, of_inquiry(moving._ANSWERS)),
    "claims": (moving._Names, of_inquiry(moving._NAMES)),
    "claimed": (moving._AllKnown, of_inquiry(moving._KNOWN)),
    "deleted": (moving._Deleted, of_inquiry(moving._DELETED)),
    "network": (network._Question, of_inquiry(network._QUESTIONS)),
    "networked": (network._Answer, of_inquiry(network._ANSWERS)),
    "trace": (TraceQuestion, of_inquiry(desk._QUESTIONS)),
    "traced": (TraceAnswer, of_inquiry(desk._ANSWERS)),
}


def made_up(hint: Any, draw: random.Random, depth: int = 0) -> Any:
    """A value for the wire that has the shape of a type, and often an edge of its bounds or beyond."""
    constraint = msgspec.Meta()
    if typing.get_origin(hint) is Annotated:
        hint, constraint = typing.get_args(hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, include_extras=True)
        values = [made_up(hints[name], draw, depth + 1) for name in hint.__struct_fields__]
        if not hint.__struct_config__.array_like:
            return dict(zip(hint.__struct_fields__, values, strict=True))
        tag = hint.__struct_config__.tag
        return values if tag is None else [tag, *values]
    if origin in (typing.Union, types.UnionType):
        return made_up(draw.choice(parts), draw, depth)
    if hint is types.NoneType:
        return None
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        edges = [0, 1, constraint.ge or 0, constraint.le or 1]
        return draw.choice(edges) if draw.random() < 0.97 else draw.choice([-1, 1 << 63, (1 << 64) - 1])
    if hint is float:
        return (
            draw.choice([0.0, 0.5, 1.0]) if draw.random() < 0.97 else draw.choice([-1.0, 2.0, float("nan")])
        )
    if origin is tuple and parts[-1] is not Ellipsis:
        return [made_up(part, draw, depth + 1) for part in parts]
    most = constraint.max_length or 0
    if hint in (str, bytes):
        size = draw.choice([0, 1, 8, min(most, 300)]) if draw.random() < 0.97 else min(most, 1 << 17) + 1
        return "é" * size if hint is str else bytes(size)
    if depth > 8:
        return []
    return [made_up(parts[0], draw, depth + 1) for _ in range(draw.choice([0, 1, 1, 2]))]


def bent(body: bytes, draw: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(draw.choice([0, 1, 1, 3])):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.1 else changed)
