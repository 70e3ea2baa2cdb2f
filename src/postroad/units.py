"""Time and sizes are integers with their unit in the name: `_us` microseconds, `_ms` milliseconds.

Cores take `now_us`, microseconds since the Unix epoch, as an argument and never read a clock.
"""

from __future__ import annotations

import math
import re
from typing import Final

from postroad.errors import UsageError

MILLISECOND_US: Final = 1_000
SECOND_US: Final = 1_000_000
DAY_US: Final = 86_400 * SECOND_US

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_SIZES: Final = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_DURATIONS_US: Final = {
    "us": 1,
    "ms": MILLISECOND_US,
    "s": SECOND_US,
    "m": 60 * SECOND_US,
    "h": 3600 * SECOND_US,
    "d": 86400 * SECOND_US,
}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def _quantity(text: str, scale: dict[str, int], example: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in scale:
        raise UsageError(f"{text!r} is not a quantity such as {example}")
    value = float(match[1]) * scale[match[2].lower()]
    if not math.isfinite(value):
        raise UsageError(f"{text[:20]}... is too large a quantity")
    return round(value)


def size(text: str | int) -> int:
    """Bytes from `1048576`, `'64 KiB'`, `'1 MiB'`."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise UsageError(f"a size is a number of bytes or a text such as '64 KiB', not {type(text).__name__}")
    return text if isinstance(text, int) else _quantity(text, _SIZES, "'64 KiB' or '1 MiB'")


def duration_us(text: str) -> int:
    """Microseconds from `'250 ms'`, `'30 s'`, `'2 h'`, `'0'`."""
    return 0 if text.strip() == "0" else _quantity(text, _DURATIONS_US, "'250 ms' or '30 s'")
