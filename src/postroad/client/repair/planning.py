"""How likely a loss is detected, and the record that an aim takes (spec B11, paper 3.5, figure 2)."""

from __future__ import annotations

from typing import Final

from postroad.client.repair.settings import MAX_RECORD_ENTRIES
from postroad.errors import UsageError

MAX_RECORD: Final = 1_000
ENTRY_BYTES: Final = 32  # of a filter of 256 bits


def detection(match: float, loss: float, record: int) -> float:
    """Equation 1: one of the `record` messages after a lost one matches and arrives."""
    return 1 - (1 - match + match * loss) ** record


def shared_detection(match: float, loss: float, record: int, sharing: int, overlap: float) -> float:
    """That at least one detects it of those who miss a message: its receiver, and each of `sharing` - 1
    others that wants it too with the chance `overlap` (3.5)."""
    alone = detection(match, loss, record)
    return 1 - (1 - alone) * (1 - overlap * alone) ** (sharing - 1)


def record_for(aim: float, match: float, loss: float, sharing: int, overlap: float) -> int | None:
    """The shortest record that reaches the aim; None if none of MAX_RECORD entries does."""
    for record in range(MAX_RECORD + 1):
        if shared_detection(match, loss, record, sharing, overlap) >= aim:
            return record
    return None


def summary_detection(loss: float) -> float:
    """Each entry is in two summaries, and a range of which neither came is asked for, up to 8 times."""
    both = loss * loss
    return 1 - both * (1 - (1 - loss) ** 2) ** 8


def plan(
    *, match: float, loss: float, record: int, sharing: int, overlap: float, aim: float
) -> dict[str, float | None]:
    for name, value in (("match", match), ("loss", loss), ("overlap", overlap), ("aim", aim)):
        if not 0 <= value <= 1:
            raise UsageError(f"--{name} is between 0 and 1, not {value:g}")
    if not 0 <= record <= MAX_RECORD:
        raise UsageError(f"--record is between 0 and {MAX_RECORD}, not {record}")
    if not 1 <= sharing <= MAX_RECORD:
        raise UsageError(f"--sharing is between 1 and {MAX_RECORD}, not {sharing}")
    reaching = record_for(aim, match, loss, sharing, overlap)
    proposed = MAX_RECORD_ENTRIES if reaching is None else min(reaching, MAX_RECORD_ENTRIES)
    return {
        "detection": shared_detection(match, loss, record, sharing, overlap),
        "record": record,
        "record_bytes": record * ENTRY_BYTES,
        "aim": aim,
        "reaching_record": reaching,
        "proposed_record": proposed,
        "proposed_bytes": proposed * ENTRY_BYTES,
        "proposed_detection": shared_detection(match, loss, proposed, sharing, overlap),
        "summary_detection": summary_detection(loss),
    }
