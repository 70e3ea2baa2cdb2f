"""Numbers, sizes, times and names as people read them."""

from __future__ import annotations

from postroad.units import GIB, KIB, MIB

_SPANS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def count(number: int, noun: str, many: str = "") -> str:
    """`1 event`, `2,000 events`; `many` where the plural is not one with an s."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def span(seconds: float) -> str:
    """How long, in its largest unit: `3 hours`."""
    for noun, length in _SPANS:
        if seconds >= length:
            return count(int(seconds // length), noun)
    return "0 seconds"


def size(number: float) -> str:
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} B"


def printable(text: str) -> str:
    """Others chose names: they are no commands to the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
