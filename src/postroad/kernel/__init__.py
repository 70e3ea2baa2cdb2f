"""The compiled inner loops and nothing else.

Each function stands twice: in Cython (`check`, `frames`, `bloom`, `match`, `columns`) and in plain Python
(`reference.py`, `match_reference.py`, `columns_reference.py`), which says what it means and takes over where
nothing was compiled. POSTROAD_KERNEL=reference in the environment forces the latter. `match` and `columns`
have no names here: their only users, `selectors` and `spark`, import them, or their references when
`wanted(...)` is false.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Final

FORCED_REFERENCE: Final = os.environ.get("POSTROAD_KERNEL") == "reference"


def wanted(module: str) -> bool:
    """Whether the compiled module is there and to be used. It reads integers as the machine has them."""
    if FORCED_REFERENCE or sys.byteorder != "little":
        return False
    return find_spec(f"{__name__}.{module}") is not None


if wanted("check"):
    from postroad.kernel.check import check_batch, fnv1a64
else:
    from postroad.kernel.reference import check_batch, fnv1a64

if wanted("frames"):
    from postroad.kernel.frames import (
        concatenate,
        decode_attributes,
        encode_attributes,
        gather,
        intact,
        packed_ids,
        sealed,
        unpack_rows,
        with_ticks,
    )
else:
    from postroad.kernel.reference import (
        concatenate,
        decode_attributes,
        encode_attributes,
        gather,
        intact,
        packed_ids,
        sealed,
        unpack_rows,
        with_ticks,
    )

if wanted("bloom"):
    from postroad.kernel.bloom import bloom_add, bloom_contains
else:
    from postroad.kernel.reference import bloom_add, bloom_contains

COMPILED: Final = all(wanted(module) for module in ("bloom", "check", "frames", "match"))

__all__ = [
    "COMPILED",
    "FORCED_REFERENCE",
    "bloom_add",
    "bloom_contains",
    "check_batch",
    "concatenate",
    "decode_attributes",
    "encode_attributes",
    "fnv1a64",
    "gather",
    "intact",
    "packed_ids",
    "sealed",
    "unpack_rows",
    "wanted",
    "with_ticks",
]
