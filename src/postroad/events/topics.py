"""Topics and topic patterns.

A topic is a path of levels split by "/", such as `orders/eu`. A pattern may have "+" for one whole level
and "#" as its last level for the rest, the parent included: `a/#` matches `a`, `a/b` and `a/b/c`. Like in
MQTT, levels may be empty, and a pattern that begins with a wildcard does not match a topic whose first
level begins with "$": what the network says about itself is not part of "everything".

The topic number is a hash that lets brokers compare topics as integers; equal numbers are verified by
their bytes wherever that matters.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from postroad import kernel
from postroad.errors import TooLargeError, UsageError, shorten
from postroad.wire.frames import Limits

RESERVED: Final = "$postroad"  # first level of the topics of the network's own history
_MAX_TOPIC_BYTES: Final = 0xFFFF  # what the length field can say
_CACHED_TOPICS: Final = 4096
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_WILDCARD: Final = re.compile("[+#]")
_SHOWN: Final = 40  # characters of a topic in an error


def topic_number(topic: bytes) -> int:
    """FNV-1a, 64 bits, of the topic's UTF-8."""
    return kernel.fnv1a64(topic)


@lru_cache(maxsize=_CACHED_TOPICS)
def encode_topic(topic: str, topic_bytes: int, topic_depth: int) -> tuple[bytes, int]:
    """The UTF-8 and the number of a topic that is fit to publish to."""
    data = _encoded(topic, topic_bytes, topic_depth, "topic")
    if _WILDCARD.search(topic):
        raise UsageError(f"the topic {_shown(topic)} to publish to has a wildcard")
    return data, topic_number(data)


def check_topic(topic: str, limits: Limits) -> None:
    """UsageError unless one can publish to this topic."""
    encode_topic(topic, limits.topic_bytes, limits.topic_depth)


def check_pattern(pattern: str, limits: Limits) -> None:
    """UsageError unless one can subscribe with this pattern."""
    _encoded(pattern, limits.topic_bytes, limits.topic_depth, "topic pattern")
    levels = pattern.split("/")
    for index, level in enumerate(levels):
        if level not in ("+", "#") and _WILDCARD.search(level):
            raise UsageError(
                f"a wildcard stands for a whole level, {_shown(level)} of {_shown(pattern)} does not"
            )
        if level == "#" and index != len(levels) - 1:
            raise UsageError(f"'#' can only be the last level of {_shown(pattern)}")


def _encoded(text: str, topic_bytes: int, topic_depth: int, what: str) -> bytes:
    if not isinstance(text, str):
        raise UsageError(f"a {what} is a text, not {type(text).__name__}")
    if not text:
        raise UsageError(f"a {what} is not empty")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the {what} {_shown(text)} is not UTF-8") from None
    limit = min(topic_bytes, _MAX_TOPIC_BYTES)
    if len(data) > limit:
        raise TooLargeError(f"the {what} {_shown(text)} has {len(data)} bytes, the limit is {limit}")
    if _CONTROL.search(text):
        raise UsageError(f"the {what} {_shown(text)} has a control character")
    depth = text.count("/") + 1
    if depth > topic_depth:
        raise TooLargeError(f"the {what} {_shown(text)} has {depth} levels, the limit is {topic_depth}")
    return data


def _shown(text: str) -> str:
    return repr(shorten(text, _SHOWN))


def pattern_matches(pattern: str, topic: str) -> bool:
    """Whether a checked pattern matches a checked topic: the reference that the index is tested against."""
    wanted, levels = pattern.split("/"), topic.split("/")
    if wanted[0] in ("+", "#") and topic.startswith("$"):
        return False
    if wanted[-1] == "#":
        del wanted[-1]
        if len(levels) < len(wanted):
            return False
        levels = levels[: len(wanted)]
    return len(levels) == len(wanted) and all(
        want in ("+", level) for want, level in zip(wanted, levels, strict=True)
    )
