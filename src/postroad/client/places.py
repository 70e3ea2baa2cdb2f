"""Where a client goes next: one list of addresses, whether it was given, was found, or a broker that stops
told of others; and whether another broker is so much better that it is worth a move.

A client that was given its addresses tries them in turn, for ever. One that seeks looks for brokers when it
has tried all that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from postroad.errors import BugError

MAX_PLACES: Final = 64
MUCH_BETTER: Final = 1.0  # of weight: half of all cores busy, 50 ms of delay, or 100 connections
REVIEWS: Final = 3  # one after the other that say so, before a client moves


class Places:
    """The addresses, and the one that is in use or tried next."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)  # each once
        self._at = 0
        self._tried = 0  # since the last success, or the last new list
        self.failures: dict[str, str] = {}  # address -> why it was not possible the last time

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._addresses)

    @property
    def current(self) -> str:
        if not self._addresses:
            raise BugError("there is nowhere to go")
        return self._addresses[self._at]

    def arrived(self) -> None:
        self._tried = 0
        self.failures.clear()

    def failed(self, reason: str) -> None:
        self.failures[self.current] = reason

    def go_on(self) -> bool:
        """The next one is current; False when all have been tried."""
        self._tried += 1
        self._at = (self._at + 1) % len(self._addresses)
        return self._tried % len(self._addresses) != 0

    def replace(self, addresses: Sequence[str]) -> None:
        """Only these from now on."""
        self._addresses = list(dict.fromkeys(addresses))[:MAX_PLACES]
        self._at = self._tried = 0

    def add(self, addresses: Sequence[str]) -> None:
        """These are tried too, behind all others."""
        self._addresses = list(dict.fromkeys([*self._addresses, *addresses]))[:MAX_PLACES]

    def move(self, addresses: Sequence[str]) -> None:
        """First these; what is known already stays behind them, and the current one last."""
        left = self.current
        rest = [address for address in self._addresses if address != left]
        self.replace([*(address for address in addresses if address != left), *rest, left])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A broker that a search found, and how good it would be for this client."""

    address: str
    weight: float


class Reviews:
    """Whether to move. A client that moved at the first sign would soon move back, and all clients of a
    broker would move together: it takes several reviews, a large difference, and then a coin."""

    def __init__(self) -> None:
        self._in_favour = 0  # reviews in a row that found a much better broker

    def __call__(self, choices: Sequence[Choice], current: str, coin: int) -> Choice | None:
        """Where to move. Not the choice of a search, which goes by the ping: that may be where it is now."""
        here = next((choice for choice in choices if choice.address == current), None)
        best = max(choices, key=lambda choice: choice.weight, default=None)
        if here is None or best is None or best.weight - here.weight < MUCH_BETTER:
            self._in_favour = 0
            return None
        self._in_favour += 1
        if self._in_favour < REVIEWS or not coin:
            return None
        self._in_favour = 0
        return best
