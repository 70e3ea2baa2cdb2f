"""Attributes: typed values that selectors ask about.

They are encoded sorted by name, so that equal sets are equal bytes.

Each is a name length u8, the name, a type u8 (0 text, 1 integer, 2 float, 3 boolean) and a value: text as
u16 length and UTF-8, integer i64, float f64, boolean u8. NaN is refused: it equals nothing, itself included,
so no selector could ask for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import isnan
from typing import Final

import numpy as np

from postroad import kernel
from postroad.errors import PeerError, TooLargeError, UsageError
from postroad.kernel.layout import Value as Value
from postroad.wire.frames import Limits

_TEXT_LENGTH: Final = struct.Struct("<H")
_INTEGER: Final = struct.Struct("<q")
_FLOAT: Final = struct.Struct("<d")


def encode_attributes(attributes: Mapping[str, Value], limits: Limits) -> bytes:
    """The encoded attributes; UsageError for what cannot be one, TooLargeError for too many."""
    if not attributes:
        return b""
    if type(attributes) is not dict and not isinstance(attributes, Mapping):
        raise UsageError(f"attributes are a mapping of names to values, not {type(attributes).__name__}")
    if len(attributes) > limits.attributes:
        raise TooLargeError(f"{len(attributes)} attributes, the limit is {limits.attributes}")
    try:
        return kernel.encode_attributes(attributes)
    except UsageError:
        plain = {name: _plain(value) for name, value in attributes.items()}
        if all(value is attributes[name] for name, value in plain.items()):
            raise
        return kernel.encode_attributes(plain)


def _plain(value: Value) -> Value:
    """numpy's numbers are Python's."""
    return value.item() if isinstance(value, np.generic) else value


def decode_attributes(data: bytes) -> dict[str, Value]:
    """Of a message that no kernel has checked; PeerError unless all of it is attributes."""
    attributes: dict[str, Value] = {}
    at = 0
    try:
        while at < len(data):
            name_end = at + 1 + data[at]
            name, kind = data[at + 1 : name_end].decode(), data[name_end]
            at, value = _decode_value(data, name_end + 1, kind)
            if not name or name in attributes or at > len(data):
                raise PeerError(f"attribute {name!r} is nameless, cut or there twice")
            attributes[name] = value
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise PeerError(f"attributes of {len(data)} bytes cannot be read: {error}") from None
    return attributes


def _decode_value(data: bytes, at: int, kind: int) -> tuple[int, Value]:
    """Where it ends, and the value."""
    if kind == 0:
        (size,) = _TEXT_LENGTH.unpack_from(data, at)
        return at + 2 + size, data[at + 2 : at + 2 + size].decode()
    if kind == 1:
        return at + 8, int(_INTEGER.unpack_from(data, at)[0])
    if kind == 2:
        number = float(_FLOAT.unpack_from(data, at)[0])
        if isnan(number):
            raise PeerError("an attribute is not a number")
        return at + 8, number
    if kind == 3 and data[at] in (0, 1):
        return at + 1, data[at] == 1
    raise PeerError(f"an attribute has type {kind} with a value that it cannot have")
