"""Reading answers: a broker of another version may leave a field out, or say something else in it.

What is not of the kind that is expected counts as not said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MAX_TEXT: Final = 200  # characters of anything that is shown in a cell
MOST: Final = 2**64  # no figure of a broker is larger

Answer = Mapping[str, Any]


def number(answer: Answer, key: str) -> float:
    value = answer.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST:
        return 0.0
    return float(value)


def maybe(answer: Answer, key: str) -> float | None:
    return None if answer.get(key) is None else number(answer, key)


def text(answer: Answer, key: str) -> str:
    value = answer.get(key)
    return shown(value) if isinstance(value, str) else ""


def rows(answer: Answer, key: str) -> list[Answer]:
    value = answer.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def texts(answer: Answer, key: str) -> list[str]:
    value = answer.get(key)
    return [shown(row) for row in value if isinstance(row, str)] if isinstance(value, list) else []


def within(answer: Answer, key: str) -> Answer:
    value = answer.get(key)
    return value if isinstance(value, Mapping) else {}


def shown(value: str, most: int = MAX_TEXT) -> str:
    """Text from the network, fit to be looked at: what cannot be seen is marked."""
    visible = "".join(letter if letter.isprintable() else "\ufffd" for letter in value[: most + 1])
    return visible if len(visible) <= most else visible[: most - 1] + "…"
