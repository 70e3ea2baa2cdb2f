"""How much there is of something, told apart by labels: a gauge of which there are a bounded number."""

from __future__ import annotations

from typing import NamedTuple


class Level(NamedTuple):
    """`name` is a metric's; `about` says in one line what it means and what to be alarmed by."""

    name: str
    about: str
    labels: dict[str, str]
    value: float
