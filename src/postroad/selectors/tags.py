"""Tags: events and selectors as sets of bits, such that a match implies a superset (spec B2, paper 3.1).

An event has a tag for each prefix of its topic, one for the whole topic, and for each attribute one that
says it is there and one for its value. A selector is a set of conjunctions (`boxes`), and each has the tags
of what it demands exactly: a topic or the levels before the first wildcard, a value, or that an attribute
is there. What cannot be said so (a range, LIKE, arithmetic) adds no value; that the attribute is there it
does imply. IS NULL implies nothing. So the bits of an event that a selector matches contain the bits of one
of its conjunctions, and the converse holds up to the chance of a Bloom filter: where a conjunction is not
`exact`, not even that.

A filter of 256 bits folds to one of 64 or 32 by joining its quarters or eighths, which keeps the superset:
what routes requests by content (spec B5) has at most 64 attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from postroad import kernel
from postroad.errors import UsageError
from postroad.events.attributes import Value
from postroad.selectors.boxes import Box
from postroad.selectors.domains import PRESENT, Domain
from postroad.selectors.selector import Selector

WIDTHS: Final = (64, 128, 256)
HASHES: Final = {64: 1, 128: 2, 256: 3}  # bits a tag: more of them fill a narrow filter too soon
WIDTH: Final = 256  # the default
_MIX: Final = 0xFF51_AFD7_ED55_8CCD
_MAX_U64: Final = (1 << 64) - 1
_CACHED: Final = 65_536  # tags whose bits are remembered
_SEPARATOR: Final = b"\x00"  # between an attribute's name and its value


class Mask(msgspec.Struct, frozen=True):
    """The bits of one conjunction. `exact`: an event that has all its tags matches, but for collisions."""

    bits: int
    exact: bool


def event_bits(topic: str, attributes: Mapping[str, Value], width: int = WIDTH) -> int:
    """The filter of an event, as an integer."""
    bits = _bits(b"t" + topic.encode(), width)
    prefix = ""
    for level in topic.split("/"):
        prefix += level
        bits |= _bits(b"p" + prefix.encode(), width)
        prefix += "/"
    for name, value in attributes.items():
        key = name.encode()
        bits |= _bits(b"a" + key, width) | _bits(_value_tag(key, value), width)
    return bits


def selector_masks(selector: Selector, width: int = WIDTH) -> tuple[Mask, ...]:
    """One for each conjunction; none if the selector matches nothing."""
    topic, exact = _topic_bits(selector.topic, width)
    masks: dict[Mask, None] = {}
    for box in selector.boxes:
        bits, whole = _box_bits(box, width)
        masks[Mask(topic | bits, exact and whole)] = None
    return tuple(masks)


def check_width(width: int) -> None:
    if width not in WIDTHS:
        raise UsageError(f"a filter of {width} bits; it has {', '.join(map(str, WIDTHS))}")


def matched(bits: int, masks: tuple[Mask, ...]) -> bool:
    """Whether an event with these bits may match (`bits` is a superset of one of the masks)."""
    return any(bits & mask.bits == mask.bits for mask in masks)


def fold(bits: int, width: int, to: int) -> int:
    """A narrower filter of the same set: wherever one is a superset, so are the folded ones."""
    while width > to:
        width //= 2
        bits = (bits >> width) | (bits & (1 << width) - 1)
    return bits


def positions(bits: int) -> list[int]:
    """Of the ones, the lowest first."""
    places: list[int] = []
    while bits:
        low = bits & -bits
        places.append(low.bit_length() - 1)
        bits ^= low
    return places


def false_match(mask: Mask, ones: float, width: int = WIDTH) -> float:
    """The chance that an event which does not match, with this many ones, seems to."""
    return min(1.0, ones / width) ** mask.bits.bit_count()


@lru_cache(maxsize=_CACHED)
def _bits(tag: bytes, width: int) -> int:
    number = kernel.fnv1a64(tag)
    number = (number ^ number >> 33) * _MIX & _MAX_U64  # its high bits alone are poor
    first, step = number & 0xFFFF_FFFF, number >> 32 | 1
    bits = 0
    for at in range(HASHES[width]):
        bits |= 1 << (first + at * step) % width
    return bits


def _value_tag(name: bytes, value: Value) -> bytes:
    """5 and 5.0 are equal to selectors, so they have one tag; a boolean is no number."""
    if isinstance(value, bool):
        text = b"b1" if value else b"b0"
    elif isinstance(value, str):
        text = b"s" + value.encode()
    else:
        whole = int(value) if isinstance(value, int) or value.is_integer() else None
        text = b"n" + (repr(value) if whole is None else str(whole)).encode()
    return b"v" + name + _SEPARATOR + text


def _topic_bits(pattern: str, width: int) -> tuple[int, bool]:
    if not pattern:
        return 0, True
    levels = pattern.split("/")
    wild = next((at for at, level in enumerate(levels) if level in ("+", "#")), len(levels))
    if wild == len(levels):
        return _bits(b"t" + pattern.encode(), width), True
    bits = _bits(b"p" + "/".join(levels[:wild]).encode(), width) if wild else 0
    # "#" alone demands that no topic of the network itself is meant, which its tags do not say.
    return bits, levels[wild] == "#" and wild > 0


def _box_bits(box: Box, width: int) -> tuple[int, bool]:
    bits, exact = 0, not box.opaque
    for name, domain in box.domains.items():
        if domain.missing:
            exact = False
            continue
        value = _only_value(domain)
        key = name.encode()
        bits |= _bits(b"a" + key if value is None else _value_tag(key, value), width)
        exact = exact and (value is not None or domain == PRESENT)
    return bits, exact


def _only_value(domain: Domain) -> Value | None:
    """The one value that a domain allows; None if there are several."""
    if domain.booleans and not domain.numbers and not domain.texts:
        return {1: False, 2: True}.get(domain.booleans)
    spans = domain.numbers or domain.texts
    if domain.booleans or len(spans) != 1 or (domain.numbers and domain.texts):
        return None
    low, high = spans[0]
    if high is None or low[0] != high[0] or (low[1], high[1]) != (0, 1):
        return None
    value: Value = low[0]
    return value
