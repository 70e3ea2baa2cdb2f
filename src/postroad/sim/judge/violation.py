"""A rule of the network that did not hold."""

from __future__ import annotations


class Violation(Exception):
    """Names the rule, says what was seen, and tags what its story is about."""

    def __init__(self, rule: str, text: str, tags: tuple[str, ...] = ()) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text
        self.tags = tags
        self.story: tuple[str, ...] = ()
