"""The checkpoint token: how far a subscriber has consumed each pubend (spec D3; durable paper, section 2).

CT(s, p) is the tick of pubend p up to which subscriber s has consumed everything, so a token is a vector
clock. It belongs to the subscriber, who can keep it with its own state in one transaction, and any broker
accepts it. A pubend that a token does not name is one whose first tick the subscriber has not seen: tick 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, final

from postroad.errors import UsageError
from postroad.ids import parse_pubend, pubend_text

MAX_TOKEN_PUBENDS: Final = 20_480  # so many fit a control frame, whatever their ticks
MAX_TOKEN_TICK: Final = (1 << 63) - 1


@final
class CheckpointToken(Mapping[int, int]):
    """Pubend -> tick. Immutable; pubends at tick 0 are left out, so equal tokens are equal as text."""

    __slots__ = ("_ticks",)

    def __init__(self, ticks: Mapping[int, int] | None = None) -> None:
        named = {pubend: tick for pubend, tick in sorted((ticks or {}).items()) if tick}
        if len(named) > MAX_TOKEN_PUBENDS:
            raise UsageError(f"a token of {len(named)} pubends, at most {MAX_TOKEN_PUBENDS} are possible")
        for pubend, tick in named.items():
            if not (0 <= pubend < 1 << 64 and 0 < tick <= MAX_TOKEN_TICK):
                raise UsageError(f"tick {tick} of pubend {pubend_text(pubend)} cannot be in a token")
        self._ticks = named

    def __getitem__(self, pubend: int) -> int:
        return self._ticks[pubend]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ticks)

    def __len__(self) -> int:
        return len(self._ticks)

    def __hash__(self) -> int:
        return hash(tuple(self._ticks.items()))

    def __repr__(self) -> str:
        return f"CheckpointToken({self.to_json()})"

    def tick(self, pubend: int) -> int:
        """CT(s, p)."""
        return self._ticks.get(pubend, 0)

    def advanced(self, pubend: int, tick: int) -> CheckpointToken:
        """The token after everything up to `tick` was consumed as well; it never goes back."""
        return self if tick <= self.tick(pubend) else CheckpointToken({**self._ticks, pubend: tick})

    def maximum(self, other: CheckpointToken) -> CheckpointToken:
        """What the two have consumed together."""
        return CheckpointToken({p: max(self.tick(p), other.tick(p)) for p in (*self, *other)})

    def minimum(self, other: CheckpointToken) -> CheckpointToken:
        """What both have consumed."""
        return CheckpointToken({p: min(tick, other.tick(p)) for p, tick in self._ticks.items()})

    def covers(self, other: CheckpointToken) -> bool:
        """Everything consumed at `other` is consumed here."""
        return all(self.tick(pubend) >= tick for pubend, tick in other.items())

    def to_json(self) -> str:
        return json.dumps({pubend_text(pubend): tick for pubend, tick in self._ticks.items()})

    @classmethod
    def from_json(cls, text: str | bytes) -> CheckpointToken:
        try:
            ticks = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"a checkpoint token is a JSON object: {error}") from None
        if not isinstance(ticks, dict) or not all(type(tick) is int for tick in ticks.values()):
            raise UsageError("a checkpoint token is a JSON object of pubends and ticks")
        return cls({parse_pubend(name): tick for name, tick in ticks.items()})
