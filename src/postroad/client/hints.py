"""What people write by the habits of other systems: allowed here, and hardly ever meant.

`orders/*` is a topic with a star in it, and `currency = "EUR"` compares two attributes. Neither is refused,
since both can be meant; a `HabitWarning` says what would do what other systems do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Final

from postroad.errors import shorten

_LEVELS: Final = {"*": "+", "**": "#", ">": "#"}
_TEXT: Final = re.compile(r"'(?:[^']|'')*'")
_QUOTED: Final = re.compile(r'(?:[=<>(,]|\b(?:LIKE|AND))\s*"((?:[^"]|"")*)"', re.IGNORECASE)
_NO_ATTRIBUTE: Final = re.compile(r'(?<![\w$."])(payload|topic)(?![\w$."])', re.IGNORECASE)
_SHOWN: Final = 40  # characters of what somebody wrote


class HabitWarning(UserWarning):
    """A subscription that can hardly match what was meant."""


def warn_of_habits(topic: object, where: object, *, stacklevel: int) -> None:
    """`stacklevel`: how many calls above this one the program's own line is."""
    texts = [text if isinstance(text, str) else "" for text in (topic, where)]  # others are refused later
    for hint in hints(*texts):
        warnings.warn(hint, HabitWarning, stacklevel=stacklevel + 1)


def hints(topic: str, where: str) -> Iterator[str]:
    meant = _meant(topic)
    if meant != topic:
        yield (
            f"the topic {shorten(topic, _SHOWN)!r} is taken as it stands: `+` is any one level, `#` all that"
            f" follow, and `/` parts levels, as in {shorten(meant, _SHOWN)!r}"
        )
    for name in _QUOTED.findall(where):
        shown = shorten(name, _SHOWN)
        yield f"\"{shown}\" in double quotes is an attribute's name; a text is in single quotes: '{shown}'"
    for name in dict.fromkeys(_NO_ATTRIBUTE.findall(_TEXT.sub("''", where))):
        instead = "give the topic beside the condition" if name.lower() == "topic" else "publish it as one"
        yield f"a condition is over attributes, and {name} is none unless publishers set it: {instead}"


def _meant(topic: str) -> str:
    """The pattern that does here what this one does elsewhere; the topic itself where it does so already."""
    levels = topic.split("/")
    if len(levels) == 1 and any(level in _LEVELS for level in topic.split(".")):
        levels = topic.split(".")
    if not _LEVELS.keys() & set(levels):
        return topic
    meant = [_LEVELS.get(level, level) for level in levels]
    return "/".join(meant if "#" not in meant else meant[: meant.index("#") + 1])
