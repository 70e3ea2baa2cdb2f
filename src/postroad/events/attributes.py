"""Attributes: typed values that selectors ask about.

They are encoded sorted by name, so that equal sets are equal bytes.

Each is a name length u8, the name, a type u8 (0 text, 1 integer, 2 float, 3 boolean) and a value: text as
u16 length and UTF-8, integer i64, float f64, boolean u8. NaN is refused: it equals nothing, itself included,
so no selector could ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from postroad import kernel
from postroad.errors import TooLargeError, UsageError
from postroad.kernel.layout import Value as Value
from postroad.wire.frames import Limits


def encode_attributes(attributes: Mapping[str, Value], limits: Limits) -> bytes:
    """The encoded attributes; UsageError for what cannot be one, TooLargeError for too many."""
    if not attributes:
        return b""
    if type(attributes) is not dict and not isinstance(attributes, Mapping):
        raise UsageError(f"attributes are a mapping of names to values, not {type(attributes).__name__}")
    if len(attributes) > limits.attributes:
        raise TooLargeError(f"{len(attributes)} attributes, the limit is {limits.attributes}")
    return kernel.encode_attributes(attributes)
