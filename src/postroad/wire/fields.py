"""Types for the fields of what brokers say inside QUERY, ANSWER and DIRECT: each with the bound that its
decoder holds it to.

A body is opaque to `wire.bounds`, which checks the fields of frames. Its own fields say their bounds as
constraints of their types, and what breaks one cannot be decoded: PeerError. A test walks all bodies and
names the fields that have none.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from postroad.wire.frames import MAX_CONTROL_BYTES

MAX_NUMBER: Final = (1 << 63) - 1

Number: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]  # a count, a time, an epoch
Broker: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Word: TypeAlias = Annotated[str, Meta(max_length=64)]
Name: TypeAlias = Annotated[str, Meta(max_length=255)]
Text: TypeAlias = Annotated[str, Meta(max_length=4_096)]
Topic: TypeAlias = Annotated[str, Meta(max_length=65_535)]
Where: TypeAlias = Annotated[str, Meta(max_length=65_536)]
Whole: TypeAlias = Annotated[str, Meta(max_length=MAX_CONTROL_BYTES)]  # as much as a frame holds
Data: TypeAlias = Annotated[bytes, Meta(max_length=MAX_CONTROL_BYTES)]  # the same; judged by whoever reads it
Key: TypeAlias = Annotated[bytes, Meta(max_length=64)]
