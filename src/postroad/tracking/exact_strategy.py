"""Strategy exact: an asynchronous log of (id, what, who), the paper's ASYNC (section 5; spec T11).

Entries of 24 bytes collect in memory and are stored when they have grown to `log_bytes` or the persistence
interval ends: 0 id | 16 who u32 | 20 what u8 | 21 zeros. `who` is a broker number, or for a delivery the
position of the subscriber's name in the record. Each stored part has a range of message time like a filter,
so the same index finds the parts a message can be in. Its answers are never wrong: every rate is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from postroad.ids import ID_BYTES
from postroad.tracking.attachment import Change
from postroad.tracking.effects import TrackingEffect
from postroad.tracking.history import Range, Window, times_of
from postroad.tracking.keys import LOG, HistoryKey
from postroad.tracking.messages import ANY_ORIGIN, Forwarding, Receiver, Sighting
from postroad.tracking.moments import Times
from postroad.tracking.record import FilterMeta
from postroad.tracking.recorder import Look, Recorder
from postroad.tracking.settings import TrackingConfig

ENTRY: Final = np.dtype([("id", "V16"), ("who", "<u4"), ("what", "u1"), ("origin", "V3")])
MAX_NAMES: Final = 16_384  # subscribers named in one part
_PUBLISHED, _ROUTED, _FORWARDED, _DELIVERED = 1, 2, 3, 4
_KEY: Final = HistoryKey(LOG)
